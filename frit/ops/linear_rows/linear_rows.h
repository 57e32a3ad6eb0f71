// A linear layer for few rows, as decoding has them: a row's bits are the same whatever the other rows and their number
// are.
#pragma once
#include <optional>

#include "frit/backend/context.h"
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"

namespace frit {

struct LinearRowsArgs {
  Tensor x;          // [rows, k], any row stride
  Tensor w;          // [n, k] as PyTorch stores it, any row stride; x's dtype. Constant: see below
  Tensor bias = {};  // [n], x's dtype, optional. Constant
  std::optional<Activation> activation = {};
  Tensor residual = {};  // [rows, n], x's dtype, any row stride, optional; may be y (then of its dtype), and may be
                         // `normed` of an earlier call

  // LayerNorm of x's rows before the product, if gamma is given.
  Tensor gamma = {}, beta = {};  // [k], x's dtype. Constant
  float epsilon = 1e-5f;
  Tensor normed = {};  // [rows, k], x's dtype, any row stride, optional: receives LayerNorm(x); not x itself
};

// Math: y = act(LN(x) w^T + bias) + residual, each but the product only if given. Sums in fp32; LN(x) is rounded to x's
// dtype before it meets w; LN(x) = (x - mean) / sqrt(var + epsilon) * gamma + beta, var biased, as exact as if the mean
// had been taken off beforehand: on a GPU means and squares are those of the pieces below, about the row's first
// element, merged (Chan); on the CPU they are fp64.
// Shapes: y [rows, n], any row stride, x's dtype or f32. dtypes: f32, bf16, on a GPU also f16. k, n >= 1.
//
// Bits: k is cut into 8 pieces by its length alone; each is summed in rising order from 0, then the pieces in their
// order. So a row of y (and of normed) has the same bits whatever `rows` is, wherever the row lies among them and
// whatever is beside it, and whichever instance runs; rows, row strides and addresses that are not multiples of 16
// bytes included. (On the CPU the same holds with the CPU's own order.)
//
// Constant: on a GPU w, bias, gamma and beta are read before the kernels before this one have ended, so that the time a
// step waits for its weights passes while the step before it still runs. No kernel that may still run may write them:
// behind the conversion or the upload of weights the host waits once (Gpu::synchronize), then decodes.
//
// Cost: 1 launch. With a norm 2 for f32, for rows of more than 1024, for addresses that are not multiples of 16 bytes
// and for hundreds of rows; these take scratch for LN(x) unless `normed` is given. w is read once for every 16 to 64
// rows, x once for every 8 to 64 columns (gpu.h has the tiles). Any number of rows is right; gemm may be faster for
// hundreds. Errors: std::invalid_argument if shapes or dtypes do not fit. rows == 0 does nothing.
void linear_rows(Context& context, const LinearRowsArgs& args, const Tensor& y);

}  // namespace frit
