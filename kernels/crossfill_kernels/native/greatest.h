// Column blocks of a list by falling mass, the lower column first where masses are equal.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace crossfill {

// A heap, not a sort: a few blocks carry the mass, and only those are taken.
class Greatest {
 public:
  void clear() { keys_.clear(); }

  // `mass` is not negative, so that its bits rise with it.
  void add(float mass, int32_t column) {
    mass += 0.0f;  // -0 is 0
    uint32_t bits;
    std::memcpy(&bits, &mass, sizeof bits);
    keys_.push_back(uint64_t(bits) << 32 | uint32_t(~column));
  }

  void order() { std::make_heap(keys_.begin(), keys_.end()); }

  bool empty() const { return keys_.empty(); }

  int32_t take() {
    std::pop_heap(keys_.begin(), keys_.end());
    const int32_t column = ~int32_t(uint32_t(keys_.back()));
    keys_.pop_back();
    return column;
  }

 private:
  std::vector<uint64_t> keys_;
};

// Moves lists that stand `room` apart close together; offsets[l + 1] holds the length of list l and becomes its end.
template <typename... Columns>
inline void close_gaps(int64_t lists, int64_t room, int32_t* offsets, Columns*... columns) {
  offsets[0] = 0;
  for (int64_t l = 0; l < lists; ++l) {
    const int32_t length = offsets[l + 1];
    ((std::memmove(columns + offsets[l], columns + l * room, length * sizeof(*columns))), ...);
    offsets[l + 1] = offsets[l] + length;
  }
}

}  // namespace crossfill
