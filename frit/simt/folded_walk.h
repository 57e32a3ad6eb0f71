// How launches over 16-bit rows that fold (frit/simt/folded_columns.h) fill a GPU in one wave. Host side of a cuda.cu.
#pragma once
#include "frit/simt/folded_columns.h"

namespace frit {

// What a kernel's registers allow.
struct FoldedBlocks {
  int tile;            // warps along a row, at most; few where blocks write partial sums, whose rows are fewer then
  int warps;           // of a block, at most
  int multiprocessor;  // warps on a multiprocessor
};

// Gives a walk over x tiles of as many warps, and as many pieces, as keep 132 multiprocessors evenly busy: 1025
// columns, which fold to 33 warps, go as 11 tiles of 3 instead of 5 of 7. Threads have `rows_a_thread` rows or more. A
// walk that does not fold for its address alone gets the same number of pieces, all others stay as they are.
inline void fill_folded(ColumnWalk& walk, const Tensor& x, bool packed, FoldedBlocks blocks, int rows_a_thread) {
  const int64_t columns = x.dim(1), fold = 8 / std::gcd<int64_t>(columns, 8);
  if (size_of(x.dtype()) != 2 || !packed || columns < 256 || columns >= (1 << 24) || fold == 1 || x.dim(0) < fold)
    return;
  const int64_t rows = (x.dim(0) + fold - 1) / fold, warps = (columns * fold / 8 + 31) / 32;
  struct Choice {
    int64_t width, tiles, lanes, pieces;
    double worth;  // warps at work at a time, times their share of those that are there
  };
  const auto choice = [&](int64_t width) {
    Choice c = {width, (warps + width - 1) / width, std::min<int64_t>(blocks.warps / width, rows), 0, 0};
    const int64_t block = c.width * c.lanes, held = kMostBlocks / 2 * (blocks.multiprocessor / block);
    c.pieces = std::max<int64_t>(1, held / c.tiles);
    const double busy =
        static_cast<double>(warps * c.lanes * c.pieces) / static_cast<double>(std::max(held, c.tiles) * block);
    c.worth = busy * busy * static_cast<double>(held * block);
    return c;
  };
  double most = 0;
  for (int64_t w = 1; w <= blocks.tile; ++w) most = std::max(most, choice(w).worth);
  int64_t width = blocks.tile;  // the widest that is nearly as good: neighbours read neighbouring memory
  while (choice(width).worth < 0.88 * most) --width;
  const Choice best = choice(width);
  walk.pieces = std::min(best.pieces, (rows + best.lanes * rows_a_thread - 1) / (best.lanes * rows_a_thread));
  if (walk.fold == 1) return;
  walk.width = static_cast<int>(32 * best.width), walk.lanes = static_cast<int>(best.lanes);
  walk.tiles = static_cast<int>(best.tiles);
  walk.by_tiles = Divider(walk.tiles), walk.by_width = Divider(walk.width);
}

}  // namespace frit
