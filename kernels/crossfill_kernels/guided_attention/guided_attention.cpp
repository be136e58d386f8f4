// Attention of each (head, row block) over its own list of column blocks.
#include "native/groups.h"

CROSSFILL_EXPORT void crossfill_guided_attention(const crossfill::Tensor3* query, const crossfill::Cache* cache,
                                                const crossfill::Rows* rows, const crossfill::Index* index, int32_t heads,
                                                float scale, const crossfill::Tensor3* out, int32_t threads) {
  using namespace crossfill;
  const int32_t share = heads / cache->kv_heads;
  each_task(rows->block_count, heads, share, 1, threads, [&](Workspace& at, int64_t i, int32_t head, int32_t) {
    const Group group = rows_of_head(*rows, rows->starts[i], rows->starts[i + 1], head);
    at.softmax[0].start(*query, group, cache->dim, scale, false);
    const int32_t* entry = index->offsets + head * rows->block_count + i;
    for (int32_t e = entry[0]; e < entry[1]; ++e)
      at.softmax[0].visit(at.reader.read(*cache, head / share, index->columns[e], group.greatest));
    at.softmax[0].finish(*out, nullptr, heads);
  });
}
