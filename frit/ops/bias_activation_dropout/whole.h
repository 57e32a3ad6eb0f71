// The kernels for 16-bit rows of whole aligned vectors, one for each activation.
#pragma once
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"
#include "frit/simt/whole_columns.h"

namespace frit {

constexpr int kActivationThreads = 256;  // of a block without sums

// walk: such that walks_whole, and bias begins_whole.
void start_activation_forward_whole(Context& context, const ColumnWalk& walk, const Tensor& x, const Tensor& bias,
                                    Activation activation, const simt::DropoutTable& dropout, const Tensor& y);
// partial: where blocks write their column sums; may be missing.
void start_activation_backward_whole(Context& context, const ColumnWalk& walk, const Tensor& dy, const Tensor& x,
                                     const Tensor& bias, Activation activation, const simt::DropoutTable& dropout,
                                     const Tensor& dx, const Tensor& partial);

}  // namespace frit
