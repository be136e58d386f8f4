// Dense causal attention over a paged cache; decode, where there is one row, has its own loop.
#include "native/groups.h"
#include "paged_attention/decode.h"

namespace crossfill {
namespace {

void attend_all(Softmax& softmax, const Cache& cache, int32_t kv_head, const Group& group) {
  for (int32_t column = 0; int64_t(column) * kBlock <= group.greatest; ++column) softmax.visit(cache, kv_head, column);
}

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
  const bool few = rows->count * share <= kLanes;
  const int64_t groups = few ? 1 : (rows->count + kLanes - 1) / kLanes;
  const auto attend = [&](Softmax& softmax, int64_t i, int32_t head) {
    const Group group = few ? rows_of_kv_head(*rows, head, share)
                            : rows_of_head(*rows, i * kLanes, std::min((i + 1) * kLanes, rows->count), head);
    softmax.start(*query, group, cache->dim, scale, false);
    attend_all(softmax, *cache, few ? head : head / share, group);
    softmax.finish(*out, nullptr, heads);
  };
  each_task(groups, few ? cache->kv_heads : heads, few ? 1 : share, threads, attend);
}
