// Global gradient norm and the overflow flag, in one read of the gradients.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: sum_of_squares[0] = sum of g^2, in fp64, in pieces that depend on n alone: the same bits for any number of
// threads and any SIMD target; not_finite[0] = 1 if any element is NaN or infinite, else 0 (sum_of_squares is then NaN
// or infinite). Shapes: gradients contiguous, f32 or bf16; sum_of_squares f64 [1]; not_finite i32 [1]. Cost: reads the
// gradients once, 1 parallel region; scratch of 8 bytes a piece (at most 256 pieces). Errors: std::invalid_argument if
// a shape or dtype differs. No elements: 0 and 0.
void gradient_norm(Context& context, const Tensor& gradients, const Tensor& sum_of_squares, const Tensor& not_finite);

}  // namespace frit
