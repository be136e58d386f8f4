// Elements of tensors and of stored maps, read and written as floats.
#pragma once

#include <cstdint>

#include "native/abi.h"
#include "native/simd.h"

namespace crossfill {

inline Vec load_stored(const float* p) { return load(p); }
inline Vec load_stored(const uint16_t* p) { return load_bf16(p); }
inline Vec load_stored(const uint8_t* p) { return load_u8(p); }

// Copy `count` floats or bfloat16 numbers to floats.
inline void read_floats(const void* from, int32_t dtype, int count, float* to) {
  if (dtype == kBfloat16) {
    const auto* p = static_cast<const uint16_t*>(from);
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) store(to + i, load_bf16(p + i));
    for (; i < count; ++i) to[i] = from_bf16(p[i]);
  } else {
    std::memcpy(to, from, count * sizeof(float));
  }
}

inline void write_floats(const float* from, int count, int32_t dtype, void* to) {
  if (dtype == kBfloat16) {
    auto* p = static_cast<uint16_t*>(to);
    for (int i = 0; i < count; ++i) p[i] = to_bf16(from[i]);
  } else {
    std::memcpy(to, from, count * sizeof(float));
  }
}

// Address of row [a, b] of a tensor.
inline char* row_of(const Tensor3& t, int64_t a, int64_t b) {
  const int64_t size = t.dtype == kFloat32 ? 4 : 2;
  return static_cast<char*>(t.data) + (a * t.stride0 + b * t.stride1) * size;
}

}  // namespace crossfill
