// Layer normalisation over rows.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Normalises each row of x to zero mean and unit variance, then scales and shifts it.
// Math: y = (x - mean) * rstd * gamma + beta, rstd = 1 / sqrt(var + eps), var biased (divides by cols), as accurate as
// the two-pass form even where the mean is 10^4 standard deviations away. Shapes: x, y [rows, cols] f32, bf16, or on a
// GPU f16; gamma, beta [cols]; mean, rstd f32 [rows], optional (inference). y may be x without backward. Errors:
// std::invalid_argument if a shape or dtype differs or cols == 0. rows == 0 does nothing. Source: Ba, Kiros, Hinton
// 2016 (arXiv:1607.06450), section 3.
void layer_norm_forward(Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                        const Tensor& y, const Tensor& mean, const Tensor& rstd);

// Math: g = gamma * dy, xhat = (x - mean) * rstd; dx = rstd * (g - (sum g + xhat * sum g*xhat) / cols) + dresidual;
// dgamma (+)= column sums of dy * xhat, dbeta (+)= column sums of dy, in a fixed order.
// Shapes: dy, x, dx [rows, cols] (dx may be dy); dresidual [rows, cols], optional (may be dx); mean, rstd f32 [rows];
// dgamma, dbeta [cols], f32 or x's dtype.
void layer_norm_backward(Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& mean,
                         const Tensor& rstd, const Tensor& dresidual, bool accumulate, const Tensor& dx,
                         const Tensor& dgamma, const Tensor& dbeta);

}  // namespace frit
