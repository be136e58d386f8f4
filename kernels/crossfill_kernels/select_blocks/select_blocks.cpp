// Choice of the column blocks to keep. reference.py documents the rule; sums are taken in the same order and precision, so that the
// two always agree.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "native/abi.h"
#include "native/greatest.h"

namespace crossfill {
namespace {

struct Goal {
  // Mass to reach.
  double target;
  // Most blocks to keep.
  int32_t cap;
  // Also blocks without mass, until the cap.
  bool everything;
};

// The kept columns of one list, ascending, written to `columns`; how many.
int32_t select(const float* mass, int32_t diagonal, Goal goal, int32_t* columns) {
  int32_t kept = 0;
  if (goal.everything && diagonal < goal.cap) {
    for (; kept <= diagonal; ++kept) columns[kept] = kept;
    return kept;
  }
  thread_local Greatest greatest;
  greatest.clear();
  for (int32_t column = 1; column < diagonal; ++column)
    if (goal.everything || mass[column] > 0.0f) greatest.add(mass[column], column);
  columns[kept++] = 0;
  double sum = mass[0];
  if (diagonal > 0) {
    columns[kept++] = diagonal;
    sum += mass[diagonal];
  }
  if (sum < goal.target || goal.everything) greatest.order();
  while (kept < goal.cap && !greatest.empty() && (sum < goal.target || goal.everything)) {
    const int32_t column = greatest.take();
    sum += mass[column];
    columns[kept++] = column;
  }
  std::sort(columns, columns + kept);
  return kept;
}

}  // namespace
}  // namespace crossfill

// mass [heads, row blocks, width]; `columns` has room for min(width, cap) in each list. Afterwards the lists stand close together,
// as `offsets` says.
CROSSFILL_EXPORT void crossfill_select_blocks(const float* mass, const int32_t* blocks, const float* totals,
                                             int64_t heads, int64_t row_blocks, int64_t width, double top_p,
                                             int32_t cap, int32_t* offsets, int32_t* columns, int32_t threads) {
  using namespace crossfill;
  const int64_t lists = heads * row_blocks, room = std::min<int64_t>(width, cap);
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads)
  for (int64_t l = 0; l < lists; ++l) {
    const int64_t i = l % row_blocks;
    const Goal goal{top_p * double(totals[i]), cap, top_p == 1.0};
    offsets[l + 1] = select(mass + l * width, blocks[i], goal, columns + l * room);
  }
  close_gaps(lists, room, offsets, columns);
}
