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

// Calls f(softmax, i, head) for every i < count and head. The heads that share keys (`share` of them) follow each other, and so do
// the i, the last (with the longest past) first: the keys stay in the processor's cache from one task to the next.
template <typename F>
void each_task(int64_t count, int32_t heads, int32_t share, int32_t threads, F f) {
#pragma omp parallel num_threads(threads)
  {
    static thread_local Softmax softmax;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < count * heads; ++task) {
      const int64_t group = task / (count * share), within = task % (count * share);
      f(softmax, count - 1 - within / share, int32_t(group * share + within % share));
    }
  }
}

}  // namespace crossfill
