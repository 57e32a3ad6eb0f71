// Starts layer_norm_forward's instances `held` and `in_place`, on x of 16 bits.
#pragma once
#include "frit/ops/layer_norm/forward.h"

namespace frit::layer_norm {

// whole: all operands' rows are whole aligned vectors of 16 bytes.
void start_forward_held(Context& context, const ForwardShape& shape, bool whole, const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, float eps, const Tensor& y, const Tensor& mean, const Tensor& rstd);
// Rows of x and y must lie alike (rows_alike), and gamma and beta begin at a multiple of 16 bytes.
void start_forward_in_place(Context& context, const ForwardShape& shape, const Tensor& x, const Tensor& gamma,
                            const Tensor& beta, float eps, const Tensor& y, const Tensor& mean, const Tensor& rstd);

}  // namespace frit::layer_norm
