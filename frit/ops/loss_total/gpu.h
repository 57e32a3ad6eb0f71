// The GPU form of loss_total.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Cost: 1 launch of one block, 1 barrier; reads 12 bytes a token, with accumulate also totals.
void loss_total_gpu(Context& context, const Tensor& loss, const Tensor& nll, const Tensor& labels, bool accumulate,
                    const Tensor& totals);

}  // namespace frit
