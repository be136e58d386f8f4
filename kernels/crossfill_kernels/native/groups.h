// How query rows are put into groups of lanes, and work on groups is spread over threads.
#pragma once

#include <utility>

#include "native/attention.h"

namespace crossfill {

// Rows [from, to) of one head.
inline Group rows_of_head(const Rows& rows, int64_t from, int64_t to, int32_t head) {
  Group group;
  for (int64_t row = from; row < to; ++row) group.add(row, rows.positions[row], head);
  return group;
}

// Calls f(softmax, i, head) for every i < count and head, the last i (with the longest past) first, the heads of one i together so
// that they find each other's keys in the cache.
template <typename F>
void each_task(int64_t count, int32_t heads, int32_t threads, F f) {
#pragma omp parallel num_threads(threads)
  {
    static thread_local Softmax softmax;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < count * heads; ++task) {
      f(softmax, count - 1 - task / heads, int32_t(task % heads));
    }
  }
}

}  // namespace crossfill
