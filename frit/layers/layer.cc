#include "frit/layers/layer.h"

#include <cstring>
#include <utility>

#include "frit/ops/bias_dropout_residual/bias_dropout_residual.h"
#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/gemm/gemm.h"
#include "frit/ops/layer_norm/layer_norm.h"

namespace frit {

Place::Place(std::string place) : path(std::move(place)) {
  output = dropout_site(path + ".output");
  probabilities = dropout_site(path + ".probabilities");
  activation = dropout_site(path + ".activation");
}

Buffer allocate(Context& context, const Place& place, Shape shape, DType dtype, std::string_view name) {
  if (!context.planning()) return context.allocate(shape, dtype, name);  // no string is built in the loop
  return context.allocate(shape, dtype, fmt::format("{}.{}", place.path, name));
}

void fill_zero(Context& context, const Tensor& tensor) {
  if (context.planning() || tensor.numel() == 0) return;
  FRIT_CHECK(tensor.contiguous(), "[fill_zero] expected a contiguous tensor, not {}", tensor.to_string());
  if (context.on_gpu()) return context.gpu().fill_async(tensor.raw(), 0, static_cast<size_t>(tensor.bytes()));
  std::memset(tensor.raw(), 0, static_cast<size_t>(tensor.bytes()));
}

Tensor norm_forward(Context& context, const LayerOptions& options, const LayerNorm& w, const Place& place, Buffer x,
                    NormSaved& saved) {
  saved.x = std::move(x);
  if (!w.gamma.defined()) return saved.x;
  if (!options.training && !options.pre_norm) {  // nobody reads x again
    layer_norm_forward(context, saved.x, w.gamma, w.beta, options.eps, saved.x, {}, {});
    return saved.x;
  }
  const int64_t tokens = saved.x->dim(0);
  saved.y = allocate(context, place, saved.x->shape(), saved.x->dtype(), "norm");
  if (options.training) {
    saved.mean = allocate(context, place, {tokens}, DType::kF32, "mean");
    saved.rstd = allocate(context, place, {tokens}, DType::kF32, "rstd");
  }
  layer_norm_forward(context, saved.x, w.gamma, w.beta, options.eps, saved.y, saved.mean, saved.rstd);
  return saved.y;
}

void norm_drop_output(const LayerOptions& options, NormSaved& saved) {
  if (options.training && options.recompute) saved.y.release();
}

Tensor norm_output(Context& context, const LayerOptions& options, const LayerNorm& w, const Place& place,
                   NormSaved& saved) {
  if (w.gamma.defined() && !saved.y.defined()) {
    saved.y = allocate(context, place, saved.x->shape(), saved.x->dtype(), "norm_again");
    layer_norm_forward(context, saved.x, w.gamma, w.beta, options.eps, saved.y, saved.mean, saved.rstd);
  }
  return saved.output();
}

Buffer norm_backward(Context& context, const LayerNorm& w, Buffer dy, const Tensor& dresidual, NormSaved& saved,
                     bool accumulate, const LayerNorm& dw) {
  saved.y.release();
  if (w.gamma.defined())
    layer_norm_backward(context, dy, saved.x, w.gamma, saved.mean, saved.rstd, dresidual, accumulate, dy, dw.gamma,
                        dw.beta);
  saved = NormSaved();
  return dy;
}

void end_sublayer_forward(Context& context, const LayerOptions& options, const Place& place, const Tensor& bias,
                          const NormSaved& saved, const Tensor& y) {
  bias_dropout_residual_forward(context, y, bias, options.pre_norm ? saved.x.tensor() : saved.output(),
                                context.dropout(options.p_hidden, place.output), y);
}

SublayerBackward::SublayerBackward(Context& context, const LayerOptions& options, const Place& place, Buffer dy,
                                   bool accumulate, const Tensor& x, const Linear& dout)
    : context_(context), options_(options), place_(place), accumulate_(accumulate), dy_(std::move(dy)) {
  const Dropout dropout = context.dropout(options.p_hidden, place.output);
  // Who reads dz anyway sums the bias' gradient: the product, if it can, or else dropout's backward.
  bool with_product = true;
  if (dropout.active()) {
    with_product = linear_sums_bias_gradient(context, dy_, x, accumulate, dout.weight, dout.bias);
    dz_ = allocate(context, place, dy_->shape(), dy_->dtype(), "dz");
    bias_dropout_residual_backward(context, dy_, dropout, accumulate, dz_, with_product ? Tensor() : dout.bias);
  }
  linear_backward_weight(context, dz(), x, accumulate, dout.weight, with_product ? dout.bias : Tensor());
}

Buffer SublayerBackward::finish(Buffer da, const Tensor& weight, const LayerNorm& norm, NormSaved& saved,
                                const LayerNorm& dnorm) {
  dz_.release();
  saved.y.release();
  if (!options_.pre_norm) {  // the residual is the norm's output: dn = dy + da * weight
    linear_backward_input(context_, da, weight, true, dy_);
    da.release();
    return norm_backward(context_, norm, std::move(dy_), {}, saved, accumulate_, dnorm);
  }
  Buffer dn = allocate(context_, place_, dy_->shape(), dy_->dtype(), "dn");
  linear_backward_input(context_, da, weight, false, dn);
  da.release();
  Buffer dx = norm_backward(context_, norm, std::move(dn), dy_, saved, accumulate_, dnorm);
  dy_.release();
  return dx;
}

}  // namespace frit
