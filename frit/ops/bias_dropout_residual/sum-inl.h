// The arithmetic of bias_dropout_residual's kernels, for those that do it along with something else: the same bits.
#pragma once
#include "frit/simt/simt.h"

namespace frit::simt {

// residual + dropout(x), rounded once where dropout is active.
FRIT_DEVICE float add_dropped(float x, bool keep, bool active, float scale, float residual) {
  return active ? fmaf(keep ? x : 0.0f, scale, residual) : x + residual;
}

// Which of N columns from `column` on, which may lie before the row, dropout keeps. Cost: one Philox block where they
// are of one group of 8, else two.
template <int N>
FRIT_DEVICE uint32_t keep_of_columns(const DropoutTable& dropout, int64_t row, int column) {
  const auto group = [&](int g) {
    return dropout_keep_group(dropout, static_cast<uint32_t>(row), static_cast<uint32_t>(g));
  };
  const int first = column & 7;
  uint32_t keep = group(column >> 3) >> first;
  if (first + N > 8) keep |= group((column >> 3) + 1) << (8 - first);
  return keep & ((1u << N) - 1u);
}

}  // namespace frit::simt
