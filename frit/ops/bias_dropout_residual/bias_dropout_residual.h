// The end of a sublayer: bias, dropout and the residual connection in one pass.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: y = residual + dropout(x + bias).
// Shapes: x, residual, y [rows, cols]; bias [cols]. bias and residual are optional (undefined). y may be x or residual.
// Cost: reads x and residual once, writes y once; 1 parallel region.
// Errors: std::invalid_argument if a shape or dtype differs.
void bias_dropout_residual_forward(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                   const Dropout& dropout, const Tensor& y);

// Math: dx = mask/keep * dy; dbias (+)= column sums of dx, in a fixed order. The residual's gradient is dy itself.
// Shapes: dy, dx [rows, cols] (dx may be dy); dbias [cols], f32 or dy's dtype, optional.
void bias_dropout_residual_backward(Context& context, const Tensor& dy, const Dropout& dropout, bool accumulate,
                                    const Tensor& dx, const Tensor& dbias);

}  // namespace frit
