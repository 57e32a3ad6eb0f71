// Rows of 16-bit elements that are no whole vectors, in matrices without gaps that begin at multiples of 16 bytes. A
// warp reads and computes dropout's groups of 8 columns, whatever lies where, and moves what it writes to whole aligned
// vectors at the end; what is left at the row's two ends goes an element a lane.
#pragma once
#include "frit/simt/whole_columns.h"

namespace frit::simt {

// A lane has K groups at a time, 32 apart. What is written is made of two groups, and each of these of two vectors that
// are read, so a chunk of 32 * K makes two less, and the next one begins two before its end.
template <int K>
constexpr int kShiftedChunk = kWarpSize* K - 2;

// A row to write: `head` elements lie before the first multiple of 16 bytes, `vectors` whole vectors behind them, its
// tail of at most 23 behind those.
struct ShiftedRow {
  int columns, head, vectors;
};
template <int K>
FRIT_DEVICE ShiftedRow shifted_row(int64_t row, int columns) {
  const int head = static_cast<int>(0u - static_cast<uint32_t>(row) * static_cast<uint32_t>(columns)) & 7;
  const int vectors = (columns - head) / 8, rest = vectors % kShiftedChunk<K>;
  return {columns, head, rest > 2 ? vectors : vectors - rest};  // no chunk for two vectors
}

// x, where it is known: what follows from it is not worked out before.
template <typename T>
FRIT_DEVICE Vec<T, 8> settled(Vec<T, 8> x) {
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i) x.pairs[i] = opaque(x.pairs[i]);
  return x;
}
FRIT_DEVICE int64_t settled(int64_t x) {
  const uint64_t high = opaque(static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32));
  return static_cast<int64_t>(high << 32 | opaque(static_cast<uint32_t>(x)));
}
// Elements before a row of a matrix without gaps.
FRIT_DEVICE int64_t row_begin(int64_t row, int columns) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(row)) * static_cast<uint32_t>(columns));
}

// A row to read from.
template <typename T>
struct SpreadRow {
  Global<const T> low;  // the aligned vector that the lane's first group begins in
  int past;             // elements from low on that are before it
  int loaded;           // aligned vectors that hold what `to` is made of
};
// Row r of a matrix of `rows`. If the row's last vector lies in one that the matrix ends within, `to` loses it.
template <typename T>
FRIT_DEVICE SpreadRow<T> spread_row(const Global<const T>& matrix, int32_t r, int32_t rows, ShiftedRow& to) {
  const int64_t from = row_begin(r, to.columns);
  const int past = static_cast<int>(from) & 7, more = (past + to.head + 7) / 8;
  if (r == rows - 1 && to.vectors > 0 && 8 * (to.vectors + more) - past > to.columns) --to.vectors;
  return {matrix + (from - past + 8 * lane()), past, to.vectors + more};
}
// The aligned vectors that the lane's groups first + lane, first + 32 + lane, ... begin in, K of them: what a group's
// own vector has not, the next lane has.
template <Cache cache, int K, typename T>
FRIT_DEVICE void load_spread(const SpreadRow<T>& row, int first, Vec<T, 8> (&v)[K]) {
  const int there = row.loaded - first - lane();
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    v[k] = Vec<T, 8>{};
    if (k * kWarpSize < there) v[k] = load_vec<8, cache>(row.low, 8 * (first + k * kWarpSize));
  }
}
// Vectors k become their elements from `past` on and the first ones of the next lane's, but for the last lane's last.
// All lanes of the warp call it. Cost: 9 instructions a vector.
template <int K, int whole, typename T>
FRIT_DEVICE void join_spread(Vec<T, 8> (&v)[K], int bits) {
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    uint32_t w[5 + whole];
    FRIT_UNROLL
    for (int i = 0; i < 4; ++i) w[i] = v[k].pairs[i];
    FRIT_UNROLL
    for (int i = 0; i <= whole; ++i)
      w[4 + i] = shuffle(lane() == 0 ? v[k < K - 1 ? k + 1 : k].pairs[i] : v[k].pairs[i], (lane() + 1) % kWarpSize);
    FRIT_UNROLL
    for (int i = 0; i < 4; ++i)
      v[k].pairs[i] = static_cast<uint32_t>((static_cast<uint64_t>(w[i + whole + 1]) << 32 | w[i + whole]) >> bits);
  }
}
template <int K, typename T>
FRIT_DEVICE void join_spread(Vec<T, 8> (&v)[K], int past) {
  const int bits = past & 1 ? 16 : 0;
  if (past < 2) {
    if (bits) join_spread<K, 0>(v, bits);
  } else if (past < 4) {
    join_spread<K, 1>(v, bits);
  } else if (past < 6) {
    join_spread<K, 2>(v, bits);
  } else {
    join_spread<K, 3>(v, bits);
  }
}
// Writes groups as the vectors of `row`, which begins at element `begin`. All lanes of the warp call it.
template <int K, typename T>
FRIT_DEVICE void store_shifted(const Global<T>& to, int64_t begin, const ShiftedRow& row, int first,
                               Vec<T, 8> (&v)[K]) {
  const int there = row.vectors - first - lane();
  const Global<T> at = to + settled(begin + row.head + 8 * (first + lane()));
  join_spread<K>(v, row.head);
  FRIT_UNROLL
  for (int k = 0; k < K; ++k)
    if (k * kWarpSize < there && (k < K - 1 || lane() < kWarpSize - 2))
      store_vec<8, Cache::kStream>(at, 8 * k * kWarpSize, v[k]);
}
// The groups of which store_shifted makes `row`'s vectors from `first` on, as these are now; what else they have is
// anything. All lanes of the warp call it.
template <int K, typename T>
FRIT_DEVICE void load_shifted(const Global<T>& from, const ShiftedRow& row, int first, Vec<T, 8> (&v)[K]) {
  const int j = first + lane() - (row.head > 0 ? 1 : 0);
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) {
    v[k] = Vec<T, 8>{};
    if (j + k * kWarpSize >= 0 && j + k * kWarpSize < row.vectors)
      v[k] = load_vec<8>(from, row.head + 8 * (j + k * kWarpSize));
  }
  join_spread<K>(v, (8 - row.head) % 8);
}

// The element at the row's ends that is the lane's, -1 if there is none: the head's are lanes 0 to 7's, the tail's
// lanes 8 to 22's.
FRIT_DEVICE int edge_column(const ShiftedRow& row) {
  if (lane() < 8) return lane() < row.head ? lane() : -1;
  const int column = row.head + 8 * row.vectors + lane() - 8;
  return column < row.columns ? column : -1;
}
// Does dropout keep it? Cost: a Philox block.
FRIT_DEVICE bool edge_kept(const DropoutTable& d, int64_t row, int column) {
  const uint32_t group = static_cast<uint32_t>(column) / 8;
  const DropoutWords<1> words = dropout_words<1>(d, {static_cast<uint32_t>(row)}, {group});
  const uint32_t low = column & 2 ? words.v[0][1] : words.v[0][0], high = column & 2 ? words.v[0][3] : words.v[0][2];
  const uint32_t word = column & 4 ? high : low;
  return (column & 1 ? word : word << 16) >= dropout_threshold(d);
}

}  // namespace frit::simt
