// How the launches that write rows of partial column sums walk a tensor. Host side of a cuda.cu.
#pragma once
#include "frit/simt/columns.h"

namespace frit {

constexpr int kSumThreads = 512;  // a block has at most

// A walk whose blocks write a row of partial sums each: at most 264 blocks of 256 threads, or, where a row is whole
// vectors and 256 threads hold it, 132 of 512, which write half as much. Depends on the shape alone.
inline ColumnWalk make_sum_walk(const Tensor& x, int rows_a_thread, bool packed, bool vectors) {
  const int64_t n = 16 / size_of(x.dtype());
  const bool wide = x.dim(1) % n == 0 && x.row_stride() % n == 0 && x.dim(1) <= 256 * n;
  return make_column_walk(x, wide ? kSumThreads : kSumThreads / 2, rows_a_thread, wide ? kMostBlocks / 2 : kMostBlocks,
                          packed, vectors);
}

}  // namespace frit
