// The CPU form of bias_activation_dropout. Arguments are checked already.
#pragma once
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"

namespace frit {

// dx = dy * act'(x + bias) * mask * scale, the mask of `dropout` where that is active.
struct ActivationBackward {
  Activation activation;
  Dropout dropout;
  float scale;
};

void bias_activation_dropout_forward_cpu(Context& context, const Tensor& x, const Tensor& bias, Activation activation,
                                         const Dropout& dropout, const Tensor& y);
void bias_activation_dropout_backward_cpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias,
                                          const ActivationBackward& form, bool accumulate, const Tensor& dx,
                                          const Tensor& dbias);

}  // namespace frit
