// Writes the probabilities of kept blocks. A task is a (row block, head): the scores of all its kept blocks stay in scratch, so that
// they are computed once. reference.py documents the maths.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>
#include <vector>

#include "native/abi.h"
#include "native/simd.h"
#include "native/stored.h"
#include "native/tiles.h"

namespace crossfill {
namespace {

struct Call {
  Tensor3 query;
  Cache cache;
  Rows rows;
  Index index;
  // [m]: where each kept block of the index goes.
  const int32_t* slots;
  // [n, H], or null to renormalise.
  const float* lse;
  void* blocks;
  float* scales;
  float scale;
  int32_t heads, dtype;
};

// Keys of the column blocks in use, transposed: [KV head][column block][d][64], so that a key is a lane.
class TransposedKeys {
 public:
  TransposedKeys(const Call& call, int threads) : dim_(call.cache.dim) {
    mark_used(call);
    float* data = buffer_.at_least(std::max<int64_t>(1, int64_t(call.cache.kv_heads) * used_.size() * dim_ * kBlock));
    const int64_t tasks = int64_t(call.cache.kv_heads) * used_.size();
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < tasks; ++i)
      if (used_[i % used_.size()])
        transpose(call, int(i / used_.size()), int(i % used_.size()), data + i * dim_ * kBlock);
    data_ = data;
  }

  ConstMatrix at(int kv_head, int column_block) const {
    return {data_ + (int64_t(kv_head) * used_.size() + column_block) * dim_ * kBlock, kBlock};
  }

 private:
  void mark_used(const Call& call) {
    const int64_t blocks = call.rows.block_count ? call.rows.blocks[call.rows.block_count - 1] + 1 : 0;
    used_.assign(blocks, 0);
    const int32_t entries = call.index.offsets[call.heads * call.rows.block_count];
    for (int32_t e = 0; e < entries; ++e) used_[call.index.columns[e]] = 1;
  }

  void transpose(const Call& call, int kv_head, int column_block, float* to) const {
    thread_local Buffer row;
    float* key = row.at_least(dim_);
    const int64_t first = int64_t(column_block) * kBlock;
    const int count = int(std::min<int64_t>(kBlock, call.cache.length - first));
    // Lanes beyond the request are masked later, but must be numbers.
    if (count < kBlock) std::fill(to, to + int64_t(dim_) * kBlock, 0.0f);
    for (int k = 0; k < count; ++k) {
      const Tensor3& keys = call.cache.keys;
      read_floats(row_of(keys, call.cache.row(first + k), kv_head), keys.dtype, dim_, key);
      for (int i = 0; i < dim_; ++i) to[int64_t(i) * kBlock + k] = key[i];
    }
  }

  Buffer buffer_;
  std::vector<char> used_;
  const float* data_ = nullptr;
  int dim_;
};

struct Scratch {
  Buffer query, scores;
};

struct Task {
  const Call& call;
  Scratch& scratch;
  int row_block, head, rows;
  // Places of the rows within their row block, and which row of the task each place is (-1: none).
  int32_t place[kBlock], row_at[kBlock];
  // First kept block, and how many.
  int32_t first, kept;
  // By row: what is subtracted from the scores (base 2), and the factor on the exponentials.
  float offset[kBlock], factor[kBlock];

  // Scores of kept block number `e`: [rows][64].
  float* scores(int e) const { return scratch_scores + int64_t(e) * rows * kBlock; }
  float* scratch_scores;
};

// Query rows as floats, scaled so that 2^score is the exponential.
ConstMatrix scaled_query(const Task& task) {
  const Call& call = task.call;
  const int dim = call.cache.dim;
  float* to = task.scratch.query.at_least(int64_t(kBlock) * dim);
  for (int r = 0; r < task.rows; ++r) {
    const int64_t n = call.rows.starts[task.row_block] + r;
    float* row = to + int64_t(r) * dim;
    read_floats(row_of(call.query, n, task.head), call.query.dtype, dim, row);
    for (int i = 0; i < dim; ++i) row[i] *= call.scale * kLog2e;
  }
  return {to, dim};
}

void score(const Task& task, const TransposedKeys& keys) {
  const Call& call = task.call;
  const ConstMatrix query = scaled_query(task);
  const int kv_head = task.head / (call.heads / call.cache.kv_heads);
  for (int e = 0; e < task.kept; ++e) {
    const int32_t column_block = call.index.columns[task.first + e];
    float* scores = task.scores(e);
    multiply<false>(task.rows, query, keys.at(kv_head, column_block), call.cache.dim, kBlock, {scores, kBlock});
    if (column_block != call.rows.blocks[task.row_block]) continue;
    for (int r = 0; r < task.rows; ++r)
      std::fill(scores + r * kBlock + task.place[r] + 1, scores + (r + 1) * kBlock, kMinusInfinity);
  }
}

// A row's greatest score, or its given log-sum-exp; finite also where a row sees no kept key.
float offset_of(const Task& task, int row) {
  const Call& call = task.call;
  if (call.lse) return call.lse[(call.rows.starts[task.row_block] + row) * int64_t(call.heads) + task.head] * kLog2e;
  Vec greatest = broadcast(-FLT_MAX);
  for (int e = 0; e < task.kept; ++e)
    for (int i = 0; i < kBlock; i += kWidth) greatest = max(greatest, load(task.scores(e) + row * kBlock + i));
  return largest(greatest);
}

// Turns a row's scores into exponentials; their sum.
float exponentiate(const Task& task, int row, float offset) {
  Vec total = broadcast(0.0f);
  for (int e = 0; e < task.kept; ++e) {
    float* scores = task.scores(e) + row * kBlock;
    for (int i = 0; i < kBlock; i += kWidth) {
      const Vec exponent = load(scores + i) - broadcast(offset);
      // Beyond what exp2 takes; only a log-sum-exp that is too small leads there.
      const Vec x = select_ge(exponent, broadcast(127.0f), broadcast(FLT_MAX), exp2(exponent));
      total = total + x;
      store(scores + i, x);
    }
  }
  return sum(total);
}

float row_sum(const float* row) {
  Vec total = broadcast(0.0f);
  for (int i = 0; i < kBlock; i += kWidth) total = total + load(row + i);
  return sum(total);
}

void write_codes(const float* row, float* scale, uint8_t* to) {
  Vec greatest = broadcast(0.0f);
  for (int i = 0; i < kBlock; i += kWidth) greatest = max(greatest, load(row + i));
  *scale = largest(greatest) / 255.0f;
  if (!(row_sum(row) >= 0.0f)) {  // NaN is passed on, by the scale
    *scale = std::numeric_limits<float>::quiet_NaN();
    std::fill(to, to + kBlock, uint8_t(1));
    return;
  }
  // A scale that cannot be inverted stands for a row of nothing.
  if (!(*scale >= FLT_MIN)) *scale = 0.0f;
  const float inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
  alignas(64) float codes[kBlock];
  for (int i = 0; i < kBlock; i += kWidth) store(codes + i, round_nearest(load(row + i) * broadcast(inverse)));
  for (int i = 0; i < kBlock; ++i) to[i] = uint8_t(int32_t(codes[i]));
}

// Row `place` of a slot.
void write_place(const Call& call, int64_t slot, int place, const float* row) {
  const int64_t at = (slot * kBlock + place) * kBlock;
  if (call.dtype == kUint8) {
    write_codes(row, call.scales + slot * kBlock + place, static_cast<uint8_t*>(call.blocks) + at);
  } else {
    char* to = static_cast<char*>(call.blocks) + at * (call.dtype == kFloat32 ? 4 : 2);
    write_floats(row, kBlock, call.dtype, to);
  }
}

void write(const Task& task, int e) {
  alignas(64) static const float kNothing[kBlock] = {};
  alignas(64) float scaled[kBlock];
  for (int place = 0; place < kBlock; ++place) {
    const int row = task.row_at[place];
    if (row >= 0) {
      const float* values = task.scores(e) + row * kBlock;
      const Vec factor = broadcast(task.factor[row]);
      for (int i = 0; i < kBlock; i += kWidth) store(scaled + i, load(values + i) * factor);
    }
    write_place(task.call, task.call.slots[task.first + e], place, row >= 0 ? scaled : kNothing);
  }
}

void run_task(const Call& call, const TransposedKeys& keys, int row_block, int head) {
  thread_local Scratch scratch;
  const int32_t start = call.rows.starts[row_block];
  const int64_t list = int64_t(head) * call.rows.block_count + row_block;
  Task task{call, scratch, row_block, head, call.rows.starts[row_block + 1] - start, {}, {}, call.index.offsets[list],
            call.index.offsets[list + 1] - call.index.offsets[list], {}, {}, nullptr};
  std::fill(task.row_at, task.row_at + kBlock, -1);
  for (int r = 0; r < task.rows; ++r) {
    task.place[r] = int32_t(call.rows.positions[start + r] % kBlock);
    task.row_at[task.place[r]] = r;
  }
  task.scratch_scores = scratch.scores.at_least(std::max<int64_t>(1, int64_t(task.kept) * task.rows * kBlock));
  score(task, keys);
  for (int r = 0; r < task.rows; ++r) {
    const float total = exponentiate(task, r, offset_of(task, r));
    task.factor[r] = call.lse ? 1.0f : total > 0.0f ? 1.0f / total : 0.0f;
  }
  for (int e = 0; e < task.kept; ++e) write(task, e);
}

// Lists with most blocks first, so that no thread is left alone with a long one at the end.
std::vector<int64_t> by_length(const Call& call) {
  std::vector<int64_t> order(call.heads * call.rows.block_count);
  std::iota(order.begin(), order.end(), int64_t(0));
  const int32_t* offsets = call.index.offsets;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return offsets[a + 1] - offsets[a] > offsets[b + 1] - offsets[b];
  });
  return order;
}

}  // namespace
}  // namespace crossfill

CROSSFILL_EXPORT void crossfill_pack_map(const crossfill::Tensor3* query, const crossfill::Cache* cache,
                                        const crossfill::Rows* rows, const crossfill::Index* index,
                                        const crossfill::Packed* packed, const int32_t* slots, const float* lse,
                                        float scale, int32_t threads) {
  using namespace crossfill;
  const Call call{*query, *cache, *rows, *index, slots, lse, const_cast<void*>(packed->blocks),
                  const_cast<float*>(packed->scales), scale, packed->heads, packed->dtype};
  const TransposedKeys keys(call, threads);
  const std::vector<int64_t> order = by_length(call);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t i = 0; i < int64_t(order.size()); ++i)
    run_task(call, keys, int(order[i] % rows->block_count), int(order[i] / rows->block_count));
}
