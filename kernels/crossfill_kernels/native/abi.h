// What Python hands over, mirrored in library.py. Pointers are borrowed for the call; shapes were checked in Python.
#pragma once

#include <cstdint>

#define CROSSFILL_EXPORT extern "C" __attribute__((visibility("default")))

namespace crossfill {

constexpr int kBlock = 64;

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kUint8 = 2 };

// [a, b, d] with unit stride in d; strides in elements.
struct Tensor3 {
  void* data;
  int64_t stride0, stride1;
  int32_t dtype;
};

// The keys and values of a request of `length` tokens. `slots` holds the cache row of each position; null when the rows are
// consecutive from `first` on.
struct Cache {
  Tensor3 keys, values;
  const int64_t* slots;
  int64_t first, length;
  int32_t kv_heads, dim;

  int64_t row(int64_t position) const { return slots ? slots[position] : first + position; }
};

// Mirrors rows.py.
struct Rows {
  const int64_t* positions;
  const int32_t* blocks;
  const int32_t* starts;
  int64_t count, block_count;
};

// Mirrors BlockIndex of blocks.py.
struct Index {
  const int32_t* offsets;
  const int32_t* columns;
};

// Mirrors PackedMap of blocks.py.
struct Packed {
  const int32_t* offsets;
  const int32_t* columns;
  const int32_t* slots;
  const void* blocks;
  const float* scales;
  int32_t heads, dtype;
};

}  // namespace crossfill
