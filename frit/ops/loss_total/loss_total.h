// Sums of a batch's losses, on the device that has them.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: totals = {sum of loss, sum of nll, number of labels >= 0}, or with accumulate totals += these. In fp64, in an
// order that depends on the number of tokens alone: the same bits on every device and for every number of threads. Rows
// without a label are summed as they are: criterion made them 0. A NaN among the losses is in the sum.
// Shapes: loss, nll f32 [tokens]; labels i32 [tokens]; totals f64 [3].
// Cost: 1 launch of one block, which reads everything once, or no parallel region; no scratch. One block reads tens of
// GB/s: right for the thousands of tokens of a batch.
// Errors: std::invalid_argument if a shape or dtype differs. No tokens: zeros, or nothing is added.
void loss_total(Context& context, const Tensor& loss, const Tensor& nll, const Tensor& labels, bool accumulate,
                const Tensor& totals);

}  // namespace frit
