// Rows of 16-bit elements that are no whole vectors, in matrices without gaps that begin at multiples of 16 bytes: a
// warp writes the whole aligned vectors of a row, 32 * K of them at a time, from rows that lie otherwise against
// multiples of 16 bytes, and what is left at the row's two ends an element a lane.
#pragma once
#include "frit/simt/folded_columns.h"

namespace frit::simt {

// `head` elements lie before the first multiple of 16 bytes, `vectors` whole vectors behind them, its tail behind
// those.
struct ShiftedRow {
  int columns, head, vectors;
};
FRIT_DEVICE ShiftedRow shifted_row(int64_t row, int columns) {
  const int head = static_cast<int>(0u - static_cast<uint32_t>(row) * static_cast<uint32_t>(columns)) & 7;
  return {columns, head, (columns - head) / 8};
}

// A row to read from, at the elements of a ShiftedRow's vectors.
template <typename T>
struct SpreadRow {
  Global<const T> begin;  // of the row
  Global<const T> low;    // the aligned vector that the lane's first elements lie in
  int past, next;         // elements from low on that are not of them; 8 if some of them lie in the next vector
};
// Row r of a matrix of `rows`. If the row's last vector lies in one that the matrix ends within, `to` loses it.
template <typename T>
FRIT_DEVICE SpreadRow<T> spread_row(const Global<const T>& matrix, int64_t r, int64_t rows, ShiftedRow& to) {
  const int64_t from = r * to.columns + to.head;
  const int past = static_cast<int>(from) & 7;
  if (r == rows - 1 && past > 0 && to.vectors > 0 && to.head + 8 * to.vectors + 8 - past > to.columns) --to.vectors;
  const Global<const T> low = matrix + (from - past + 8 * lane());
  return {matrix + (from - to.head), low, past, past > 0 ? 8 : 0};
}
// The two aligned vectors that the lane's elements of the vectors from j on lie in, and the elements themselves.
template <typename T>
struct Spread {
  Vec<T, 8> low, high;
};
template <Cache cache, typename T>
FRIT_DEVICE Spread<T> load_spread(const SpreadRow<T>& row, int j) {
  return {load_vec<8, cache>(row.low, 8 * j), load_vec<8, cache>(row.low, 8 * j + row.next)};
}
template <typename T>
FRIT_DEVICE Vec<T, 8> join_spread(const Spread<T>& v, int past) {
  uint32_t w[8];
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i) w[i] = v.low.pairs[i], w[i + 4] = v.high.pairs[i];
  FRIT_UNROLL
  for (int i = 0; i < 6; ++i) w[i] = past & 4 ? w[i + 2] : w[i];
  FRIT_UNROLL
  for (int i = 0; i < 5; ++i) w[i] = past & 2 ? w[i + 1] : w[i];
  Vec<T, 8> joined;
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i)
    joined.pairs[i] = static_cast<uint32_t>((static_cast<uint64_t>(w[i + 1]) << 32 | w[i]) >> (past & 1 ? 16 : 0));
  return joined;
}

constexpr int kShiftedChunks = 8;  // of 32 * K vectors at most

// The element at the row's ends that is the lane's, -1 if there is none: the head's are lanes 0 to 7's, the tail's, 15
// at most, lanes 8 to 23's.
FRIT_DEVICE int edge_column(const ShiftedRow& row) {
  if (lane() < 8) return lane() < row.head ? lane() : -1;
  const int column = row.head + 8 * row.vectors + lane() - 8;
  return lane() < 24 && column < row.columns ? column : -1;
}
// Masks of what no lane draws with its vectors: lane l < 24 has the group of its edge column, lane 24 + c that of
// vector 32 * (first + c * step). All ones without dropout. Cost: a Philox block and 25 instructions.
FRIT_DEVICE KeptRows edge_groups(const DropoutTable& d, int64_t row, int column, int first, int step = 0) {
  KeptRows kept;
  if (!d.active) return kept;
  kept.low = kept.high = 0;
  const uint32_t group =
      static_cast<uint32_t>(lane() < 24 ? (column < 0 ? 0 : column / 8) : kWarpSize * (first + (lane() - 24) * step));
  const DropoutWords<1> words = dropout_words<1>(d, {static_cast<uint32_t>(row)}, {group});
  add_row(kept, words.v[0], dropout_carry(d));
  return kept;
}
FRIT_DEVICE bool edge_kept(const KeptRows& edges, int column) {
  return (column & 4 ? edges.high : edges.low) >> (8 * (column & 3) + 7) & 1;
}
// Masks of the lane's vectors first + lane, first + 32 + lane, ... of a row, K of them, whose first begins `head`
// columns behind the row's begin. Lane `beyond` of edges has the group behind them. All lanes of the warp call it.
// Cost: a Philox block and 22 instructions a vector.
template <int K>
FRIT_DEVICE KeptRows shifted_groups(const DropoutTable& d, int64_t row, int head, int first, const KeptRows& edges,
                                    int beyond) {
  static_assert(K <= 4, "a bit of each byte is free for what crosses it");
  KeptRows kept;
  if (!d.active) return kept;
  kept.low = kept.high = 0;
  uint32_t rows[K], groups[K];
  FRIT_UNROLL
  for (int k = 0; k < K; ++k)
    rows[k] = static_cast<uint32_t>(row), groups[k] = static_cast<uint32_t>(first + k * kWarpSize + lane());
  const DropoutWords<K> words = dropout_words<K>(d, rows, groups);
  FRIT_UNROLL
  for (int k = K - 1; k >= 0; --k) add_row(kept, words.v[k], dropout_carry(d));
  const auto join = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  const uint32_t low = shuffle(kept.low, (lane() + 1) % kWarpSize), high = shuffle(kept.high, (lane() + 1) % kWarpSize);
  const uint32_t beyond_low = shuffle(edges.low, beyond) >> (K - 1),
                 beyond_high = shuffle(edges.high, beyond) >> (K - 1);
  uint64_t next = join(low, high);
  if (lane() == kWarpSize - 1) next = join(low << 1 | beyond_low, high << 1 | beyond_high);
  const uint64_t all = join(kept.low, kept.high) >> 8 * head | next << 4 * (8 - head) << 4 * (8 - head);
  kept.low = static_cast<uint32_t>(all), kept.high = static_cast<uint32_t>(all >> 32);
  return kept;
}

}  // namespace frit::simt
