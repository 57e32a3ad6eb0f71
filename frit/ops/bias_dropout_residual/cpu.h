// The CPU form of bias_dropout_residual. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

void bias_dropout_residual_forward_cpu(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                       const Dropout& dropout, const Tensor& y);
void bias_dropout_residual_backward_cpu(Context& context, const Tensor& dy, const Dropout& dropout, bool accumulate,
                                        const Tensor& dx, const Tensor& dbias);

}  // namespace frit
