// Attention by mixed maps: O_h = Σ_k W[k, h] A_k V. A task is a (row block, KV head): the receiver heads that share values share
// the loaded values and the loaded blocks of the map. reference.py documents the maths, map_attention/cost.py which form to take.
#include <algorithm>
#include <numeric>
#include <vector>

#include "native/abi.h"
#include "native/simd.h"
#include "native/stored.h"
#include "native/tiles.h"

namespace crossfill {
namespace {

enum Form : int32_t { kPaper = 1, kMix = 2, kValuesFirst = 3, kSparse = 4 };

struct Call {
  Packed packed;
  // [R]: which row block of the map each row block of `rows` is.
  const int64_t* packed_rows;
  // [H_S, H_R]
  const float* weights;
  Cache cache;
  Rows rows;
  Tensor3 out;
  int32_t receivers, form;

  int group() const { return receivers / cache.kv_heads; }
  int width() const { return int(round_up(cache.dim, kWidth)); }
};

// A stored block of one sender head, and that head's weights in the receiver heads at hand.
struct Term {
  const void* tile;
  const float* scales;
  const float* weights;
  int head;
};

struct Scratch {
  Buffer mixed, values, sums, row;
  std::vector<Term> terms, chosen;
  std::vector<char> used;
};

// What a task is about: the rows of one row block and the receiver heads of one KV head.
struct Task {
  const Call& call;
  Scratch& scratch;
  int row_block, kv_head, first_head, heads, rows;
  // Places of the rows within their row block.
  int32_t place[kBlock];
  // [heads or H_S][kBlock][width]
  float* sums;
};

// mixed[h][row] = Σ over terms of weight[h] · stored row, for H receiver heads; `stride` floats lie between the heads.
template <typename Stored, int H>
void mix_row(const Term* terms, int count, int place, float* mixed, int64_t stride) {
  for (int column = 0; column < kBlock; column += kVectorTile * kWidth) {
    Vec sum[H][kVectorTile];
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < kVectorTile; ++v) sum[h][v] = broadcast(0.0f);
    for (int t = 0; t < count; ++t) {
      const Stored* stored = static_cast<const Stored*>(terms[t].tile) + place * kBlock + column;
      Vec x[kVectorTile];
      for (int v = 0; v < kVectorTile; ++v) x[v] = load_stored(stored + v * kWidth);
      if (sizeof(Stored) == 1) {
        const Vec scale = broadcast(terms[t].scales[place]);
        for (int v = 0; v < kVectorTile; ++v) x[v] = x[v] * scale;
      }
      for (int h = 0; h < H; ++h) {
        const Vec weight = broadcast(terms[t].weights[h]);
        for (int v = 0; v < kVectorTile; ++v) sum[h][v] = fma(weight, x[v], sum[h][v]);
      }
    }
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < kVectorTile; ++v) store(mixed + h * stride + column + v * kWidth, sum[h][v]);
  }
}

template <typename Stored>
void mix_row(int heads, const Term* terms, int count, int place, float* mixed, int64_t stride) {
  switch (heads) {
    case 1: return mix_row<Stored, 1>(terms, count, place, mixed, stride);
    case 2: return mix_row<Stored, 2>(terms, count, place, mixed, stride);
    case 3: return mix_row<Stored, 3>(terms, count, place, mixed, stride);
    case 4: return mix_row<Stored, 4>(terms, count, place, mixed, stride);
    case 5: return mix_row<Stored, 5>(terms, count, place, mixed, stride);
    default: return mix_row<Stored, 6>(terms, count, place, mixed, stride);
  }
}

// Keys of a column block: those of the request.
int keys_of(const Call& call, int column_block) {
  return int(std::min<int64_t>(kBlock, call.cache.length - int64_t(column_block) * kBlock));
}

// Values of a column block as floats; in place where their layout suits the cache, else copied.
ConstMatrix values_of(const Task& task, int column_block) {
  const Call& call = task.call;
  const Tensor3& values = call.cache.values;
  const int64_t position = int64_t(column_block) * kBlock;
  const int64_t row_bytes = values.stride0 * int64_t(sizeof(float));
  if (values.dtype == kFloat32 && !call.cache.slots && call.cache.dim % kWidth == 0) {
    char* first = row_of(values, call.cache.row(position), task.kv_head);
    // Rows a multiple of 1 KiB apart would share a few sets of the first-level cache.
    if (row_bytes % 64 == 0 && row_bytes % 1024 != 0 && reinterpret_cast<uintptr_t>(first) % 64 == 0)
      return {reinterpret_cast<const float*>(first), values.stride0};
  }
  const int width = call.width(), keys = keys_of(call, column_block);
  float* copy = task.scratch.values.at_least(int64_t(kBlock) * width);
  for (int key = 0; key < keys; ++key) {
    float* to = copy + int64_t(key) * width;
    read_floats(row_of(values, call.cache.row(position + key), task.kv_head), values.dtype, call.cache.dim, to);
    std::fill(to + call.cache.dim, to + width, 0.0f);
  }
  return {copy, width};
}

// Keys that rows up to `place` of a row block see of a column block: on the diagonal, later ones are zero in the map.
int depth_of(const Task& task, int column_block, int place) {
  const int keys = keys_of(task.call, column_block);
  return column_block == task.call.rows.blocks[task.row_block] ? std::min(keys, place + 1) : keys;
}

// sums[head + h] += (Σ terms) · values for `heads` receiver heads. A strip of rows is mixed, then multiplied at once, so that the
// mixed map never leaves the first-level cache.
template <typename Stored>
void add_mixed(const Task& task, const std::vector<Term>& terms, int column_block, int head, int heads) {
  const ConstMatrix values = values_of(task, column_block);
  const int width = task.call.width();
  const int64_t stride = kRowTile * kBlock;
  float* mixed = task.scratch.mixed.at_least(kRowTile * stride);
  for (int first = 0; first < task.rows; first += kRowTile) {
    const int rows = std::min(kRowTile, task.rows - first);
    const int depth = depth_of(task, column_block, task.place[first + rows - 1]);
    for (int i = 0; i < rows; ++i)
      mix_row<Stored>(heads, terms.data(), int(terms.size()), task.place[first + i], mixed + i * kBlock, stride);
    for (int h = 0; h < heads; ++h)
      multiply_rows<true>(rows, {mixed + h * stride, kBlock}, values, depth, width,
                          {task.sums + (int64_t(head + h) * kBlock + first) * width, width});
  }
}

// products[sender head] += block · values.
template <typename Stored>
void add_product(const Task& task, const Term& term, int column_block, ConstMatrix values) {
  static const float kOne = 1.0f;
  const Term whole{term.tile, term.scales, &kOne, term.head};
  const int width = task.call.width();
  float* strip = task.scratch.mixed.at_least(kRowTile * kBlock);
  for (int first = 0; first < task.rows; first += kRowTile) {
    const int rows = std::min(kRowTile, task.rows - first);
    const int depth = depth_of(task, column_block, task.place[first + rows - 1]);
    ConstMatrix block{strip, kBlock};
    if (sizeof(Stored) == sizeof(float) && task.place[first + rows - 1] - task.place[first] == rows - 1) {
      block.data = static_cast<const float*>(term.tile) + task.place[first] * kBlock;
    } else {
      for (int i = 0; i < rows; ++i)
        mix_row<Stored, 1>(&whole, 1, task.place[first + i], strip + i * kBlock, kBlock);
    }
    multiply_rows<true>(rows, block, values, depth, width,
                        {task.sums + (int64_t(term.head) * kBlock + first) * width, width});
  }
}

bool any_weight(const Term& term, int first, int count) {
  return std::any_of(term.weights + first, term.weights + first + count, [](float w) { return w != 0.0f; });
}

// The terms with a weight in receiver heads first … first + heads - 1 of the group; their weights start there.
void choose_terms(const std::vector<Term>& terms, int first, int heads, bool zeros_too, std::vector<Term>& chosen) {
  chosen.clear();
  for (const Term& term : terms)
    if (zeros_too || any_weight(term, first, heads))
      chosen.push_back({term.tile, term.scales, term.weights + first, term.head});
}

// Calls visit(column block) for each column block of the task's row block, with the blocks that are kept there in scratch.terms.
template <typename Stored, typename Visit>
void each_position(const Task& task, Visit visit) {
  const Packed& packed = task.call.packed;
  std::vector<Term>& terms = task.scratch.terms;
  const int64_t row = task.call.packed_rows[task.row_block];
  for (int32_t e = packed.offsets[row], end = packed.offsets[row + 1]; e < end;) {
    const int column_block = packed.columns[e] / packed.heads;
    terms.clear();
    for (; e < end && packed.columns[e] / packed.heads == column_block; ++e) {
      const int head = packed.columns[e] % packed.heads;
      const int64_t slot = packed.slots[e];
      const void* tile = static_cast<const Stored*>(packed.blocks) + slot * kBlock * kBlock;
      const float* scales = packed.scales ? packed.scales + slot * kBlock : nullptr;
      terms.push_back({tile, scales, task.call.weights + int64_t(head) * task.call.receivers + task.first_head, head});
    }
    visit(column_block);
  }
}

// Receiver heads first … first + heads - 1 of the group, all positions.
template <typename Stored>
void mix_then_values(const Task& task, int first, int heads, bool zeros_too) {
  each_position<Stored>(task, [&](int column_block) {
    choose_terms(task.scratch.terms, first, heads, zeros_too, task.scratch.chosen);
    if (!task.scratch.chosen.empty())
      add_mixed<Stored>(task, task.scratch.chosen, column_block, first, heads);
  });
}

template <typename Stored>
void sparse(const Task& task) {
  each_position<Stored>(task, [&](int column_block) {
    for (int h = 0; h < task.heads; ++h) {
      choose_terms(task.scratch.terms, h, 1, false, task.scratch.chosen);
      if (!task.scratch.chosen.empty()) add_mixed<Stored>(task, task.scratch.chosen, column_block, h, 1);
    }
  });
}

template <typename Stored>
void values_first(const Task& task) {
  task.scratch.used.assign(task.call.packed.heads, 0);
  each_position<Stored>(task, [&](int column_block) {
    choose_terms(task.scratch.terms, 0, task.heads, false, task.scratch.chosen);
    if (task.scratch.chosen.empty()) return;
    const ConstMatrix values = values_of(task, column_block);
    for (const Term& term : task.scratch.chosen) {
      task.scratch.used[term.head] = 1;
      add_product<Stored>(task, term, column_block, values);
    }
  });
}

void write_row(const Task& task, int head, int row, const float* sum) {
  const int64_t n = task.call.rows.starts[task.row_block] + row;
  const Tensor3& out = task.call.out;
  write_floats(sum, task.call.cache.dim, out.dtype, row_of(out, n, task.first_head + head));
}

// What the sender heads' products give a receiver head's row.
const float* mix_products(const Task& task, int head, int row) {
  const int width = task.call.width();
  float* sum = task.scratch.row.at_least(width);
  std::fill(sum, sum + width, 0.0f);
  for (int k = 0; k < task.call.packed.heads; ++k) {
    const float weight = task.call.weights[int64_t(k) * task.call.receivers + task.first_head + head];
    if (weight == 0.0f || !task.scratch.used[k]) continue;
    const float* product = task.sums + (int64_t(k) * kBlock + row) * width;
    for (int i = 0; i < width; i += kWidth)
      store(sum + i, fma(broadcast(weight), load(product + i), load(sum + i)));
  }
  return sum;
}

template <typename Stored>
void run(const Task& task) {
  const int32_t form = task.call.form;
  if (form == kValuesFirst) values_first<Stored>(task);
  if (form == kSparse) sparse<Stored>(task);
  // As many heads at once as mix_row has registers for; Algorithm 2 takes one.
  const int step = form == kPaper ? 1 : kRowTile;
  if (form == kPaper || form == kMix)
    for (int first = 0; first < task.heads; first += step)
      mix_then_values<Stored>(task, first, std::min(step, task.heads - first), form == kPaper);
  const int width = task.call.width();
  for (int head = 0; head < task.heads; ++head)
    for (int row = 0; row < task.rows; ++row)
      write_row(task, head, row,
                form == kValuesFirst ? mix_products(task, head, row)
                                     : task.sums + (int64_t(head) * kBlock + row) * width);
}

void run_task(const Call& call, int row_block, int kv_head) {
  thread_local Scratch scratch;
  const int32_t start = call.rows.starts[row_block];
  Task task{call, scratch, row_block, kv_head, kv_head * call.group(), call.group(),
            call.rows.starts[row_block + 1] - start, {}, nullptr};
  for (int i = 0; i < task.rows; ++i) task.place[i] = int32_t(call.rows.positions[start + i] % kBlock);
  const int64_t sums = int64_t(call.form == kValuesFirst ? call.packed.heads : task.heads) * kBlock * call.width();
  task.sums = scratch.sums.at_least(sums);
  std::fill(task.sums, task.sums + sums, 0.0f);
  switch (call.packed.dtype) {
    case kFloat32: return run<float>(task);
    case kBfloat16: return run<uint16_t>(task);
    default: return run<uint8_t>(task);
  }
}

// Row blocks with most work first, so that no thread is left alone with a long one at the end.
std::vector<int> by_work(const Call& call) {
  std::vector<int> order(call.rows.block_count);
  std::iota(order.begin(), order.end(), 0);
  const auto work = [&](int i) {
    const int64_t row = call.packed_rows[i];
    const int64_t rows = call.rows.starts[i + 1] - call.rows.starts[i];
    return rows * (call.packed.offsets[row + 1] - call.packed.offsets[row]);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return work(a) > work(b); });
  return order;
}

}  // namespace
}  // namespace crossfill

CROSSFILL_EXPORT void crossfill_map_attention(const crossfill::Packed* packed, const int64_t* packed_rows,
                                             const float* weights, const crossfill::Cache* cache,
                                             const crossfill::Rows* rows, const crossfill::Tensor3* out,
                                             int32_t receivers, int32_t form, int32_t threads) {
  using namespace crossfill;
  const Call call{*packed, packed_rows, weights, *cache, *rows, *out, receivers, form};
  const std::vector<int> order = by_work(call);
  const int64_t tasks = int64_t(order.size()) * cache->kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t i = 0; i < tasks; ++i) run_task(call, order[i / cache->kv_heads], int(i % cache->kv_heads));
}
