// Small block masses, and their mixture. reference.py documents the maths.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "native/abi.h"
#include "native/greatest.h"

namespace crossfill {
namespace {

constexpr int kCodes = 256;

// The greatest masses of one list until `target` is reached, ascending by column, written to `columns`; how many.
int32_t keep_greatest(const float* mass, int32_t diagonal, double target, int32_t* columns) {
  thread_local Greatest greatest;
  greatest.clear();
  for (int32_t column = 0; column <= diagonal; ++column)
    if (mass[column] > 0.0f) greatest.add(mass[column], column);
  greatest.order();
  int32_t kept = 0;
  for (double sum = 0.0; !greatest.empty() && sum < target; ++kept) {
    columns[kept] = greatest.take();
    sum += mass[columns[kept]];
  }
  std::sort(columns, columns + kept);
  return kept;
}

// Turns kept masses into codes, and drops those that have none; how many stay.
int32_t encode(const float* mass, float total, const float* thresholds, int32_t kept, int32_t* columns,
               uint8_t* codes) {
  int32_t stay = 0;
  for (int32_t k = 0; k < kept; ++k) {
    const float share = mass[columns[k]] / total;
    const int64_t code = std::upper_bound(thresholds, thresholds + kCodes, share) - thresholds - 1;
    if (code < 0) continue;
    columns[stay] = columns[k];
    codes[stay++] = uint8_t(code);
  }
  return stay;
}

struct Lists {
  const int32_t* offsets;
  const int32_t* columns;
  const uint8_t* codes;
};

// One receiver head's masses of one row block.
void mix_row(const Lists& lists, const float* fractions, const float* weights, int64_t heads, int64_t receivers,
             int64_t row_blocks, int64_t i, int64_t h, int64_t width, float* mixed) {
  std::fill(mixed, mixed + width, 0.0f);
  for (int64_t k = 0; k < heads; ++k) {
    const float weight = weights[k * receivers + h];
    if (weight == 0.0f) continue;
    const int64_t list = k * row_blocks + i;
    for (int32_t e = lists.offsets[list]; e < lists.offsets[list + 1]; ++e)
      mixed[lists.columns[e]] += weight * fractions[lists.codes[e]];
  }
}

}  // namespace
}  // namespace crossfill

// mass [heads, row blocks, width]; `columns` and `codes` have room for `width` in each list, and stand close together
// afterwards, as `offsets` says.
CROSSFILL_EXPORT void crossfill_quantise_mass(const float* mass, const int32_t* blocks, const float* totals,
                                             const float* thresholds, int64_t heads, int64_t row_blocks,
                                             int64_t width, double keep, int32_t* offsets, int32_t* columns,
                                             uint8_t* codes, int32_t threads) {
  using namespace crossfill;
  const int64_t lists = heads * row_blocks;
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads)
  for (int64_t l = 0; l < lists; ++l) {
    const int64_t i = l % row_blocks;
    const float* row = mass + l * width;
    int32_t* where = columns + l * width;
    const int32_t kept = keep_greatest(row, blocks[i], keep * double(totals[i]), where);
    offsets[l + 1] = encode(row, totals[i], thresholds, kept, where, codes + l * width);
  }
  close_gaps(lists, width, offsets, columns, codes);
}

// weights [heads, receivers]; mixed [receivers, row blocks, width].
CROSSFILL_EXPORT void crossfill_mix_mass(const int32_t* offsets, const int32_t* columns, const uint8_t* codes,
                                        const float* fractions, const float* weights, int64_t heads,
                                        int64_t receivers, int64_t row_blocks, int64_t width, float* mixed,
                                        int32_t threads) {
  using namespace crossfill;
  const Lists lists{offsets, columns, codes};
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads)
  for (int64_t l = 0; l < receivers * row_blocks; ++l)
    mix_row(lists, fractions, weights, heads, receivers, row_blocks, l % row_blocks, l / row_blocks, width,
            mixed + l * width);
}
