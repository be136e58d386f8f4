// Attention of each (head, row block) over its own list of column blocks.
#include "native/groups.h"

CROSSFILL_EXPORT void crossfill_guided_attention(const crossfill::Tensor3* query, const crossfill::Cache* cache,
                                                const crossfill::Rows* rows, const crossfill::Index* index, int32_t heads,
                                                float scale, const crossfill::Tensor3* out, int32_t threads) {
  using namespace crossfill;
  const int32_t share = heads / cache->kv_heads;
  each_task(rows->block_count, heads, share, threads, [&](Softmax& softmax, int64_t i, int32_t head) {
    const Group group = rows_of_head(*rows, rows->starts[i], rows->starts[i + 1], head);
    softmax.start(*query, group, cache->dim, scale, false);
    const int32_t* entry = index->offsets + head * rows->block_count + i;
    for (int32_t at = entry[0]; at < entry[1]; ++at) softmax.visit(*cache, head / share, index->columns[at]);
    softmax.finish(*out, nullptr, heads);
  });
}
