// The CPU form of layer_norm. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

void layer_norm_forward_cpu(Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                            const Tensor& y, const Tensor& mean, const Tensor& rstd);
void layer_norm_backward_cpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                             const Tensor& mean, const Tensor& rstd, const Tensor& dresidual, bool accumulate,
                             const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta);

}  // namespace frit
