// Rows of a walk that folds (frit/simt/folded_columns.h) whose vectors are on their way to shared memory, where they
// take no registers: more are under way, also while the masks of 8 rows are drawn.
#pragma once
#include "frit/simt/folded_columns.h"

namespace frit::simt {

// Calls start(row, stage) for a thread's rows, S of them ahead of use(row, stage, its mask), which waits for them
// (copy_async_wait<S - 1>) and calls start(row + S * rows.step, stage) as soon as the stage's place is free. start
// begins the copies of a row below rows.whole_end and commits them, also if there are none. use is not called for other
// rows. S: a power of two.
template <int S, typename Start, typename Use>
FRIT_DEVICE void for_held_folded_rows(const ColumnWalk& walk, const ColumnPlace& at, const FoldedRows& rows,
                                      const DropoutTable& dropout, Start&& start, Use&& use) {
  static_assert((S & (S - 1)) == 0);
  FRIT_UNROLL
  for (int s = 0; s < S; ++s) start(rows.first + s * rows.step, s);
  uint32_t votes[8] = {};
  int drawn = 0, stage = 0;
  FRIT_UNROLL_BY(1)
  for (int k = rows.first; k < rows.end; k += 8 * rows.step) {
    if (drawn == 0) drawn_votes(walk, at, dropout, k, rows.step, votes);
    drawn ^= 1;
    KeptRows kept = kept_rows(walk, at, dropout, k, rows.step, rows.end, votes);
    const int batch_end = k + 8 * rows.step, stop = batch_end < rows.whole_end ? batch_end : rows.whole_end;
    FRIT_UNROLL_BY(1)
    for (int row = k; row < stop; row += rows.step) {
      use(row, stage, kept);
      stage = (stage + 1) & (S - 1);
      kept.next();
    }
  }
  copy_async_wait<0>();
}

}  // namespace frit::simt
