#include "frit/ops/layer_norm/layer_norm.h"

#include "frit/ops/layer_norm/cpu.h"
#include "frit/ops/layer_norm/gpu.h"

namespace frit {
namespace {

void check_input(const Context& context, const Tensor& x) {
  FRIT_CHECK(x.rank() == 2, "[layer_norm] x is {}, expected [rows, cols]", x.to_string());
  FRIT_CHECK(x.dtype() == DType::kF32 || is_16bit_float(x.dtype()), "[layer_norm] x is {}, expected f32, bf16 or f16",
             x.to_string());
  FRIT_CHECK(x.dtype() != DType::kF16 || context.on_gpu(), "[layer_norm] f16 needs a GPU, x is {}", x.to_string());
  FRIT_CHECK(x.dim(1) > 0, "[layer_norm] x is {}, expected at least one column", x.to_string());
}
void check_like(const Tensor& t, const Tensor& x, const char* name) {
  FRIT_CHECK(t.dtype() == x.dtype() && t.shape() == x.shape(), "[layer_norm] {} is {}, expected {}", name,
             t.to_string(), x.to_string());
}
void check_columns(const Tensor& t, const Tensor& x, const char* name, bool f32_too) {
  FRIT_CHECK(t.rank() == 1 && t.dim(0) == x.dim(1) && t.contiguous(), "[layer_norm] {} is {}, x has {} columns", name,
             t.to_string(), x.dim(1));
  FRIT_CHECK(t.dtype() == x.dtype() || (f32_too && t.dtype() == DType::kF32), "[layer_norm] {} is {}, expected {}{}",
             name, t.to_string(), name_of(x.dtype()), f32_too ? " or f32" : "");
}
void check_rows(const Tensor& t, const Tensor& x, const char* name) {
  FRIT_CHECK(t.rank() == 1 && t.dim(0) == x.dim(0) && t.dtype() == DType::kF32 && t.contiguous(),
             "[layer_norm] {} is {}, expected f32[{}]", name, t.to_string(), x.dim(0));
}

}  // namespace

void layer_norm_forward(Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                        const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  check_input(context, x);
  check_columns(gamma, x, "gamma", false);
  check_columns(beta, x, "beta", false);
  check_like(y, x, "y");
  if (mean.defined()) check_rows(mean, x, "mean");
  if (rstd.defined()) check_rows(rstd, x, "rstd");
  if (context.on_gpu()) return layer_norm_forward_gpu(context, x, gamma, beta, eps, y, mean, rstd);
  layer_norm_forward_cpu(context, x, gamma, beta, eps, y, mean, rstd);
}

void layer_norm_backward(Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma, const Tensor& mean,
                         const Tensor& rstd, const Tensor& dresidual, bool accumulate, const Tensor& dx,
                         const Tensor& dgamma, const Tensor& dbeta) {
  check_input(context, x);
  check_like(dy, x, "dy");
  check_columns(gamma, x, "gamma", false);
  check_rows(mean, x, "mean");
  check_rows(rstd, x, "rstd");
  if (dresidual.defined()) check_like(dresidual, x, "dresidual");
  check_like(dx, x, "dx");
  check_columns(dgamma, x, "dgamma", true);
  check_columns(dbeta, x, "dbeta", true);
  if (context.on_gpu())
    return layer_norm_backward_gpu(context, dy, x, gamma, mean, rstd, dresidual, accumulate, dx, dgamma, dbeta);
  layer_norm_backward_cpu(context, dy, x, gamma, mean, rstd, dresidual, accumulate, dx, dgamma, dbeta);
}

}  // namespace frit
