// Attention and its block masses in one pass; or the masses alone, from a sample of the rows.
#include "native/groups.h"

namespace crossfill {
namespace {

// Every stride-th row of row block i, counted backwards from its last; at most 64 / stride, rounded up.
int add_sample(const Rows& rows, int64_t i, int64_t stride, int32_t head, Group& group) {
  const int64_t last = rows.starts[i + 1] - 1;
  const int64_t count = (last - rows.starts[i]) / stride + 1;
  for (int64_t s = count - 1; s >= 0; --s) group.add(last - s * stride, rows.positions[last - s * stride], head);
  return int(count);
}

}  // namespace
}  // namespace crossfill

// `mass` is [heads, row blocks, columns], zero on entry; `lse` is [rows, heads] or null.
CROSSFILL_EXPORT void crossfill_block_mass(const crossfill::Tensor3* query, const crossfill::Cache* cache,
                                          const crossfill::Rows* rows, int32_t heads, float scale,
                                          const crossfill::Tensor3* out, float* lse, float* mass, int64_t columns,
                                          int32_t threads) {
  using namespace crossfill;
  const int32_t share = heads / cache->kv_heads;
  each_task(rows->block_count, heads, share, heads_together(*cache), threads, [&](Workspace& at, int64_t i, int32_t head, int32_t count) {
    Group group[kHeadsTogether];
    for (int h = 0; h < count; ++h) {
      group[h] = rows_of_head(*rows, rows->starts[i], rows->starts[i + 1], head + h);
      at.softmax[h].start(*query, group[h], cache->dim, scale, true);
    }
    attend_all(at, *cache, head / share, count, group[0].greatest, true);
    for (int h = 0; h < count; ++h) {
      at.softmax[h].finish(*out, lse, heads);
      at.softmax[h].add_masses(0, group[h].count, mass + ((head + h) * rows->block_count + i) * columns);
    }
  });
}

// Several row blocks' samples share a group of lanes, as many as always fit.
CROSSFILL_EXPORT void crossfill_block_mass_sampled(const crossfill::Tensor3* query, const crossfill::Cache* cache,
                                                  const crossfill::Rows* rows, int32_t heads, float scale, int64_t stride,
                                                  float* mass, int64_t columns, int32_t threads) {
  using namespace crossfill;
  const int32_t share = heads / cache->kv_heads;
  const int64_t sample = (kBlock + stride - 1) / stride, per_group = std::max<int64_t>(1, kLanes / sample);
  const int64_t groups = (rows->block_count + per_group - 1) / per_group;
  each_task(groups, heads, share, 1, threads, [&](Workspace& at, int64_t g, int32_t head, int32_t) {
    Softmax& softmax = at.softmax[0];
    const int64_t from = g * per_group, to = std::min(from + per_group, rows->block_count);
    Group group;
    int starts[kLanes + 1] = {0};
    for (int64_t i = from; i < to; ++i)
      starts[i - from + 1] = starts[i - from] + add_sample(*rows, i, stride, head, group);
    softmax.start(*query, group, cache->dim, scale, true);
    attend_all(at, *cache, head / share, 1, group.greatest, false);
    for (int64_t i = from; i < to; ++i)
      softmax.add_masses(starts[i - from], starts[i - from + 1], mass + (head * rows->block_count + i) * columns);
  });
}
