// The GPU form of bias_dropout_residual. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Cost: 1 launch, no barrier; reads x and residual once, writes y once; bias is read once for every 4 rows.
void bias_dropout_residual_forward_gpu(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                       const Dropout& dropout, const Tensor& y, const Tensor& keep);
// Cost: reads dy once, writes dx once. Without dbias 1 launch, no barrier; with it 2 launches, and partial sums of at
// most kMostBlocks rows are written and read.
void bias_dropout_residual_backward_gpu(Context& context, const Tensor& dy, const Dropout& dropout, bool accumulate,
                                        const Tensor& dx, const Tensor& dbias, const Tensor& keep);

}  // namespace frit
