// Turns cached keys by the positions that they move, from any cache rows to any others. See reference.py for the maths.

#include <algorithm>

#include "native/abi.h"
#include "native/simd.h"
#include "native/stored.h"

namespace crossfill {
namespace {

// Mirrored in native.py: the rows of a segment within a cache.
struct Places {
  Tensor3 data;
  const int64_t* slots;
  int64_t first;

  template <class T>
  T* head(int64_t token, int64_t h) const {
    const int64_t row = slots ? slots[token] : first + token;
    return static_cast<T*>(data.data) + row * data.stride0 + h * data.stride1;
  }
};

// Mirrored in native.py. `stride` is 0 where all tokens turn alike.
struct Turn {
  const float* cos;
  const float* sin;
  int64_t stride;
  int32_t half, interleaved;
};

inline float read_one(float x) { return x; }
inline float read_one(uint16_t x) { return from_bf16(x); }
inline void write(float* p, Vec a) { store(p, a); }
inline void write(uint16_t* p, Vec a) {
  float lanes[kWidth];
  store(lanes, a);
  for (int i = 0; i < kWidth; ++i) p[i] = to_bf16(lanes[i]);
}
inline void write_one(float* p, float x) { *p = x; }
inline void write_one(uint16_t* p, float x) { *p = to_bf16(x); }

// Both halves are read before either is written, so that x and y may be one.
template <class In, class Out>
void turn_halves(const In* x, Out* y, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const Vec a = load_stored(x + i), b = load_stored(x + half + i), c = load(cos + i), s = load(sin + i);
    write(y + i, a * c - b * s);
    write(y + half + i, fma(b, c, a * s));
  }
  for (; i < half; ++i) {
    const float a = read_one(x[i]), b = read_one(x[half + i]);
    write_one(y + i, a * cos[i] - b * sin[i]);
    write_one(y + half + i, b * cos[i] + a * sin[i]);
  }
}

// Pairs lie side by side. They are parted in a buffer first: the arithmetic is then plain loops that compilers vectorise, also
// where x and y are one.
template <class In, class Out>
void turn_pairs(const In* x, Out* y, const float* cos, const float* sin, int half) {
  constexpr int kPairs = 64;
  float a[kPairs], b[kPairs], turned[2 * kPairs];
  for (int start = 0; start < half; start += kPairs) {
    const int count = std::min(kPairs, half - start);
    for (int i = 0; i < count; ++i) {
      a[i] = read_one(x[2 * (start + i)]);
      b[i] = read_one(x[2 * (start + i) + 1]);
    }
    for (int i = 0; i < count; ++i) {
      turned[2 * i] = a[i] * cos[start + i] - b[i] * sin[start + i];
      turned[2 * i + 1] = b[i] * cos[start + i] + a[i] * sin[start + i];
    }
    for (int i = 0; i < 2 * count; ++i) write_one(y + 2 * start + i, turned[i]);
  }
}

template <class In, class Out>
void turn_block(const Places& source, const Places& out, const Turn& turn, int64_t begin, int64_t end, int heads, int dim) {
  for (int64_t token = begin; token < end; ++token) {
    const float* cos = turn.cos + token * turn.stride;
    const float* sin = turn.sin + token * turn.stride;
    for (int h = 0; h < heads; ++h) {
      const In* x = source.head<In>(token, h);
      Out* y = out.head<Out>(token, h);
      if (turn.interleaved) {
        turn_pairs(x, y, cos, sin, turn.half);
      } else {
        turn_halves(x, y, cos, sin, turn.half);
      }
      for (int i = 2 * turn.half; i < dim; ++i) write_one(y + i, read_one(x[i]));
    }
  }
}

template <class In, class Out>
void turn_all(const Places& source, const Places& out, const Turn& turn, int64_t rows, int heads, int dim, int threads) {
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t block = 0; block < blocks; ++block) {
    turn_block<In, Out>(source, out, turn, block * kBlock, std::min(rows, (block + 1) * kBlock), heads, dim);
  }
}

}  // namespace
}  // namespace crossfill

CROSSFILL_EXPORT void crossfill_rope_rerotate(const crossfill::Places* source, const crossfill::Places* out,
                                              const crossfill::Turn* turn, int64_t rows, int32_t heads, int32_t dim,
                                              int32_t threads) {
  using namespace crossfill;
  const bool narrow_in = source->data.dtype == kBfloat16, narrow_out = out->data.dtype == kBfloat16;
  if (narrow_in && narrow_out) {
    turn_all<uint16_t, uint16_t>(*source, *out, *turn, rows, heads, dim, threads);
  } else if (narrow_in) {
    turn_all<uint16_t, float>(*source, *out, *turn, rows, heads, dim, threads);
  } else {
    turn_all<float, float>(*source, *out, *turn, rows, heads, dim, threads);
  }
}
