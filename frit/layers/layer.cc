#include "frit/layers/layer.h"

#include <cstring>
#include <utility>

#include "frit/ops/bias_dropout_residual/bias_dropout_residual.h"
#include "frit/ops/bias_dropout_residual_norm/bias_dropout_residual_norm.h"
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

namespace {

// Does anybody read a norm's input behind it? In post-LN without training nobody does.
bool sum_is_read(const LayerOptions& options) {
  return options.training || options.pre_norm;
}

// Memory for the norm of x.
void allocate_norm(Context& context, const LayerOptions& options, const Place& place, const Tensor& x,
                   NormSaved& saved) {
  saved.y = allocate(context, place, x.shape(), x.dtype(), "norm");
  if (!options.training) return;
  saved.mean = allocate(context, place, {x.dim(0)}, DType::kF32, "mean");
  saved.rstd = allocate(context, place, {x.dim(0)}, DType::kF32, "rstd");
}

}  // namespace

Tensor norm_forward(Context& context, const LayerOptions& options, const LayerNorm& w, const Place& place, Buffer x,
                    NormSaved& saved) {
  saved.x = std::move(x);
  if (!w.gamma.defined()) return saved.x;
  if (!sum_is_read(options)) {
    layer_norm_forward(context, saved.x, w.gamma, w.beta, options.eps, saved.x, {}, {});
    return saved.x;
  }
  allocate_norm(context, options, place, saved.x, saved);
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

OutputGradient norm_backward(Context& context, const LayerOptions& options, const LayerNorm& w, Buffer dy,
                             const Tensor& dresidual, NormSaved& saved, bool accumulate, const LayerNorm& dw,
                             const EndBelow& below) {
  saved.y.release();
  OutputGradient result;
  if (w.gamma.defined() && below.place) {
    const Dropout dropout = context.dropout(options.p_hidden, below.place->output);
    if (dropout.active()) result.dz = allocate(context, *below.place, dy->shape(), dy->dtype(), "dz");
    bias_dropout_residual_norm_backward(context, dy, saved.x, w.gamma, saved.mean, saved.rstd, dresidual, dropout,
                                        accumulate, dy, result.dz, dw.gamma, dw.beta, below.dbias);
    result.ended = true;
  } else if (w.gamma.defined()) {
    layer_norm_backward(context, dy, saved.x, w.gamma, saved.mean, saved.rstd, dresidual, accumulate, dy, dw.gamma,
                        dw.beta);
  }
  saved = NormSaved();
  result.dy = std::move(dy);
  return result;
}

void end_sublayer_forward(Context& context, const LayerOptions& options, const Place& place, const Tensor& bias,
                          const NormSaved& saved, Buffer z, const NormAbove& above) {
  const Tensor& residual = options.pre_norm ? saved.x.tensor() : saved.output();
  const Dropout dropout = context.dropout(options.p_hidden, place.output);
  const LayerNorm& w = *above.norm;
  NormSaved& to = *above.saved;
  if (!w.gamma.defined()) {
    bias_dropout_residual_forward(context, z, bias, residual, dropout, z);
  } else if (sum_is_read(options)) {
    allocate_norm(context, options, *above.place, z, to);
    bias_dropout_residual_norm_forward(context, z, bias, residual, dropout, w.gamma, w.beta, options.eps, z, to.y,
                                       to.mean, to.rstd);
  } else {
    bias_dropout_residual_norm_forward(context, z, bias, residual, dropout, w.gamma, w.beta, options.eps, {}, z, {},
                                       {});
  }
  to.x = std::move(z);
}

SublayerBackward::SublayerBackward(Context& context, const LayerOptions& options, const Place& place, OutputGradient dy,
                                   bool accumulate, const Tensor& x, const Linear& dout)
    : context_(context),
      options_(options),
      place_(place),
      accumulate_(accumulate),
      dy_(std::move(dy.dy)),
      dz_(std::move(dy.dz)) {
  const Dropout dropout = context.dropout(options.p_hidden, place.output);
  // Who reads dz anyway sums the bias' gradient: the product, if it can, or else dropout's backward.
  bool with_product = !dy.ended;
  if (!dy.ended && dropout.active()) {
    with_product = linear_sums_bias_gradient(context, dy_, x, accumulate, dout.weight, dout.bias);
    dz_ = allocate(context, place, dy_->shape(), dy_->dtype(), "dz");
    bias_dropout_residual_backward(context, dy_, dropout, accumulate, dz_, with_product ? Tensor() : dout.bias);
  }
  linear_backward_weight(context, dz(), x, accumulate, dout.weight, with_product ? dout.bias : Tensor());
}

OutputGradient SublayerBackward::finish(Buffer da, const Tensor& weight, const LayerNorm& norm, NormSaved& saved,
                                        const LayerNorm& dnorm, const EndBelow& below) {
  dz_.release();
  saved.y.release();
  if (!options_.pre_norm) {  // the residual is the norm's output: dn = dy + da * weight
    linear_backward_input(context_, da, weight, true, dy_);
    da.release();
    return norm_backward(context_, options_, norm, std::move(dy_), {}, saved, accumulate_, dnorm, below);
  }
  Buffer dn = allocate(context_, place_, dy_->shape(), dy_->dtype(), "dn");
  linear_backward_input(context_, da, weight, false, dn);
  da.release();
  OutputGradient dx = norm_backward(context_, options_, norm, std::move(dn), dy_, saved, accumulate_, dnorm, below);
  dy_.release();
  return dx;
}

}  // namespace frit
