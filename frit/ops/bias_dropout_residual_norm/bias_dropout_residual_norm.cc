#include "frit/ops/bias_dropout_residual_norm/bias_dropout_residual_norm.h"

#include "frit/ops/bias_dropout_residual/bias_dropout_residual.h"
#include "frit/ops/bias_dropout_residual_norm/gpu.h"
#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/layer_norm/layer_norm.h"

namespace frit {
namespace {

void check_rows_of(const Context& context, const Tensor& x, const char* name) {
  FRIT_CHECK(x.rank() == 2 && x.dim(1) > 0, "[bias_dropout_residual_norm] {} is {}, expected [rows, cols]", name,
             x.to_string());
  check_float("bias_dropout_residual_norm", name, x, context);
}
void check_like(const Tensor& t, const Tensor& x, const char* name) {
  FRIT_CHECK(t.dtype() == x.dtype() && t.shape() == x.shape(), "[bias_dropout_residual_norm] {} is {}, expected {}",
             name, t.to_string(), x.to_string());
}
void check_columns(const Tensor& t, const Tensor& x, const char* name, bool f32_too) {
  FRIT_CHECK(t.rank() == 1 && t.dim(0) == x.dim(1) && t.contiguous() &&
                 (t.dtype() == x.dtype() || (f32_too && t.dtype() == DType::kF32)),
             "[bias_dropout_residual_norm] {} is {}, expected {}[{}]", name, t.to_string(), name_of(x.dtype()),
             x.dim(1));
}
void check_of_rows(const Tensor& t, const Tensor& x, const char* name) {
  FRIT_CHECK(t.rank() == 1 && t.dim(0) == x.dim(0) && t.dtype() == DType::kF32 && t.contiguous(),
             "[bias_dropout_residual_norm] {} is {}, expected f32[{}]", name, t.to_string(), x.dim(0));
}

}  // namespace

void bias_dropout_residual_norm_forward(Context& context, const Tensor& x, const Tensor& bias, const Tensor& residual,
                                        const Dropout& dropout, const Tensor& gamma, const Tensor& beta, float eps,
                                        const Tensor& s, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  check_rows_of(context, x, "x");
  check_columns(bias, x, "bias", false);
  check_like(residual, x, "residual");
  check_columns(gamma, x, "gamma", false);
  check_columns(beta, x, "beta", false);
  if (s.defined()) check_like(s, x, "s");
  check_like(y, x, "y");
  if (mean.defined()) check_of_rows(mean, x, "mean");
  if (rstd.defined()) check_of_rows(rstd, x, "rstd");
  if (context.on_gpu() &&
      bias_dropout_residual_norm_forward_gpu(context, x, bias, residual, dropout, gamma, beta, eps, s, y, mean, rstd))
    return;
  const Tensor& sum = s.defined() ? s : y;
  bias_dropout_residual_forward(context, x, bias, residual, dropout, sum);
  layer_norm_forward(context, sum, gamma, beta, eps, y, mean, rstd);
}

void bias_dropout_residual_norm_backward(Context& context, const Tensor& dy, const Tensor& s, const Tensor& gamma,
                                         const Tensor& mean, const Tensor& rstd, const Tensor& dresidual,
                                         const Dropout& dropout, bool accumulate, const Tensor& ds, const Tensor& dx,
                                         const Tensor& dgamma, const Tensor& dbeta, const Tensor& dbias) {
  check_rows_of(context, s, "s");
  check_like(dy, s, "dy");
  check_columns(gamma, s, "gamma", false);
  check_of_rows(mean, s, "mean");
  check_of_rows(rstd, s, "rstd");
  if (dresidual.defined()) check_like(dresidual, s, "dresidual");
  check_like(ds, s, "ds");
  FRIT_CHECK(dx.defined() || !dropout.active(), "[bias_dropout_residual_norm] dropout is active and there is no dx");
  if (dx.defined()) check_like(dx, s, "dx");
  check_columns(dgamma, s, "dgamma", true);
  check_columns(dbeta, s, "dbeta", true);
  if (dbias.defined()) check_columns(dbias, s, "dbias", true);
  if (context.on_gpu() && bias_dropout_residual_norm_backward_gpu(context, dy, s, gamma, mean, rstd, dresidual, dropout,
                                                                  accumulate, ds, dx, dgamma, dbeta, dbias))
    return;
  layer_norm_backward(context, dy, s, gamma, mean, rstd, dresidual, accumulate, ds, dgamma, dbeta);
  if (dx.defined())
    bias_dropout_residual_backward(context, ds, dropout, accumulate, dx, dbias);
  else if (dbias.defined())
    column_sum(context, ds, accumulate, dbias);
}

}  // namespace frit
