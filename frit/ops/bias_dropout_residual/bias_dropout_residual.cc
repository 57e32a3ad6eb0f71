#include "frit/ops/bias_dropout_residual/bias_dropout_residual.h"

#include "frit/ops/bias_dropout_residual/cpu.h"
#include "frit/ops/bias_dropout_residual/gpu.h"

namespace frit {
namespace {

void check_keep(const Context& context, const Tensor& keep, const Tensor& x) {
  if (!keep.defined()) return;
  FRIT_CHECK(
      context.on_gpu() && x.dtype() == DType::kBF16 && x.contiguous() && x.dim(1) % 8 == 0,
      "[bias_dropout_residual] a kept mask is for contiguous bf16 with columns a multiple of 8 on a GPU, x is {}",
      x.to_string());
  const bool bytes = keep.rank() == 2 && x.dim(1) % 8 == 0 && keep.shape() == x.shape();
  const bool bits = keep.rank() == 2 && x.dim(1) % 8 == 0 && keep.dim(0) == x.dim(0) && keep.dim(1) == x.dim(1) / 8;
  FRIT_CHECK(keep.dtype() == DType::kU8 && (bytes || bits) && keep.contiguous(),
             "[bias_dropout_residual] keep is {}, expected u8 of x's shape or an eighth of its columns; x is {}",
             keep.to_string(), x.to_string());
}

}  // namespace

void bias_dropout_residual_forward(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                   const Dropout& dropout, const Tensor& y, const Tensor& keep) {
  FRIT_CHECK(x.rank() == 2, "[bias_dropout_residual] x is {}, expected [rows, cols]", x.to_string());
  check_float("bias_dropout_residual", "x", x, context);
  FRIT_CHECK(y.dtype() == x.dtype() && y.shape() == x.shape(), "[bias_dropout_residual] y is {}, expected {}",
             y.to_string(), x.to_string());
  if (bias.defined()) {
    FRIT_CHECK(bias.rank() == 1 && bias.dim(0) == x.dim(1) && bias.dtype() == x.dtype() && bias.contiguous(),
               "[bias_dropout_residual] bias is {}, x is {}", bias.to_string(), x.to_string());
  }
  if (residual.defined()) {
    FRIT_CHECK(residual.dtype() == x.dtype() && residual.shape() == x.shape(),
               "[bias_dropout_residual] residual is {}, expected {}", residual.to_string(), x.to_string());
  }
  check_keep(context, keep, x);
  if (context.on_gpu()) return bias_dropout_residual_forward_gpu(context, x, bias, residual, dropout, y, keep);
  bias_dropout_residual_forward_cpu(context, x, bias, residual, dropout, y);
}

void bias_dropout_residual_backward(Context& context, const Tensor& dy, const Dropout& dropout, bool accumulate,
                                    const Tensor& dx, const Tensor& dbias, const Tensor& keep) {
  FRIT_CHECK(dy.rank() == 2, "[bias_dropout_residual] dy is {}, expected [rows, cols]", dy.to_string());
  check_float("bias_dropout_residual", "dy", dy, context);
  FRIT_CHECK(dx.dtype() == dy.dtype() && dx.shape() == dy.shape(), "[bias_dropout_residual] dx is {}, expected {}",
             dx.to_string(), dy.to_string());
  if (dbias.defined()) {
    FRIT_CHECK(dbias.rank() == 1 && dbias.dim(0) == dy.dim(1) && dbias.contiguous(),
               "[bias_dropout_residual] dbias is {}, dy is {}", dbias.to_string(), dy.to_string());
    FRIT_CHECK(dbias.dtype() == DType::kF32 || dbias.dtype() == dy.dtype(),
               "[bias_dropout_residual] dbias is {}, expected f32 or {}", dbias.to_string(), name_of(dy.dtype()));
  }
  check_keep(context, keep, dy);
  if (context.on_gpu()) return bias_dropout_residual_backward_gpu(context, dy, dropout, accumulate, dx, dbias, keep);
  bias_dropout_residual_backward_cpu(context, dy, dropout, accumulate, dx, dbias);
}

}  // namespace frit
