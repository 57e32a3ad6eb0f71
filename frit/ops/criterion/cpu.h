// The CPU form of criterion. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

void criterion_forward_backward_cpu(Context& context, const Tensor& logits, const Tensor& bias, const Tensor& labels,
                                    float smoothing, const Tensor& scale, const Tensor& loss, const Tensor& nll);

}  // namespace frit
