// Softmax attention of up to 64 query rows, block of keys by block of keys, with the rows in the lanes of the vectors.
//
// Scores are held transposed, [key][lane]: then a row's maximum and sum are plain operations on whole vectors, and keys and values
// are read as they lie in the cache, a broadcast float at a time. Only queries and outputs are transposed, once each.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "native/abi.h"
#include "native/simd.h"
#include "native/stored.h"
#include "native/tiles.h"

namespace crossfill {

constexpr int kLanes = 64;
constexpr float kLn2 = 0.693147180559945309f;

// A number that templates take, as an argument.
template <int N>
using Count = std::integral_constant<int, N>;

struct Lane {
  int64_t row;
  int64_t position;
  int32_t head;
};

// Query rows that see the same KV head.
struct Group {
  Lane lanes[kLanes];
  int count = 0;
  int64_t least = std::numeric_limits<int64_t>::max(), greatest = -1;

  void add(int64_t row, int64_t position, int32_t head) {
    lanes[count++] = {row, position, head};
    least = std::min(least, position);
    greatest = std::max(greatest, position);
  }
};

// A block's rows of the cache as floats: in place, or copied into `buffer` if they have to be converted, or if they stand so far
// apart that all of them compete for the same few lines of the processor's first cache (1.1 times as fast then).
class BlockReader {
 public:
  // Rows of positions first ... first + count - 1 of one KV head.
  const float* const* read(const Cache& cache, const Tensor3& side, int32_t kv_head, int64_t first, int count) {
    if (!copies(side)) {
      for (int t = 0; t < count; ++t)
        rows_[t] = reinterpret_cast<const float*>(row_of(side, cache.row(first + t), kv_head));
      return rows_;
    }
    float* to = buffer_.at_least(int64_t(kBlock) * cache.dim);
    for (int t = 0; t < count; ++t, to += cache.dim) {
      read_floats(row_of(side, cache.row(first + t), kv_head), side.dtype, cache.dim, to);
      rows_[t] = to;
    }
    return rows_;
  }

  static bool copies(const Tensor3& side) {
    return side.dtype != kFloat32 || side.stride0 * int64_t(sizeof(float)) % kCompeting == 0;
  }

 private:
  static constexpr int64_t kCompeting = 2048;

  const float* rows_[kBlock];
  Buffer buffer_;
};

// A column block as far as the cache and the rows' past reach: a pointer for each key, and for each value if they are wanted.
struct KeyBlock {
  const float* const* keys;
  const float* const* values;
  int64_t first;
  int count;
};

class KeyBlockReader {
 public:
  // Keys beyond position `greatest` are left out; there is one at least.
  KeyBlock read(const Cache& cache, int32_t kv_head, int32_t column, int64_t greatest, bool with_values = true) {
    const int64_t first = int64_t(column) * kBlock;
    const int count = int(std::min<int64_t>(kBlock, std::min(cache.length, greatest + 1) - first));
    const float* const* keys = keys_.read(cache, cache.keys, kv_head, first, count);
    return {keys, with_values ? values_.read(cache, cache.values, kv_head, first, count) : nullptr, first, count};
  }

 private:
  BlockReader keys_, values_;
};

// acc[r][v] += broadcast(column r of `scalars`) * vectors, over `count` steps: the inner loop of both products.
// Step i reads the floats scalars(i, r) and the vectors at `lanes + i * kLanes`.
template <int R, int V, typename Scalar>
inline __attribute__((always_inline)) void accumulate(Vec (&acc)[R][V], const float* lanes, int count, Scalar scalar) {
  for (int i = 0; i < count; ++i) {
    Vec x[V];
    for (int v = 0; v < V; ++v) x[v] = load(lanes + i * kLanes + v * kWidth);
    for (int r = 0; r < R; ++r) {
      const Vec s = broadcast(scalar(i, r));
      for (int v = 0; v < V; ++v) acc[r][v] = fma(s, x[v], acc[r][v]);
    }
  }
}

class Softmax {
 public:
  // `record` keeps what block masses are made of.
  void start(const Tensor3& query, const Group& group, int dim, float scale, bool record) {
    group_ = &group;
    dim_ = dim;
    padded_ = (group.count + kWidth - 1) / kWidth * kWidth;
    record_ = record;
    columns_.clear();
    used_max_.clear();
    block_sum_.clear();
    query_.resize(size_t(dim) * kLanes);
    out_.assign(size_t(dim) * kLanes, 0.0f);
    std::fill(max_, max_ + kLanes, kMinusInfinity);
    std::fill(sum_, sum_ + kLanes, 0.0f);
    load_query(query, scale * kLog2e);
  }

  // Attend to a block of keys that begins in the rows' past.
  void visit(const KeyBlock& block) {
    const int64_t first = block.first;
    const int keys = block.count;
    const float *const *k = block.keys, *const *v = block.values;
    if (record_) {
      columns_.push_back(int32_t(first / kBlock));
      used_max_.resize(columns_.size() * kLanes);
      block_sum_.resize(columns_.size() * kLanes);
    }
    if (group_->least < first + keys - 1) {
      set_limits(first);
      // Narrow groups of lanes leave more of the hidden half of a diagonal block out.
      each_chunk<(kVectorTile > 2 ? 2 : kVectorTile)>([&](auto vectors, int lane) {
        const int seen = seen_keys(lane, decltype(vectors)::value * kWidth, first, keys);
        attend<decltype(vectors)::value>(k, v, lane, seen, true);
      });
    } else {
      each_chunk<kVectorTile>([&](auto vectors, int lane) {
        attend<decltype(vectors)::value>(k, v, lane, keys, false);
      });
    }
  }

  // Writes outputs [n, H, d], and the natural log-sum-exp [n, H] if wanted. A row that saw nothing gives zeros.
  void finish(const Tensor3& out, float* lse, int64_t heads) {
    for (int lane = 0; lane < group_->count; lane += 4) {
      const int lanes = std::min(4, group_->count - lane);
      int x = 0;
      for (; x + 4 <= dim_; x += 4) transpose4(&out_[size_t(x) * kLanes + lane], kLanes, &row_[x], dim_);
      for (; x < dim_; ++x)
        for (int r = 0; r < lanes; ++r) row_[size_t(r) * dim_ + x] = out_[size_t(x) * kLanes + lane + r];
      for (int r = 0; r < lanes; ++r) write_row(out, lane + r, &row_[size_t(r) * dim_]);
    }
    if (lse == nullptr) return;
    for (int lane = 0; lane < group_->count; ++lane) {
      const Lane& l = group_->lanes[lane];
      lse[l.row * heads + l.head] = (max_[lane] + std::log2(sum_[lane])) * kLn2;
    }
  }

  // Adds the mass of lanes [from, to) to mass[column] for each recorded column.
  void add_masses(int from, int to, float* mass) const {
    float share[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) share[lane] = lane >= from && lane < to ? 1.0f / sum_[lane] : 0.0f;
    for (size_t c = 0; c < columns_.size(); ++c) {
      Vec total = broadcast(0);
      for (int lane = 0; lane < padded_; lane += kWidth) {
        const Vec decayed = exp2(load(&used_max_[c * kLanes + lane]) - load(max_ + lane));
        total = fma(load(&block_sum_[c * kLanes + lane]) * decayed, load(share + lane), total);
      }
      mass[columns_[c]] += crossfill::sum(total);
    }
  }

 private:
  // Calls `f` for runs of lanes of at most V vectors, the last run as narrow as it may be.
  template <int V, typename F>
  void each_chunk(F f) {
    int lane = 0;
    for (; lane + (V - 1) * kWidth < padded_; lane += V * kWidth) f(Count<V>(), lane);
    if constexpr (V > 2) {
      if (lane + kWidth < padded_) {
        f(Count<2>(), lane);
        lane += 2 * kWidth;
      }
    }
    if constexpr (V > 1) {
      if (lane < padded_) f(Count<1>(), lane);
    }
  }

  void write_row(const Tensor3& out, int lane, float* row) const {
    // A NaN is passed on.
    const float factor = sum_[lane] == 0 ? 0.0f : 1.0f / sum_[lane];
    for (int x = 0; x < dim_; ++x) row[x] *= factor;
    const Lane& to = group_->lanes[lane];
    write_floats(row, dim_, out.dtype, row_of(out, to.row, to.head));
  }

  void load_query(const Tensor3& query, float factor) {
    std::vector<float>& q = query_;
    row_.resize(size_t(4) * dim_);
    for (int lane = 0; lane < padded_; lane += 4) {
      for (int r = 0; r < 4; ++r) {
        const Lane& from = group_->lanes[std::min(lane + r, group_->count - 1)];
        float* to = &row_[size_t(r) * dim_];
        read_floats(row_of(query, from.row, from.head), query.dtype, dim_, to);
        for (int x = 0; x < dim_; ++x) to[x] *= factor;
      }
      int x = 0;
      for (; x + 4 <= dim_; x += 4) transpose4(&row_[x], dim_, &q[size_t(x) * kLanes + lane], kLanes);
      for (; x < dim_; ++x)
        for (int r = 0; r < 4; ++r) q[size_t(x) * kLanes + lane + r] = row_[size_t(r) * dim_ + x];
    }
  }

  // The last key of this block that each lane sees, counted from the block's first; exact, as it is cut to a block.
  void set_limits(int64_t first) {
    for (int lane = 0; lane < padded_; ++lane) {
      const int64_t position = group_->lanes[std::min(lane, group_->count - 1)].position;
      limit_[lane] = float(std::max<int64_t>(-1, std::min<int64_t>(kBlock, position - first)));
    }
  }

  int seen_keys(int lane, int width, int64_t first, int keys) const {
    int64_t greatest = -1;
    for (int i = lane; i < std::min(lane + width, group_->count); ++i) greatest = std::max(greatest, group_->lanes[i].position);
    return int(std::max<int64_t>(0, std::min<int64_t>(keys, greatest + 1 - first)));
  }

  template <int V>
  void attend(const float* const* k, const float* const* v, int lane, int keys, bool masked) {
    score<V>(k, lane, keys);
    if (masked) hide<V>(lane, keys);
    normalise<V>(lane, keys);
    if (v != nullptr) add_values<V>(v, lane, keys);
  }

  template <int V>
  void score(const float* const* k, int lane, int keys) {
    int key = 0;
    for (; key + kRowTile <= keys; key += kRowTile) score_tile<kRowTile, V>(k + key, lane, key);
    for (; key + 2 <= keys; key += 2) score_tile<2, V>(k + key, lane, key);
    if (key < keys) score_tile<1, V>(k + key, lane, key);
  }

  template <int R, int V>
  void score_tile(const float* const* k, int lane, int key) {
    Vec acc[R][V];
    const float* rows[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = k[r];
      for (int v = 0; v < V; ++v) acc[r][v] = broadcast(0);
    }
    accumulate(acc, query_.data() + lane, dim_, [&](int x, int r) { return rows[r][x]; });
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(&score_[(key + r) * kLanes + lane + v * kWidth], acc[r][v]);
  }

  template <int V>
  void hide(int lane, int keys) {
    const Vec hidden = broadcast(kMinusInfinity);
    for (int v = 0; v < V; ++v) {
      const Vec limit = load(limit_ + lane + v * kWidth);
      for (int key = 0; key < keys; ++key) {
        float* s = &score_[key * kLanes + lane + v * kWidth];
        store(s, select_ge(limit, broadcast(float(key)), load(s), hidden));
      }
    }
  }

  // Scores become probabilities relative to the greatest score so far.
  template <int V>
  void normalise(int lane, int keys) {
    for (int v = 0; v < V; ++v) {
      const int at = lane + v * kWidth;
      float* s = score_ + at;
      Vec top = load(max_ + at);
      for (int key = 0; key < keys; ++key) top = max(top, load(s + key * kLanes));
      // A lane that has seen nothing yet subtracts 0, not infinity from infinity.
      const Vec base = select_ge(top, broadcast(std::numeric_limits<float>::lowest()), top, broadcast(0));
      Vec total = broadcast(0);
      for (int key = 0; key < keys; ++key) {
        const Vec p = exp2(load(s + key * kLanes) - base);
        store(s + key * kLanes, p);
        total = total + p;
      }
      const Vec decay = exp2(load(max_ + at) - base);
      store(decay_ + at, decay);
      store(max_ + at, top);
      store(sum_ + at, fma(load(sum_ + at), decay, total));
      if (record_) {
        const size_t c = (columns_.size() - 1) * kLanes + at;
        store(&used_max_[c], top);
        store(&block_sum_[c], total);
      }
    }
  }

  template <int V>
  void add_values(const float* const* v, int lane, int keys) {
    int x = 0;
    for (; x + kRowTile <= dim_; x += kRowTile) value_tile<kRowTile, V>(v, lane, keys, x);
    for (; x + 2 <= dim_; x += 2) value_tile<2, V>(v, lane, keys, x);
    if (x < dim_) value_tile<1, V>(v, lane, keys, x);
  }

  template <int R, int V>
  void value_tile(const float* const* values, int lane, int keys, int x) {
    Vec acc[R][V];
    for (int v = 0; v < V; ++v) {
      const Vec decay = load(decay_ + lane + v * kWidth);
      for (int r = 0; r < R; ++r) acc[r][v] = load(&out_[size_t(x + r) * kLanes + lane + v * kWidth]) * decay;
    }
    accumulate(acc, score_ + lane, keys, [&](int key, int r) { return values[key][x + r]; });
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(&out_[size_t(x + r) * kLanes + lane + v * kWidth], acc[r][v]);
  }

  const Group* group_ = nullptr;
  int dim_ = 0, padded_ = 0;
  bool record_ = false;
  std::vector<float> query_, out_, row_;  // [d][lane], [d][lane], [4][d]
  alignas(64) float score_[kBlock * kLanes];  // [key][lane]
  alignas(64) float max_[kLanes], sum_[kLanes], decay_[kLanes], limit_[kLanes];
  std::vector<int32_t> columns_;
  std::vector<float> used_max_, block_sum_;  // [column][lane]
};

}  // namespace crossfill
