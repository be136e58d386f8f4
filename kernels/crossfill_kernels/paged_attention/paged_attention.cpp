// Dense causal attention over a paged cache; decode, where there is one row, has its own loop.
#include "native/groups.h"
#include "paged_attention/decode.h"

namespace crossfill {
namespace {

// All heads of a KV head in one group: for few rows.
Group rows_of_kv_head(const Rows& rows, int32_t kv_head, int32_t share) {
  Group group;
  for (int32_t g = 0; g < share; ++g)
    for (int64_t row = 0; row < rows.count; ++row) group.add(row, rows.positions[row], kv_head * share + g);
  return group;
}

}  // namespace
}  // namespace crossfill

CROSSFILL_EXPORT void crossfill_paged_attention(const crossfill::Tensor3* query, const crossfill::Cache* cache,
                                               const crossfill::Rows* rows, int32_t heads, float scale,
                                               const crossfill::Tensor3* out, int32_t threads) {
  using namespace crossfill;
  const int32_t share = heads / cache->kv_heads;
  if (rows->count == 1 && Decode::fits(*cache)) {
#pragma omp parallel for num_threads(threads)
    for (int32_t head = 0; head < cache->kv_heads; ++head) {
      static thread_local Decode decode;
      decode.run(*query, *cache, head, share, rows->positions[0], scale, *out);
    }
    return;
  }
  if (rows->count * share <= kLanes) {
    each_task(1, cache->kv_heads, 1, 1, threads, [&](Workspace& at, int64_t, int32_t kv_head, int32_t) {
      const Group group = rows_of_kv_head(*rows, kv_head, share);
      at.softmax[0].start(*query, group, cache->dim, scale, false);
      attend_all(at, *cache, kv_head, 1, group.greatest, true);
      at.softmax[0].finish(*out, nullptr, heads);
    });
    return;
  }
  const int64_t groups = (rows->count + kLanes - 1) / kLanes;
  each_task(groups, heads, share, heads_together(*cache), threads, [&](Workspace& at, int64_t i, int32_t head, int32_t count) {
    Group group[kHeadsTogether];
    for (int h = 0; h < count; ++h) {
      group[h] = rows_of_head(*rows, i * kLanes, std::min((i + 1) * kLanes, rows->count), head + h);
      at.softmax[h].start(*query, group[h], cache->dim, scale, false);
    }
    attend_all(at, *cache, head / share, count, group[0].greatest, true);
    for (int h = 0; h < count; ++h) at.softmax[h].finish(*out, nullptr, heads);
  });
}
