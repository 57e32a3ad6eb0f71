// The CPU form of softmax.
#pragma once
#include "frit/ops/softmax/softmax.h"

namespace frit {

void softmax_forward_cpu(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y,
                         const Tensor& lse);
void softmax_backward_cpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& lse,
                          const SoftmaxArgs& args, const Tensor& dx);

}  // namespace frit
