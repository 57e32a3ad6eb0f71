// The CPU form of bias_activation_dropout. Arguments are checked already.
#pragma once
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"

namespace frit {

void bias_activation_dropout_forward_cpu(Context& context, const Tensor& x, const Tensor& bias, Activation activation,
                                         const Dropout& dropout, const Tensor& y);
void bias_activation_dropout_backward_cpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias,
                                          Activation activation, const Dropout& dropout, bool accumulate, const Tensor& dx,
                                          const Tensor& dbias);

}  // namespace frit
