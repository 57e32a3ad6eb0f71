// The GPU form of bias_activation_dropout. Arguments are checked already.
#pragma once
#include "frit/ops/bias_activation_dropout/cpu.h"

namespace frit {

// Cost: 1 launch, no barrier; reads x once, writes y once; bias is read once for every 2 rows.
void bias_activation_dropout_forward_gpu(Context& context, const Tensor& x, const Tensor& bias, Activation activation,
                                         const Dropout& dropout, const Tensor& y);
// Cost: reads dy and x once, writes dx once. Without dbias 1 launch, no barrier; with it 2 launches, and partial sums
// of at most kMostBlocks rows are written and read.
void bias_activation_dropout_backward_gpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias,
                                          const ActivationBackward& form, bool accumulate, const Tensor& dx,
                                          const Tensor& dbias);

}  // namespace frit
