// The end of a sublayer and the LayerNorm behind it in one pass.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: s = residual + dropout(x + bias), rounded to its type; y = (s - mean) * rstd * gamma + beta: what
// bias_dropout_residual_forward and layer_norm_forward give one after the other, bit for bit.
// Shapes: x, residual, s, y [rows, cols] of one dtype; bias, gamma, beta [cols]; mean, rstd f32 [rows], optional. s is
// optional (where nobody reads it again) and may be x or residual; y may be x or residual if there is no s.
// Cost: on a GPU 1 launch, which reads x and residual once and writes s and y once: a pass less than the two operators
// and a launch less. On the CPU, and for rows that no instance holds (past 2048 vectors of 16 bytes), these two.
// Context::force("bias_dropout_residual_norm_forward", "apart") has them everywhere.
// Errors: std::invalid_argument if a shape or dtype differs or cols == 0.
void bias_dropout_residual_norm_forward(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                        const Dropout& dropout, const Tensor& gamma, const Tensor& beta, float eps,
                                        const Tensor& s, const Tensor& y, const Tensor& mean, const Tensor& rstd);

// Math: ds = layer_norm_backward's dx of dy + dresidual; dx = mask/keep * ds (of ds as rounded); dgamma and dbeta (+)=
// as there; dbias (+)= column sums of dx. The residual's gradient is ds itself. All as layer_norm_backward and
// bias_dropout_residual_backward give one after the other, but that dbias is added in another order.
// Shapes: dy, s, ds, dx [rows, cols] (ds may be dy); dx is optional if dropout is not active; dresidual optional (may
// be ds); mean, rstd f32 [rows]; dgamma, dbeta, dbias [cols], f32 or s's dtype; dbias is optional.
// Cost: on a GPU 1 launch beside those that add partial sums: reads dy, s (and dresidual) once, writes ds and dx once.
// On the CPU, and where no instance holds a row, the two operators. Which of these, and what scratch is asked for, does
// not depend on the number of rows. Context::force("bias_dropout_residual_norm_backward", "apart") has them everywhere.
void bias_dropout_residual_norm_backward(Context& context, const Tensor& dy, const Tensor& s, const Tensor& gamma,
                                         const Tensor& mean, const Tensor& rstd, const Tensor& dresidual,
                                         const Dropout& dropout, bool accumulate, const Tensor& ds, const Tensor& dx,
                                         const Tensor& dgamma, const Tensor& dbeta, const Tensor& dbias);

}  // namespace frit
