// The end of a sublayer: bias, dropout and the residual connection in one pass.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: y = residual + dropout(x + bias).
// Shapes: x, residual, y [rows, cols]; bias [cols]. bias and residual are optional (undefined). y may be x or residual.
// Cost: reads x and residual once, writes y once; 1 parallel region.
// keep, optional, u8: forward also writes which elements were kept, backward reads that instead of computing it again:
// the papers' forms, on a GPU and in bf16 alone, for comparison. [rows, cols]: a byte an element; [rows, cols / 8]
// (cols a multiple of 8): a bit. x and dy must then be contiguous. Errors: std::invalid_argument if a shape or dtype
// differs.
void bias_dropout_residual_forward(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                   const Dropout& dropout, const Tensor& y, const Tensor& keep = {});

// Math: dx = mask/keep * dy; dbias (+)= column sums of dx, in a fixed order. The residual's gradient is dy itself.
// Shapes: dy, dx [rows, cols] (dx may be dy); dbias [cols], f32 or dy's dtype, optional.
void bias_dropout_residual_backward(Context& context, const Tensor& dy, const Dropout& dropout, bool accumulate,
                                    const Tensor& dx, const Tensor& dbias, const Tensor& keep = {});

}  // namespace frit
