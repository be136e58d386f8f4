// One query row over the whole cache: bound by memory, so each key and value is loaded once for all heads that share it.
#pragma once

#include "native/attention.h"

namespace crossfill {

// Heads that are computed together, and vectors of an output that are held in registers together.
constexpr int kHeadsAtOnce = 4, kVectorsAtOnce = 4;

class Decode {
 public:
  static bool fits(const Cache& cache) { return cache.dim % kWidth == 0; }

  // Heads kv_head * share ... + share - 1 of row 0, which stands at `position`.
  void run(const Tensor3& query, const Cache& cache, int32_t kv_head, int32_t share, int64_t position, float scale,
           const Tensor3& out) {
    dim_ = cache.dim;
    share_ = share;
    query_.resize(size_t(share) * dim_);
    out_.assign(size_t(share) * dim_, 0.0f);
    score_.resize(size_t(share) * kBlock);
    max_.assign(share, kMinusInfinity);
    sum_.assign(share, 0.0f);
    for (int g = 0; g < share; ++g)
      read_floats(row_of(query, 0, kv_head * share + g), query.dtype, dim_, &query_[size_t(g) * dim_]);
    for (float& x : query_) x *= scale * kLog2e;
    for (int64_t first = 0; first <= std::min(position, cache.length - 1); first += kBlock) {
      const KeyBlock block = reader_.read(cache, kv_head, int32_t(first / kBlock), position);
      each_heads([&](auto heads, int g) { score<decltype(heads)::value>(block.keys, g, block.count); });
      for (int g = 0; g < share; ++g) normalise(g, block.count);
      each_heads([&](auto heads, int g) { add_values<decltype(heads)::value>(block.values, g, block.count); });
    }
    for (int g = 0; g < share; ++g) {
      float* result = &out_[size_t(g) * dim_];
      for (int x = 0; x < dim_; ++x) result[x] /= sum_[g];
      write_floats(result, dim_, out.dtype, row_of(out, 0, kv_head * share + g));
    }
  }

 private:
  template <typename F>
  void each_heads(F f) {
    int g = 0;
    for (; g + kHeadsAtOnce <= share_; g += kHeadsAtOnce) f(Count<kHeadsAtOnce>(), g);
    switch (share_ - g) {
      case 3: return f(Count<3>(), g);
      case 2: return f(Count<2>(), g);
      case 1: return f(Count<1>(), g);
    }
  }

  template <int G>
  void score(const float* const* k, int g, int keys) {
    int key = 0;
    for (; key + 2 <= keys; key += 2) score_keys<G, 2>(k + key, g, key);
    if (key < keys) score_keys<G, 1>(k + key, g, key);
  }

  template <int G, int K>
  void score_keys(const float* const* k, int g, int key) {
    Vec acc[G][K];
    for (int h = 0; h < G; ++h)
      for (int i = 0; i < K; ++i) acc[h][i] = broadcast(0);
    for (int x = 0; x < dim_; x += kWidth)
      for (int i = 0; i < K; ++i) {
        const Vec part = load(k[i] + x);
        for (int h = 0; h < G; ++h) acc[h][i] = fma(part, load(&query_[size_t(g + h) * dim_ + x]), acc[h][i]);
      }
    for (int h = 0; h < G; ++h)
      for (int i = 0; i < K; ++i) score_[size_t(g + h) * kBlock + key + i] = sum(acc[h][i]);
  }

  void normalise(int g, int keys) {
    float* s = &score_[size_t(g) * kBlock];
    for (int key = keys; key % kWidth; ++key) s[key] = kMinusInfinity;
    Vec top = broadcast(max_[g]);
    for (int key = 0; key < keys; key += kWidth) top = max(top, load(s + key));
    const float greatest = largest(top);
    Vec total = broadcast(0);
    for (int key = 0; key < keys; key += kWidth) {
      const Vec p = exp2(load(s + key) - broadcast(greatest));
      store(s + key, p);
      total = total + p;
    }
    float decay[kWidth];
    store(decay, exp2(broadcast(max_[g] - greatest)));
    sum_[g] = sum_[g] * decay[0] + sum(total);
    max_[g] = greatest;
    for (int x = 0; x < dim_; x += kWidth) {
      float* o = &out_[size_t(g) * dim_ + x];
      store(o, load(o) * load(decay));
    }
  }

  template <int G>
  void add_values(const float* const* v, int g, int keys) {
    int x = 0;
    for (; x + kVectorsAtOnce * kWidth <= dim_; x += kVectorsAtOnce * kWidth) add_part<G, kVectorsAtOnce>(v, g, keys, x);
    for (; x < dim_; x += kWidth) add_part<G, 1>(v, g, keys, x);
  }

  template <int G, int V>
  void add_part(const float* const* v, int g, int keys, int x) {
    Vec acc[G][V];
    for (int h = 0; h < G; ++h)
      for (int i = 0; i < V; ++i) acc[h][i] = load(&out_[size_t(g + h) * dim_ + x + i * kWidth]);
    for (int key = 0; key < keys; ++key) {
      Vec part[V];
      for (int i = 0; i < V; ++i) part[i] = load(v[key] + x + i * kWidth);
      for (int h = 0; h < G; ++h) {
        const Vec p = broadcast(score_[size_t(g + h) * kBlock + key]);
        for (int i = 0; i < V; ++i) acc[h][i] = fma(p, part[i], acc[h][i]);
      }
    }
    for (int h = 0; h < G; ++h)
      for (int i = 0; i < V; ++i) store(&out_[size_t(g + h) * dim_ + x + i * kWidth], acc[h][i]);
  }

  int dim_ = 0, share_ = 0;
  std::vector<float> query_, out_, score_, max_, sum_;  // [g][d], [g][d], [g][key], [g], [g]
  KeyBlockReader reader_;
};

}  // namespace crossfill
