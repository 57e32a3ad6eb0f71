// Global gradient norm and the overflow flag, in one read of the gradients.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: sum_of_squares[0] = sum of g^2, in fp64, in pieces that depend on n alone: the same bits for any number of
// threads or multiprocessors and any SIMD target (CPU and GPU add in different orders: their last places may differ);
// not_finite[0] = 1 if any element is NaN or infinite, else 0 (sum_of_squares is then NaN or infinite). Squares are
// exact in fp64 (2^-52 relative for each addition), huge and subnormal gradients included. Shapes: gradients
// contiguous, f32, bf16 or f16 (GPU); sum_of_squares f64 [1]; not_finite i32 [1]. Cost: reads the gradients once, 1
// parallel region, or 2 launches; scratch of 8 bytes a piece (at most 256; GPU 8192). Errors: std::invalid_argument if
// a shape or dtype differs, or for f16 without a GPU. No elements: 0 and 0.
void gradient_norm(Context& context, const Tensor& gradients, const Tensor& sum_of_squares, const Tensor& not_finite);

}  // namespace frit
