// The CPU form of loss_total, and the order of its sums.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Token i goes to partial sum i / kLossVector % kLossSums, in rising order. The partial sums are added in groups of 32,
// then the groups' sums, both in a tree: i and i + half, for half = 16, 8, 4, 2, 1.
constexpr int kLossSums = 1024, kLossVector = 4;

void loss_total_cpu(const Tensor& loss, const Tensor& nll, const Tensor& labels, bool accumulate, const Tensor& totals);

}  // namespace frit
