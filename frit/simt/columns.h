// ColumnWalk: how a launch walks a tensor of rows and columns so that each thread keeps its columns, for operators that
// read a vector per column (bias, gamma) or add columns up (dbias, dgamma).
//
// A thread owns the kVecOf<T> columns from a multiple of 16 bytes on. Where rows are no multiple of 16 bytes apart,
// rows that lie equally far past such a multiple form a class (at most kVecOf<T> of them: row r is of class r %
// period), and a thread takes rows of one class alone: every access but a row's first and last is a whole aligned
// vector at any width.
#pragma once
#include <algorithm>
#include <numeric>

#include "frit/simt/launch.h"

namespace frit {

// Blocks of a launch that adds columns up: two a multiprocessor of an H200. Fixed, since the bits depend on
// it.
constexpr int64_t kMostBlocks = 264;

// n / d for n below 2^31, by a multiplication: a thread's place takes a few instructions instead of divisions.
// Source: Granlund and Montgomery 1994, "Division by invariant integers using multiplication".
struct Divider {
  uint32_t divisor = 1, magic = 1;
  int shift = 0;

  Divider() = default;
  explicit Divider(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
  FRIT_HOST_DEVICE uint32_t operator()(uint32_t n) const {
    return (static_cast<uint32_t>(static_cast<uint64_t>(n) * magic >> 32) + n) >> shift;
  }
};

// Rows that lie end to end fold: `fold` rows, which together are whole vectors, are walked as one row, so that no
// vector is cut but the tensor's last. A thread's vector may then end in the next row's first columns.
struct ColumnWalk {
  int64_t rows = 0, columns = 0, row_stride = 0;  // as walked: folded rows, if fold > 1
  int fold = 1;                                   // rows of the tensor that make one
  int64_t row_columns = 0;                        // columns of the tensor
  int64_t last_columns = 0;                       // columns of the last row that is walked; below `columns` if cut
  int64_t class_rows = 0;                         // rows of every class, and one more for classes below more_rows
  int more_rows = 0;
  Divider by_tiles, by_period, by_width, by_columns;
  int period = 1;      // classes of rows
  int chunks = 0;      // vectors that cover a row, wherever it begins
  int width = 0;       // neighbouring threads along a row
  int lanes = 0;       // rows that a block works on at a time
  int tiles = 0;       // blocks along a row
  int64_t pieces = 0;  // blocks along a class of rows

  int threads() const { return (width * lanes + 31) / 32 * 32; }
  int64_t blocks() const { return tiles * period * pieces; }
  // Rows of partial sums when each block writes one.
  int64_t partial_rows() const { return fold * period * pieces; }
  // The row stride of another tensor that is walked along.
  int64_t stride_of(const Tensor& x) const { return fold > 1 ? row_stride : x.defined() ? x.row_stride() : 0; }
  // The k-th row of a class.
  FRIT_HOST_DEVICE int64_t row(int64_t k, int c) const { return k * period + c; }
  FRIT_HOST_DEVICE int64_t rows_of_class(int c) const { return class_rows + (c < more_rows ? 1 : 0); }
};

// True if rows lie end to end, or there is no tensor.
inline bool lies_packed(const Tensor& x) {
  return !x.defined() || x.row_stride() == x.dim(1);
}

// Rows a thread of launches without sums: enough that a thread's start costs little, few enough to fill the GPU.
inline int usual_rows_a_thread(int64_t rows, int64_t columns, DType dtype) {
  return static_cast<int>(std::clamp<int64_t>(rows * columns * size_of(dtype) / 16 / (1 << 17) / 2 * 2, 2, 8));
}

// Up to `threads` threads a block. pieces: as many blocks along a class as give each thread `rows_a_thread` rows, at
// most those that make max_blocks blocks in all (0: no bound). packed: all tensors of the launch have rows that lie end
// to end; vectors: all of them begin alike (see lies_like). Depends on the shape alone, but for where blocks lie, which
// the address decides, since planning does not know it.
inline ColumnWalk make_column_walk(const Tensor& x, int threads, int rows_a_thread, int64_t max_blocks,
                                   bool packed = false, bool vectors = true) {
  ColumnWalk w;
  const int n = static_cast<int>(16 / size_of(x.dtype()));
  w.rows = x.dim(0), w.columns = w.row_columns = x.dim(1), w.row_stride = x.row_stride();
  if (w.rows == 0 || w.columns == 0) return w;
  FRIT_CHECK(w.rows < (int64_t{1} << 27), "[column_walk] {} rows are too many", w.rows);
  w.period = static_cast<int>(std::min<int64_t>(n / std::gcd<int64_t>(w.row_stride, n), w.rows));
  const bool aligned = reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  const int whole_period = static_cast<int>(n / std::gcd<int64_t>(w.row_stride, n));
  const bool foldable = packed && w.columns >= 256 && w.period > 1 && w.period == whole_period && w.columns < (1 << 24);
  const auto pieces = [&](int64_t most, int64_t usual_tiles) {
    const int64_t p = (most + w.lanes * rows_a_thread - 1) / (w.lanes * rows_a_thread);
    return max_blocks > 0 ? std::max<int64_t>(1, std::min(p, max_blocks / (usual_tiles * w.period))) : p;
  };
  int64_t folded_pieces = 0;
  if (foldable) {
    ColumnWalk f = w;
    f.fold = w.period, f.period = 1;
    f.rows = (w.rows + f.fold - 1) / f.fold, f.columns *= f.fold, f.row_stride = f.columns;
    f.last_columns = f.columns - (f.rows * f.fold - w.rows) * f.row_columns;
    f.chunks = static_cast<int>(f.columns / n);
    f.tiles = (f.chunks + threads - 1) / threads;
    f.width = ((f.chunks + f.tiles - 1) / f.tiles + 31) / 32 * 32;  // whole warps: neighbours exchange dropout's bits
    f.tiles = (f.chunks + f.width - 1) / f.width;
    f.lanes = static_cast<int>(std::min<int64_t>(std::max(1, threads / f.width), f.rows));
    std::swap(w, f);
    w.pieces = pieces(w.rows, w.tiles);
    folded_pieces = w.pieces;
    if (!aligned || !vectors) std::swap(w, f);
  }
  if (w.fold == 1) {
    w.last_columns = w.columns;
    const int usual = static_cast<int>((w.columns + n - 1) / n + (w.period > 1 ? 1 : 0));
    w.chunks = usual + (w.period == 1 && !aligned ? 1 : 0);
    w.width = std::min(usual, threads);
    const int64_t most = (w.rows + w.period - 1) / w.period;
    w.lanes = static_cast<int>(std::min<int64_t>(std::max(1, threads / w.width), most));
    w.tiles = (w.chunks + w.width - 1) / w.width;
    w.pieces = foldable ? folded_pieces : pieces(most, (usual + w.width - 1) / w.width);
  }
  w.class_rows = w.rows / w.period, w.more_rows = static_cast<int>(w.rows % w.period);
  w.by_tiles = Divider(w.tiles), w.by_period = Divider(w.period), w.by_width = Divider(w.width);
  w.by_columns = Divider(w.row_columns);
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
  // Where the walk folds: the first column's place in the tensor, and how many columns that row has
  // from there on, at most one more than a vector.
  int fold_row = 0, fold_column = 0, first_part = 0;
  uint32_t drawn_row = 0, drawn_group = 0;  // see keep_rows
  int64_t limit = 0;                        // columns from here on do not exist in a row that is not whole
};
// `first` is the tensor's first element.
template <typename T>
FRIT_DEVICE ColumnPlace column_place(const ColumnWalk& walk, const Global<T>& first) {
  ColumnPlace at;
  constexpr int N = kVecOf<std::remove_const_t<T>>;
  const uint32_t block = static_cast<uint32_t>(block_index()), group = walk.by_tiles(block);
  const int tile = static_cast<int>(block - group * static_cast<uint32_t>(walk.tiles));
  const uint32_t piece = walk.by_period(group);
  at.piece = piece;
  at.row_class = static_cast<int>(group - piece * static_cast<uint32_t>(walk.period));
  at.lane = static_cast<int>(walk.by_width(static_cast<uint32_t>(thread_index())));
  at.slot = thread_index() - at.lane * walk.width;
  const int chunk = tile * walk.width + at.slot;
  at.column = int64_t{chunk} * N - row_shift(first + at.row_class * walk.row_stride);
  at.active = at.lane < walk.lanes && chunk < walk.chunks && at.column < walk.columns;
  at.limit = walk.last_columns;
  if (walk.fold > 1) {
    const uint32_t column = static_cast<uint32_t>(at.column), columns = static_cast<uint32_t>(walk.row_columns);
    const uint32_t row = walk.by_columns(column);
    at.fold_row = static_cast<int>(row), at.fold_column = static_cast<int>(column - row * columns);
    at.first_part = static_cast<int>(columns) - at.fold_column;
    if (at.first_part > N + 1) at.first_part = N + 1;
    if constexpr (N == 8) {
      // What no neighbour has (see keep_rows): lanes below 8 draw what would be lane 32's first group, the others the
      // group between a row's last and the next one's first, of one lane at most, since rows have 256 columns or more.
      const uint32_t group = (column - row * columns) >> 3, part = static_cast<uint32_t>(at.first_part);
      const bool ends = part <= 8;  // then the neighbour begins in the next row
      const uint32_t lanes = ballot(ends && part > 8 - (static_cast<uint32_t>(at.fold_column) & 7));
      const int between = lanes ? find_first_set(lanes) - 1 : 0;
      const uint32_t end_row = shuffle(ends ? row + 1 : row, 31), end_group = shuffle(ends ? 0 : group + 1, 31);
      const uint32_t between_row = shuffle(row, between), between_group = shuffle(group + 1, between);
      at.drawn_row = lane() < 8 ? end_row : between_row, at.drawn_group = lane() < 8 ? end_group : between_group;
    }
  }
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
template <int U, int N, typename Visit>
FRIT_DEVICE void for_rows(const ColumnWalk& walk, const ColumnPlace& at, bool vectors, Visit&& visit) {
  const int end = static_cast<int>(walk.rows_of_class(at.row_class)), step = static_cast<int>(walk.pieces) * walk.lanes;
  const int first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  // Where the walk folds, all threads of a warp run alike, since keep_rows shuffles; those without a vector, or whose
  // vector of the last row does not exist or is cut, have an earlier end.
  bool fast = at.active && at.whole && vectors;
  int fast_end = end, slow = fast || !at.active ? end : first;
  if (walk.fold > 1) {
    const bool cut = at.limit < at.column + N;
    fast = at.lane < walk.lanes;
    fast_end = !at.active ? 0 : cut ? end - 1 : end;
    const bool mine = static_cast<uint32_t>(end - 1) % static_cast<uint32_t>(step) == static_cast<uint32_t>(first);
    slow = at.active && cut && at.column < at.limit && mine ? end - 1 : end;
  }
  if (fast)
    for (int k = first; k < end; k += step * U)
      visit(std::true_type(), std::integral_constant<int, U>(), k, step, fast_end);
  FRIT_UNROLL_BY(1)
  for (int k = slow; k < end; k += step) visit(std::false_type(), std::integral_constant<int, 1>(), k, step, end);
}

// The thread's N values of a vector per column, such as a bias; zeros if there is none.
template <int N, typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, N> load_of_columns(const ColumnWalk& walk, const ColumnPlace& at,
                                                           const Global<T>& values) {
  using V = std::remove_const_t<T>;
  Vec<V, N> v{};
  if (!values || !at.active) return v;
  if (walk.fold == 1) return load_span<N>(values, at.column, walk.columns, V());
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) v[i] = load(values, i < at.first_part ? at.fold_column + i : i - at.first_part);
  return v;
}

// Which elements of `unroll` rows (see for_rows) dropout keeps, N bits a row, the first row's lowest. One row after the
// other, so that few registers are alive beside the vectors that are being loaded. Where the walk folds, a vector's
// columns are of two groups of 8, which share a Philox block each: the neighbour has the second one. Cost then: unroll
// + 1 blocks for `unroll` rows of 8 columns.
template <bool whole, int N, int unroll>
FRIT_DEVICE uint32_t keep_rows(const ColumnWalk& walk, const ColumnPlace& at, const DropoutTable& dropout, int k,
                               int step) {
  static_assert(N * unroll <= 32);
  uint32_t keeps = 0;
  if (walk.fold == 1) {
    FRIT_UNROLL_BY(1)
    for (int u = 0; u < unroll; ++u)
      keeps |= dropout_keep<N>(dropout, walk.row(k + u * step, at.row_class), at.column) << (u * N);
    return keeps;
  }
  const uint32_t row = static_cast<uint32_t>(k) * static_cast<uint32_t>(walk.fold) + static_cast<uint32_t>(at.fold_row);
  const uint32_t apart = static_cast<uint32_t>(step) * static_cast<uint32_t>(walk.fold);
  if constexpr (whole && N == 8) {
    const uint32_t group = static_cast<uint32_t>(at.fold_column) / 8;
    const int first = at.fold_column % 8;  // the vector begins there in its group
    const bool ends = at.first_part <= 8, between = ends && at.first_part > 8 - first;
    FRIT_UNROLL_BY(1)
    for (int u = 0; u < unroll; ++u)
      keeps |= dropout_keep_group(dropout, row + static_cast<uint32_t>(u) * apart, group) << (u * 8);
    const uint32_t drawn = dropout_keep_group(
        dropout, row - static_cast<uint32_t>(at.fold_row) + at.drawn_row + static_cast<uint32_t>(lane() & 7) * apart,
        at.drawn_group);
    uint32_t beyond = 0, middle = 0;
    FRIT_UNROLL
    for (int u = 0; u < unroll; ++u) {
      beyond |= shuffle(drawn, u) << (u * 8);
      middle |= shuffle(drawn, 8 + u) << (u * 8);
    }
    uint32_t next = shuffle_down(keeps, 1);
    if (lane() == 31) next = beyond;
    // Bits [0, 8 - first) are the first group's, [first_part, 8) or what is left the next one's, in each byte.
    const int second = ends ? at.first_part : 8 - first;
    const auto bytes = [](uint32_t bits) { return (bits & 0xffu) * 0x01010101u; };
    const uint32_t low = bytes(0xffu >> first), high = bytes(0xffu << second);
    uint32_t all = (keeps >> first & low & ~high) | (next << second & high);
    if (between) all |= middle << (8 - first) & ~low & ~high;
    return all;
  } else {
    FRIT_UNROLL_BY(1)
    for (int u = 0; u < unroll; ++u) {
      const uint32_t r = row + static_cast<uint32_t>(u) * apart;
      uint32_t keep = dropout_keep<N>(dropout, r, at.fold_column);
      if (at.first_part < N)
        keep = (keep & ((1u << at.first_part) - 1u)) |
               (dropout_keep<N>(dropout, r + 1, 0) << at.first_part & ((1u << N) - 1u));
      keeps |= keep << (u * N);
    }
    return keeps;
  }
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
