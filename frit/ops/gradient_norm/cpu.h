// The CPU form of gradient_norm.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Pieces that n elements are summed in; depends on n alone.
int64_t gradient_norm_pieces(int64_t n);

void gradient_norm_cpu(Context& context, const Tensor& gradients, const Tensor& sum_of_squares,
                       const Tensor& not_finite);

}  // namespace frit
