// ColumnWalk: how a launch walks a tensor of rows and columns so that each thread keeps its columns, for operators that
// read a vector per column (bias, gamma) or add columns up (dbias, dgamma).
//
// A thread owns the kVecOf<T> columns from a multiple of 16 bytes on. Where rows are no multiple of 16 bytes apart,
// rows that lie equally far past such a multiple form a class (at most kVecOf<T> of them: row r is of class r %
// period), and a thread takes rows of one class alone: every access but a row's first and last is a whole aligned
// vector at any width.
#pragma once
#include <numeric>

#include "frit/simt/launch.h"

namespace frit {

// Blocks of a launch that adds columns up: two a multiprocessor of an H200. Fixed, since the bits depend on
// it.
constexpr int64_t kMostBlocks = 264;

struct ColumnWalk {
  int64_t rows = 0, columns = 0, row_stride = 0;
  int period = 1;      // classes of rows
  int chunks = 0;      // vectors that cover a row, wherever it begins
  int width = 0;       // neighbouring threads along a row
  int lanes = 0;       // rows that a block works on at a time
  int tiles = 0;       // blocks along a row
  int64_t pieces = 0;  // blocks along a class of rows

  int threads() const { return (width * lanes + 31) / 32 * 32; }
  int64_t blocks() const { return tiles * period * pieces; }
  // Rows of partial sums when each block writes one.
  int64_t partial_rows() const { return period * pieces; }
  // The k-th row of a class.
  FRIT_HOST_DEVICE int64_t row(int64_t k, int c) const { return k * period + c; }
  FRIT_HOST_DEVICE int64_t rows_of_class(int c) const { return (rows - c + period - 1) / period; }
};

// Up to `threads` threads a block. pieces: as many blocks along a class as give each thread `rows_a_thread` rows, at
// most those that make max_blocks blocks in all (0: no bound). Depends on the shape alone.
inline ColumnWalk make_column_walk(const Tensor& x, int threads, int rows_a_thread, int64_t max_blocks) {
  ColumnWalk w;
  const int n = static_cast<int>(16 / size_of(x.dtype()));
  w.rows = x.dim(0), w.columns = x.dim(1), w.row_stride = x.row_stride();
  if (w.rows == 0 || w.columns == 0) return w;
  w.period = static_cast<int>(std::min<int64_t>(n / std::gcd<int64_t>(w.row_stride, n), w.rows));
  // Only where blocks lie may depend on the address, which planning does not know.
  const int usual = static_cast<int>((w.columns + n - 1) / n + (w.period > 1 ? 1 : 0));
  const bool shifted = w.period == 1 && reinterpret_cast<uintptr_t>(x.raw()) % 16 != 0;
  w.chunks = usual + (shifted ? 1 : 0);
  w.width = std::min(usual, threads);
  const int64_t most = w.rows_of_class(0);
  w.lanes = static_cast<int>(std::min<int64_t>(std::max(1, threads / w.width), most));
  w.tiles = (w.chunks + w.width - 1) / w.width;
  w.pieces = (most + w.lanes * rows_a_thread - 1) / (w.lanes * rows_a_thread);
  const int64_t usual_tiles = (usual + w.width - 1) / w.width;
  if (max_blocks > 0) w.pieces = std::max<int64_t>(1, std::min(w.pieces, max_blocks / (usual_tiles * w.period)));
  return w;
}

// True if other's rows lie like x's against multiples of 16 bytes, so that whole vectors of both start together.
inline bool lies_like(const Tensor& other, const Tensor& x) {
  if (!other.defined()) return true;
  const int64_t n = 16 / size_of(x.dtype());
  return other.dtype() == x.dtype() && (other.row_stride() - x.row_stride()) % n == 0 &&
         reinterpret_cast<uintptr_t>(other.raw()) % 16 == reinterpret_cast<uintptr_t>(x.raw()) % 16;
}

namespace simt {

// Where a thread of a ColumnWalk stands.
struct ColumnPlace {
  bool active = false;
  bool whole = false;  // all its columns lie inside, so that they move as one aligned vector
  int lane = 0;        // which of the block's rows, below walk.lanes
  int slot = 0;        // which of the block's vectors along a row, below walk.width
  int row_class = 0;
  int64_t piece = 0;
  int64_t column =
      0;  // first of its columns; may be negative, and its last past the end: load_span and store_span mask
};
// `first` is the tensor's first element.
template <typename T>
FRIT_DEVICE ColumnPlace column_place(const ColumnWalk& walk, const Global<T>& first) {
  ColumnPlace at;
  const int64_t group = block_index() / walk.tiles;
  const int tile = static_cast<int>(block_index() - group * walk.tiles);
  at.piece = group / walk.period;
  at.row_class = static_cast<int>(group - at.piece * walk.period);
  at.lane = thread_index() / walk.width;
  at.slot = thread_index() - at.lane * walk.width;
  const int chunk = tile * walk.width + at.slot;
  at.column = int64_t{chunk} * kVecOf<std::remove_const_t<T>> - row_shift(first + at.row_class * walk.row_stride);
  at.active = at.lane < walk.lanes && chunk < walk.chunks && at.column < walk.columns;
  at.whole = at.column >= 0 && at.column + kVecOf<std::remove_const_t<T>> <= walk.columns;
  return at;
}

// A thread's columns of the row that begins at `row`: load_vec where they are whole, load_span at the row's ends.
template <bool whole, Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE auto load_columns(const Global<T>& row, int64_t column, int64_t columns) {
  constexpr int N = kVecOf<std::remove_const_t<T>>;
  if constexpr (whole)
    return load_vec<N, cache>(row, column);
  else
    return load_span<N, cache>(row, column, columns, std::remove_const_t<T>());
}
template <bool whole, Cache cache = Cache::kDefault, typename T, int N>
FRIT_DEVICE void store_columns(const Global<T>& row, int64_t column, int64_t columns, const Vec<T, N>& v) {
  if constexpr (whole)
    store_vec<N, cache>(row, column, v);
  else
    store_span<N, cache>(row, column, columns, v);
}

// Calls visit(whole, unroll, k, step, end) until all of the thread's rows are done. `whole` (std::true_type or
// false_type) says whether its columns are whole vectors; then `unroll` (std::integral_constant) is U, else 1. Rows are
// numbered within their class: k, k + step, ... k + (unroll - 1) * step, those from `end` on to be left out; see
// ColumnWalk::row. `vectors` tells that all tensors of the kernel lie like the one that the walk was made for.
template <int U, typename Visit>
FRIT_DEVICE void for_rows(const ColumnWalk& walk, const ColumnPlace& at, bool vectors, Visit&& visit) {
  if (!at.active) return;
  const int64_t end = walk.rows_of_class(at.row_class), step = walk.pieces * walk.lanes;
  const int64_t first = at.piece * walk.lanes + at.lane;
  if (at.whole && vectors)
    for (int64_t k = first; k < end; k += step * U)
      visit(std::true_type(), std::integral_constant<int, U>(), k, step, end);
  else
    for (int64_t k = first; k < end; k += step)
      visit(std::false_type(), std::integral_constant<int, 1>(), k, step, end);
}

// Which elements of `unroll` rows (see for_rows) dropout keeps, N bits a row, the first row's lowest. One row after the
// other, so that few registers are alive beside the vectors that are being loaded.
template <int N, int unroll>
FRIT_DEVICE uint32_t keep_rows(const ColumnWalk& walk, const ColumnPlace& at, const Dropout& dropout, int64_t k,
                               int64_t step) {
  static_assert(N * unroll <= 32);
  uint32_t keeps = 0;
  FRIT_UNROLL_BY(1)
  for (int u = 0; u < unroll; ++u)
    keeps |= dropout_keep<N>(dropout, walk.row(k + u * step, at.row_class), at.column) << (u * N);
  return keeps;
}

// Adds up N column sums over the block's lanes in their order and writes them to row piece * period + class of partial
// f32 [partial_rows, stride] at `offset`. scratch: lanes * width * N floats. Cost: 1 barrier, none with one lane.
template <int N>
FRIT_DEVICE void store_column_sums(const ColumnWalk& walk, const ColumnPlace& at, const float (&sum)[N],
                                   const Shared<float>& scratch, const Global<float>& partial, int64_t stride,
                                   int64_t offset) {
  Vec<float, 4> total[N / 4];
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) total[i / 4][i % 4] = sum[i];
  if (walk.lanes > 1) {
    // Vectors of 4 lie `width` vectors apart, so that neighbouring threads use neighbouring banks.
    const auto place = [&](int lane, int i) { return ((lane * (N / 4) + i) * int64_t{walk.width} + at.slot) * 4; };
    if (at.lane < walk.lanes) {
      FRIT_UNROLL
      for (int i = 0; i < N / 4; ++i) store_vec<4>(scratch, place(at.lane, i), total[i]);
    }
    barrier();
    if (at.lane == 0) {
      for (int lane = 1; lane < walk.lanes; ++lane) {
        FRIT_UNROLL
        for (int i = 0; i < N / 4; ++i) {
          const Vec<float, 4> other = load_vec<4>(scratch, place(lane, i));
          FRIT_UNROLL
          for (int k = 0; k < 4; ++k) total[i][k] += other[k];
        }
      }
    }
  }
  if (at.active && at.lane == 0) {
    const Global<float> row = partial + (at.piece * walk.period + at.row_class) * stride + offset;
    FRIT_UNROLL
    for (int i = 0; i < N / 4; ++i) store_span<4>(row, at.column + 4 * i, walk.columns, total[i]);
  }
}
// Bytes of scratch for that.
inline int64_t column_sums_shared_bytes(const ColumnWalk& walk, int n) {
  return walk.lanes > 1 ? int64_t{4} * n * walk.lanes * walk.width : 0;
}

}  // namespace simt
}  // namespace frit
