#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"

#include "frit/ops/bias_activation_dropout/cpu.h"
#include "frit/ops/bias_activation_dropout/gpu.h"

namespace frit {

const char* name_of(Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return "relu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_new";
    case Activation::kSilu:
      return "swish";
  }
  return "?";
}

Activation parse_activation(std::string_view name) {
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_new" || name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "swish" || name == "silu") return Activation::kSilu;
  fail("[activation] unknown activation \"{}\", known are relu, gelu, gelu_new (gelu_tanh), swish (silu)", name);
}

namespace {

void check(const Context& context, const Tensor& x, const Tensor& bias) {
  FRIT_CHECK(x.rank() == 2, "[bias_activation_dropout] x is {}, expected [rows, cols]", x.to_string());
  check_float("bias_activation_dropout", "x", x, context);
  if (bias.defined()) {
    FRIT_CHECK(bias.rank() == 1 && bias.dim(0) == x.dim(1) && bias.dtype() == x.dtype() && bias.contiguous(),
               "[bias_activation_dropout] bias is {}, x is {}", bias.to_string(), x.to_string());
  }
}

void check_backward(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias, const Tensor& dx,
                    const Tensor& dbias) {
  check(context, x, bias);
  FRIT_CHECK(dy.dtype() == x.dtype() && dy.shape() == x.shape(), "[bias_activation_dropout] dy is {}, expected {}",
             dy.to_string(), x.to_string());
  FRIT_CHECK(dx.dtype() == x.dtype() && dx.shape() == x.shape(), "[bias_activation_dropout] dx is {}, expected {}",
             dx.to_string(), x.to_string());
  if (dbias.defined()) {
    FRIT_CHECK(dbias.rank() == 1 && dbias.dim(0) == x.dim(1) && dbias.contiguous(),
               "[bias_activation_dropout] dbias is {}, x is {}", dbias.to_string(), x.to_string());
    FRIT_CHECK(dbias.dtype() == DType::kF32 || dbias.dtype() == x.dtype(),
               "[bias_activation_dropout] dbias is {}, expected f32 or {}", dbias.to_string(), name_of(x.dtype()));
  }
}

}  // namespace

void bias_activation_dropout_forward(Context& context, const Tensor& x, const Tensor& bias, Activation activation,
                                     const Dropout& dropout, const Tensor& y) {
  check(context, x, bias);
  FRIT_CHECK(y.dtype() == x.dtype() && y.shape() == x.shape(), "[bias_activation_dropout] y is {}, expected {}",
             y.to_string(), x.to_string());
  if (context.on_gpu()) return bias_activation_dropout_forward_gpu(context, x, bias, activation, dropout, y);
  bias_activation_dropout_forward_cpu(context, x, bias, activation, dropout, y);
}

void bias_activation_dropout_backward(Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias,
                                      Activation activation, const Dropout& dropout, bool accumulate, const Tensor& dx,
                                      const Tensor& dbias) {
  check_backward(context, dy, x, bias, dx, dbias);
  const ActivationBackward form = {activation, dropout, dropout.scale()};
  if (context.on_gpu()) return bias_activation_dropout_backward_gpu(context, dy, x, bias, form, accumulate, dx, dbias);
  bias_activation_dropout_backward_cpu(context, dy, x, bias, form, accumulate, dx, dbias);
}

void relu_dropout_backward(Context& context, const Tensor& dy, const Tensor& y, const Dropout& dropout, bool accumulate,
                           const Tensor& dx, const Tensor& dbias) {
  check_backward(context, dy, y, {}, dx, dbias);
  // ReLU's slope at y is 1 where y > 0, which says what was kept, too.
  const ActivationBackward form = {Activation::kRelu, Dropout(), dropout.scale()};
  if (context.on_gpu()) return bias_activation_dropout_backward_gpu(context, dy, y, {}, form, accumulate, dx, dbias);
  bias_activation_dropout_backward_cpu(context, dy, y, {}, form, accumulate, dx, dbias);
}

}  // namespace frit
