// What kernels for 16-bit tensors share whose rows are no whole vectors, but lie end to end, so that their walk folds
// (frit/simt/columns.h): every vector but the tensor's last is whole, and dropout's masks are drawn for 8 rows at once,
// kept as a bit in each element's byte, and shifted to the vectors' columns byte by byte.
#pragma once
#include "frit/simt/row_draws.h"

namespace frit {

inline bool walks_folded(const ColumnWalk& walk, const Tensor& x) {
  return walk.fold > 1 && size_of(x.dtype()) == 2;
}
// Rows a thread of launches without sums: multiples of 4, so that the 4 that are on their way are all of use.
inline int folded_rows_a_thread(int64_t rows, int64_t columns) {
  return static_cast<int>(std::clamp<int64_t>(rows * columns / 8 / (1 << 17) / 4 * 4, 4, 16));
}

namespace simt {

// Four bytes of the eight of low and high: a digit of `selector` for each, the lowest byte's last. 0 to 3 are low's, 4
// to 7 high's; a digit with 8 added gives the byte's top bit eight times. One instruction (prmt).
template <uint32_t selector>
FRIT_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high) {
#ifdef __CUDACC__
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "n"(selector));
  return bytes;
#else
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i & 15, byte = static_cast<uint32_t>(both >> 8 * (digit & 7)) & 255;
    bytes |= (digit < 8 ? byte : byte & 128 ? 255u : 0u) << 8 * i;
  }
  return bytes;
#endif
}

// Which of a vector's 8 elements dropout keeps: the top bits of the bytes of low (elements 0 to 3) and high (4 to 7).
// The bits below are later rows'.
struct KeptRows {
  uint32_t low = ~0u, high = ~0u;

  FRIT_DEVICE void next() { low <<= 1, high <<= 1; }
  // Zeroes what is dropped. Cost: 8 instructions.
  template <typename T>
  FRIT_DEVICE void drop(Vec<T, 8>& v) const {
    v.pairs[0] &= permute_bytes<0x9988>(low, low), v.pairs[1] &= permute_bytes<0xbbaa>(low, low);
    v.pairs[2] &= permute_bytes<0x9988>(high, high), v.pairs[3] &= permute_bytes<0xbbaa>(high, high);
  }
  FRIT_DEVICE bool kept(int i) const { return (i < 4 ? low : high) >> (8 * (i % 4) + 7) & 1; }
};

// Adds a row above those of `rows`: its words' elements (see Dropout), each of which is kept if the sum with `add` in
// 16 bits carries. Cost: 18 instructions.
FRIT_DEVICE void add_row(KeptRows& rows, const uint32_t (&words)[4], uint32_t add) {
  const auto carry = [&](uint32_t w) { return (((w ^ add) & 0xfffefffeu) >> 1) + (w & add); };  // (w + add) / 2
  constexpr uint32_t kTop = 0x80808080u;
  rows.low = (permute_bytes<0x7531>(carry(words[0]), carry(words[1])) & kTop) | (rows.low >> 1 & ~kTop);
  rows.high = (permute_bytes<0x7531>(carry(words[2]), carry(words[3])) & kTop) | (rows.high >> 1 & ~kTop);
}
// The two numbers that are added to the 16-bit elements of a word.
FRIT_DEVICE uint32_t dropout_carry(const DropoutTable& d) {
  return ((0u - dropout_threshold(d)) >> 16) * 0x10001u;
}

// What no neighbour has of 16 rows' masks (see keep_rows of columns.h): bit 15 - u of votes[i] says whether element i
// of what would be lane 32's group is kept in row k + u * step, bit 31 - u the same of the group between the tensor row
// that ends in the warp and the next one. All lanes of the warp call it. Cost: a Philox block and 30 instructions.
FRIT_DEVICE void drawn_votes(const ColumnWalk& walk, const ColumnPlace& at, const DropoutTable& d, int k, int step,
                             uint32_t (&votes)[8]) {
  FRIT_UNROLL
  for (int i = 0; i < 8; ++i) votes[i] = 0;
  if (!d.active) return;
  const int from = lane() < 16 ? 0 : 8;  // whose place column_place has made for it
  const uint32_t row = shuffle(at.drawn_row, from), group = shuffle(at.drawn_group, from);
  const uint32_t place = static_cast<uint32_t>(k + (15 - (lane() & 15)) * step);
  const DropoutWords<1> words = dropout_words<1>(d, {place * static_cast<uint32_t>(walk.fold) + row}, {group});
  FRIT_UNROLL
  for (int i = 0; i < 8; ++i) votes[i] = ballot(words.kept(0, i, dropout_threshold(d)));
}

// Masks of the thread's columns in rows k, k + step, ... k + 7 * step of a walk that folds, as far as they are below
// end. A thread draws the group of 8 columns that its vector begins in; the neighbour has the next one. votes:
// drawn_votes of the 16 rows from here on; become those of the 8 behind. All lanes of the warp call it. Cost: a Philox
// block and 27 instructions a row.
FRIT_DEVICE KeptRows kept_rows(const ColumnWalk& walk, const ColumnPlace& at, const DropoutTable& d, int k, int step,
                               int end, uint32_t (&votes)[8]) {
  KeptRows rows;
  if (!d.active) return rows;
  const uint32_t apart = static_cast<uint32_t>(step) * static_cast<uint32_t>(walk.fold);
  const uint32_t row = static_cast<uint32_t>(k) * static_cast<uint32_t>(walk.fold) + static_cast<uint32_t>(at.fold_row);
  const uint32_t add = dropout_carry(d);
  const RowDraws draws(d, static_cast<uint32_t>(at.fold_column) / 8);
  FRIT_UNROLL_BY(1)
  for (int u = k + 4 * step < end ? 4 : 0; u >= 0; u -= 4) {
    const uint32_t r = row + static_cast<uint32_t>(u) * apart;
    const DropoutWords<4> words = draws.rows<4>(d, r, apart);
    FRIT_UNROLL
    for (int i = 3; i >= 0; --i) add_row(rows, words.v[i], add);
  }
  uint32_t beyond[2], between[2];
  FRIT_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t a = permute_bytes<0x7351>(votes[4 * i], votes[4 * i + 1]),
                   b = permute_bytes<0x7351>(votes[4 * i + 2], votes[4 * i + 3]);
    beyond[i] = permute_bytes<0x5410>(a, b), between[i] = permute_bytes<0x7632>(a, b);
  }
  FRIT_UNROLL
  for (int i = 0; i < 8; ++i) votes[i] <<= 8;
  uint32_t next_low = shuffle_down(rows.low, 1), next_high = shuffle_down(rows.high, 1);
  if (lane() == 31) next_low = beyond[0], next_high = beyond[1];
  // Bytes [0, 8 - first) are the vector's first group's, those from `second` on the next one's.
  const int first = at.fold_column % 8;
  const bool ends = at.first_part <= 8;
  const int second = ends ? at.first_part : 8 - first;
  const auto join = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  uint64_t own = join(rows.low, rows.high) >> 8 * first;
  if (ends) {
    if (second > 8 - first) own |= join(between[0], between[1]) << 8 * (8 - first);
    own &= ~uint64_t{0} >> (64 - 8 * second);
  }
  const uint64_t all = own | join(next_low, next_high) << 4 * second << 4 * second;
  rows.low = static_cast<uint32_t>(all), rows.high = static_cast<uint32_t>(all >> 32);
  return rows;
}

// The rows of a thread of a walk that folds.
struct FoldedRows {
  int first, step, end;
  int whole_end;  // rows from here on have no whole vector of the thread's
  bool cut;       // the last row has the first elements of one
};
FRIT_DEVICE FoldedRows folded_rows(const ColumnWalk& walk, const ColumnPlace& at) {
  FoldedRows r;
  r.step = static_cast<int>(walk.pieces) * walk.lanes, r.first = static_cast<int>(at.piece) * walk.lanes + at.lane;
  r.end = static_cast<int>(walk.rows);
  const bool short_of = at.limit < at.column + 8;
  r.whole_end = !at.active ? 0 : short_of ? r.end - 1 : r.end;
  r.cut = at.active && short_of && at.column < at.limit &&
          static_cast<uint32_t>(r.end - 1) % static_cast<uint32_t>(r.step) == static_cast<uint32_t>(r.first);
  return r;
}
// Calls fetch(u, is there a row?) for a thread's rows, U ahead of use(u, its mask, is it there?, is there one U behind
// it?), which calls fetch(u, ...) for that as soon as it can. Rows go by u = 0 ... U - 1, 0, ...; what is used without
// being there is thrown away. U divides 8.
template <int U, typename Fetch, typename Use>
FRIT_DEVICE void for_folded_rows(const ColumnWalk& walk, const ColumnPlace& at, const FoldedRows& rows,
                                 const DropoutTable& dropout, Fetch&& fetch, Use&& use) {
  FRIT_UNROLL
  for (int u = 0; u < U; ++u) fetch(u, rows.first + u * rows.step < rows.whole_end);
  uint32_t votes[8] = {};
  int drawn = 0;
  FRIT_UNROLL_BY(1)
  for (int k = rows.first; k < rows.end; k += 8 * rows.step) {
    if (drawn == 0) drawn_votes(walk, at, dropout, k, rows.step, votes);
    drawn ^= 1;
    KeptRows kept = kept_rows(walk, at, dropout, k, rows.step, rows.end, votes);
    const int stop = k + 8 * rows.step < rows.end ? k + 8 * rows.step : rows.end;
    FRIT_UNROLL_BY(1)
    for (int begin = k; begin < stop; begin += U * rows.step) {
      FRIT_UNROLL
      for (int u = 0; u < U; ++u) {
        const int row = begin + u * rows.step;
        use(u, kept, row < rows.whole_end, row + U * rows.step < rows.whole_end);
        kept.next();
      }
    }
  }
}
// The mask of the cut vector.
FRIT_DEVICE KeptRows kept_cut(const ColumnWalk& walk, const ColumnPlace& at, const DropoutTable& d) {
  KeptRows kept;
  if (!d.active) return kept;
  const int64_t row = (walk.rows - 1) * walk.fold + at.fold_row;
  FRIT_UNROLL_BY(1)
  for (int i = 7; i >= 0; --i) {  // each element pushes the others up
    const uint32_t bit = i < at.first_part ? dropout_keep<1>(d, row, at.fold_column + i)
                                           : dropout_keep<1>(d, row + 1, i - at.first_part);
    kept.high = kept.high << 8 | kept.low >> 24, kept.low = kept.low << 8 | bit << 7;
  }
  return kept;
}

}  // namespace simt
}  // namespace frit
