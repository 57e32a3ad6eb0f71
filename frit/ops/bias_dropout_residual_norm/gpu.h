// The GPU form of bias_dropout_residual_norm: layer_norm's kernels, with what lies in front of the norm, or below its
// gradient, done in the same launch. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Instances (Context::force("bias_dropout_residual_norm_forward", name)): layer_norm_forward's one_sync_*, spans_*,
// held. What layer_norm_forward would choose for the shape runs, tuned or not, so that a norm that is computed again,
// alone, has the same bits. False, and nothing done, if that has no such form ("looped", those that are kept to be
// measured, and spans_* where rows are not whole aligned vectors), or "apart" is forced.
// Cost: 1 launch; reads x,
// residual once, and bias as often as gamma and beta; writes s, y once; barriers as there.
bool bias_dropout_residual_norm_forward_gpu(Context& context, const Tensor& x, const Tensor& bias,
                                            const Tensor& residual, const Dropout& dropout, const Tensor& gamma,
                                            const Tensor& beta, float eps, const Tensor& s, const Tensor& y,
                                            const Tensor& mean, const Tensor& rstd);

// Instances (Context::force("bias_dropout_residual_norm_backward", name)): layer_norm_backward's xhat_1 and, for rows
// of whole aligned vectors, its held of 2 or 3 vectors a thread, spans_2 and spans_4: held where it can, by
// layer_norm_backward's rule without it else. The bits are those of layer_norm_backward with the same instance, but for
// the last ones of dgamma and dbeta where a thread holds 3 vectors: blocks have fewer warps. False, and nothing done,
// for rows that take another instance, or if "apart" is forced.
// Cost: 1 launch, and one that adds partial sums (where the types of dgamma, dbeta and dbias differ up to 3); reads dy,
// s (and dresidual) once, writes ds and dx once; barriers as there.
bool bias_dropout_residual_norm_backward_gpu(Context& context, const Tensor& dy, const Tensor& s, const Tensor& gamma,
                                             const Tensor& mean, const Tensor& rstd, const Tensor& dresidual,
                                             const Dropout& dropout, bool accumulate, const Tensor& ds,
                                             const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta,
                                             const Tensor& dbias);

}  // namespace frit
