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

// Heads of one KV head may take turns at a block of keys.
constexpr int kHeadsTogether = 4;

// They do where a block has to be copied, once for all of them then. Elsewhere each finds the keys in the processor's cache, and its
// own queries stay there if it is left alone (.95 to 1 times the time; with copies together is 1.03 to 1.1 times as fast).
inline int32_t heads_together(const Cache& cache) { return BlockReader::copies(cache.keys) ? kHeadsTogether : 1; }

// What a thread works with, kept from task to task.
struct Workspace {
  Softmax softmax[kHeadsTogether];
  KeyBlockReader reader;
};

// Attends groups of the same rows to everything in their past.
inline void attend_all(Workspace& at, const Cache& cache, int32_t kv_head, int groups, int64_t greatest, bool with_values) {
  for (int32_t column = 0; int64_t(column) * kBlock <= greatest; ++column) {
    const KeyBlock block = at.reader.read(cache, kv_head, column, greatest, with_values);
    for (int g = 0; g < groups; ++g) at.softmax[g].visit(block);
  }
}

// Calls f(workspace, i, head, heads) for every i < count and the heads in runs of at most `together`, each within one KV head's
// `share`. All runs of a KV head follow each other, and so do the i, the last (with the longest past) first: the keys stay in the
// processor's cache from one task to the next.
template <typename F>
void each_task(int64_t count, int32_t heads, int32_t share, int32_t together, int32_t threads, F f) {
  const int64_t runs = (share + together - 1) / together, tasks = count * (heads / share) * runs;
#pragma omp parallel num_threads(threads)
  {
    static thread_local Workspace workspace;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const int32_t first = int32_t(task % runs) * together;
      const int32_t kv_head = int32_t(task / (count * runs));
      f(workspace, count - 1 - task / runs % count, kv_head * share + first, std::min(together, share - first));
    }
  }
}

}  // namespace crossfill
