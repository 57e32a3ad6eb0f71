// Rows of a walk that folds, eight at a time: their masks are drawn, then their vectors are loaded, a few at once, and
// used. Instructions are what it saves: vectors do not move between registers, nothing is asked row by row.
#pragma once
#include "frit/simt/folded_columns.h"
#include "frit/simt/row_draws.h"

namespace frit::simt {

// permute_bytes with a selector that is no constant: its digits are below 8.
FRIT_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDACC__
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
#else
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= (static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return bytes;
#endif
}

// What kept_rows gives, for a thread's rows from the first on, eight a call. All lanes of the warp call it. Cost: a
// Philox block and 25 instructions a row.
struct FoldedMasks {
  uint32_t votes[8] = {};  // drawn_votes of 16 rows
  bool second = false;     // the last 8 of them are next

  FRIT_DEVICE KeptRows next(const ColumnWalk& walk, const ColumnPlace& at, const DropoutTable& d, int k, int step,
                            int end) {
    KeptRows rows;
    if (!d.active) return rows;
    if (!second) drawn_votes(walk, at, d, k, step, votes);
    const uint32_t fold = static_cast<uint32_t>(walk.fold), apart = static_cast<uint32_t>(step) * fold;
    const uint32_t row = static_cast<uint32_t>(k) * fold + static_cast<uint32_t>(at.fold_row);
    const uint32_t column = opaque(static_cast<uint32_t>(at.fold_column));  // nothing of it is kept over the rows
    const RowDraws draws(d, column / 8);
    const uint32_t add = dropout_carry(d);
    FRIT_UNROLL_BY(1)
    for (int u = k + 4 * step < end ? 6 : 2; u >= 0; u -= 2) {
      const DropoutWords<2> words = draws.rows<2>(d, row + static_cast<uint32_t>(u) * apart, apart);
      FRIT_UNROLL
      for (int i = 1; i >= 0; --i) add_row(rows, words.v[i], add);
    }
    // The vector's bytes from `cut` on are the next group's, which the neighbour has; in front of them may lie such of
    // the group between two rows of the tensor.
    const uint32_t pick = second ? 0x6240 : 0x7351;
    second = !second;
    uint32_t pairs[4];
    FRIT_UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] = permute_bytes(votes[2 * i], votes[2 * i + 1], pick);
    uint32_t next_low = shuffle_down(rows.low, 1), next_high = shuffle_down(rows.high, 1);
    if (lane() == 31) {
      next_low = permute_bytes<0x5410>(pairs[0], pairs[1]);
      next_high = permute_bytes<0x5410>(pairs[2], pairs[3]);
    }
    const uint32_t first = column % 8, own_end = 8 - first, part = opaque(static_cast<uint32_t>(at.first_part));
    const uint32_t cut = part <= 8 ? part : own_end;
    const auto low_bytes = [](uint32_t n) { return ~uint64_t{0} >> (64 - 8 * n); };
    const auto choose = [](uint64_t mask, uint64_t a, uint64_t b) { return (a & mask) | (b & ~mask); };
    const auto shifted = [](uint32_t low, uint32_t high, uint32_t by) {  // rotated right by so many bytes
      const uint32_t pick = by * 0x1111u;
      return static_cast<uint64_t>(permute_bytes(low, high, (0x7654u + pick) & 0x7777u)) << 32 |
             permute_bytes(low, high, (0x3210u + pick) & 0x7777u);
    };
    uint64_t all = shifted(rows.low, rows.high, first);
    if (cut > own_end)
      all =
          choose(low_bytes(own_end), all,
                 shifted(permute_bytes<0x7632>(pairs[0], pairs[1]), permute_bytes<0x7632>(pairs[2], pairs[3]), first));
    all = choose(low_bytes(cut), all, shifted(next_low, next_high, 8 - cut));
    rows.low = static_cast<uint32_t>(all), rows.high = static_cast<uint32_t>(all >> 32);
    return rows;
  }
};

// Calls visit(std::integral_constant<int, n>, kept), n being U or 1, for the next n of the thread's rows that have a
// whole vector, until all are done. visit takes a row's mask, the top bits of kept's bytes, off by kept.next(). U
// divides 8.
template <int U, typename Visit>
FRIT_DEVICE void visit_folded_rows(const ColumnWalk& walk, const ColumnPlace& at, const FoldedRows& rows,
                                   const DropoutTable& dropout, Visit&& visit) {
  FoldedMasks masks;
  FRIT_UNROLL_BY(1)
  for (int k = rows.first; k < rows.end; k += 8 * rows.step) {
    KeptRows kept = masks.next(walk, at, dropout, k, rows.step, rows.end);
    if (k + 7 * rows.step < rows.whole_end) {
      FRIT_UNROLL_BY(1)
      for (int i = 0; i < 8; i += U) visit(std::integral_constant<int, U>(), kept);
    } else {
      FRIT_UNROLL_BY(1)
      for (int r = k; r < rows.whole_end; r += rows.step) visit(std::integral_constant<int, 1>(), kept);
    }
  }
}

}  // namespace frit::simt
