// Global gradient norm and the overflow flag, in one read of the gradients.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: sum_of_squares[0] = sum of g^2, summed in fixed blocks of elements (fp64 across blocks), the same bits for any number
// of threads; not_finite[0] = 1 if any element is NaN or infinite, else 0.
// Shapes: gradients [n] f32 or bf16; sum_of_squares f64 [1]; not_finite i32 [1].
void gradient_norm(Context& context, const Tensor& gradients, const Tensor& sum_of_squares, const Tensor& not_finite);

}  // namespace frit
