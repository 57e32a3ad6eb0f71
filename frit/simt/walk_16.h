// How launches over 16-bit tensors, whose rows are whole vectors or fold to such (frit/simt/folded_columns.h), walk
// them. Host side of a cuda.cu.
#pragma once
#include "frit/simt/folded_columns.h"

namespace frit {

// Calls f with the 16-bit type of that name.
template <typename F>
void dispatch_16(DType dtype, F&& f) {
  if (dtype == DType::kBF16)
    f(bfloat16());
  else
    f(float16());
}

// Elements from a tensor's row to its next one, and to the next one of a thread of a walk whose rows are whole vectors:
// a kernel's argument, so that they take no registers.
struct RowSteps {
  int64_t stride, step;

  RowSteps(const ColumnWalk& walk, const Tensor& x)
      : stride(x.row_stride()), step(walk.pieces * walk.lanes * x.row_stride()) {}
};

// Makes a walk over x, if its rows are whole vectors, one of at most 132 blocks of `threads` threads, which write a row
// of partial sums each. A walk that is not `whole` for an address alone gets the same number of pieces: the shape
// alone decides how many rows of partial sums there are.
inline void fill_whole(ColumnWalk& walk, const Tensor& x, bool whole, int threads, int rows_a_thread, bool packed,
                       bool vectors) {
  if (size_of(x.dtype()) != 2 || x.dim(1) % 8 != 0 || x.row_stride() % 8 != 0) return;
  const ColumnWalk filled = make_column_walk(x, threads, rows_a_thread, kMostBlocks / 2, packed, vectors);
  if (whole)
    walk = filled;
  else
    walk.pieces = filled.pieces;
}

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
