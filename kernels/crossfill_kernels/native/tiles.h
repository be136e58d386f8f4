// Products of small matrices that stay in cache, and the scratch memory that they work in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "native/simd.h"

namespace crossfill {

// An output tile of 6 rows and this many vectors fills the registers (32 with AVX-512, 16 elsewhere) and hides the latency of
// its multiply-adds.
constexpr int kRowTile = 6;
#if defined(__AVX512F__)
constexpr int kVectorTile = 4;
#else
constexpr int kVectorTile = 2;
#endif

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Floats at a cache line's start: a vector that straddles two lines costs two loads. Grows, keeps nothing when it does.
class Buffer {
 public:
  float* at_least(int64_t count) {
    if (count > capacity_) {
      floats_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(count * int64_t(sizeof(float)), 64))));
      if (!floats_) throw std::bad_alloc();
      capacity_ = count;
    }
    return floats_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> floats_;
  int64_t capacity_ = 0;
};

// A matrix of floats with unit stride in its rows.
struct Matrix {
  float* data;
  int64_t stride;
};

struct ConstMatrix {
  const float* data;
  int64_t stride;
};

// out[r][0 … V·kWidth) = Σ_{k < depth} a[r][k] · b[k][…], added to what is there if kAdd.
template <int R, int V, bool kAdd>
inline void multiply_tile(ConstMatrix a, ConstMatrix b, int depth, Matrix out) {
  Vec sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = kAdd ? load(out.data + r * out.stride + v * kWidth) : broadcast(0.0f);
  for (int k = 0; k < depth; ++k) {
    Vec row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b.data + k * b.stride + v * kWidth);
    for (int r = 0; r < R; ++r) {
      const Vec x = broadcast(a.data[r * a.stride + k]);
      for (int v = 0; v < V; ++v) sum[r][v] = fma(x, row[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out.data + r * out.stride + v * kWidth, sum[r][v]);
}

// The same for `width` columns, a multiple of kWidth.
template <int R, bool kAdd>
inline void multiply_strip(ConstMatrix a, ConstMatrix b, int depth, int width, Matrix out) {
  int column = 0;
  const auto step = [&](int vectors) {
    b.data += vectors * kWidth;
    out.data += vectors * kWidth;
    column += vectors * kWidth;
  };
  while (width - column >= kVectorTile * kWidth) {
    multiply_tile<R, kVectorTile, kAdd>(a, b, depth, out);
    step(kVectorTile);
  }
  while (width - column >= 2 * kWidth) {
    multiply_tile<R, 2, kAdd>(a, b, depth, out);
    step(2);
  }
  if (width > column) multiply_tile<R, 1, kAdd>(a, b, depth, out);
}

// The same for `rows` of at most kRowTile rows.
template <bool kAdd>
inline void multiply_rows(int rows, ConstMatrix a, ConstMatrix b, int depth, int width, Matrix out) {
  switch (rows) {
    case 1: return multiply_strip<1, kAdd>(a, b, depth, width, out);
    case 2: return multiply_strip<2, kAdd>(a, b, depth, width, out);
    case 3: return multiply_strip<3, kAdd>(a, b, depth, width, out);
    case 4: return multiply_strip<4, kAdd>(a, b, depth, width, out);
    case 5: return multiply_strip<5, kAdd>(a, b, depth, width, out);
    default: return multiply_strip<6, kAdd>(a, b, depth, width, out);
  }
}

// The same for any number of rows.
template <bool kAdd>
inline void multiply(int rows, ConstMatrix a, ConstMatrix b, int depth, int width, Matrix out) {
  for (int first = 0; first < rows; first += kRowTile)
    multiply_rows<kAdd>(std::min(kRowTile, rows - first), {a.data + first * a.stride, a.stride}, b, depth, width,
                        {out.data + first * out.stride, out.stride});
}

}  // namespace crossfill
