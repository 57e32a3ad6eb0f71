#include "frit/layers/feed_forward.h"

#include <utility>

#include "frit/ops/gemm/gemm.h"

namespace frit {

void feed_forward_forward(Context& context, const LayerOptions& o, const FeedForward& w, FeedForwardSaved& saved,
                          const NormAbove& above) {
  const Tensor n = saved.norm.output();
  const int64_t tokens = n.dim(0), F = w.in.weight.dim(0);
  saved.a = allocate(context, w.place, {tokens, F}, n.dtype(), "a");
  linear(context, n, w.in.weight, {}, saved.a);
  // Where backward does not read its input, the activation is written over it.
  const bool keep_input = o.training && o.activation != Activation::kRelu;
  if (keep_input) saved.g = allocate(context, w.place, {tokens, F}, n.dtype(), "g");
  bias_activation_dropout_forward(context, saved.a, w.in.bias, o.activation,
                                  context.dropout(o.p_activation, w.place.activation), keep_input ? saved.g : saved.a);
  if (!keep_input) saved.g = std::move(saved.a);
  Buffer z;
  if (above.saved) {
    z = allocate(context, w.place, n.shape(), n.dtype(), "y");
    linear(context, saved.g, w.out.weight, {}, z);
  }
  if (!o.training || (o.recompute && keep_input)) saved.g.release();
  if (above.saved) end_sublayer_forward(context, o, w.place, w.out.bias, saved.norm, std::move(z), above);
  norm_drop_output(o, saved.norm);
}

OutputGradient feed_forward_backward(Context& context, const LayerOptions& o, const FeedForward& w, OutputGradient dy,
                                     FeedForwardSaved& saved, bool accumulate, const FeedForward& dw,
                                     const EndBelow& below) {
  const Dropout dropout = context.dropout(o.p_activation, w.place.activation);
  const bool from_output = o.activation == Activation::kRelu;
  if (!saved.g.defined()) {
    saved.g = allocate(context, w.place, saved.a->shape(), saved.a->dtype(), "g_again");
    bias_activation_dropout_forward(context, saved.a, w.in.bias, o.activation, dropout, saved.g);
  }
  SublayerBackward back(context, o, w.place, std::move(dy), accumulate, saved.g, dw.out);
  if (!from_output) saved.g.release();
  const Tensor& kept = from_output ? saved.g : saved.a;
  Buffer da = allocate(context, w.place, kept.shape(), kept.dtype(), "da");
  linear_backward_input(context, back.dz(), w.out.weight, false, da);
  back.release_dz();
  // As SublayerBackward does it; the norm's input has the shape of its output, which is rebuilt later.
  const bool with_product = linear_sums_bias_gradient(context, da, saved.norm.x, accumulate, dw.in.weight, dw.in.bias);
  const Tensor dbias = with_product ? Tensor() : dw.in.bias;
  if (from_output)
    relu_dropout_backward(context, da, kept, dropout, accumulate, da, dbias);
  else
    bias_activation_dropout_backward(context, da, kept, w.in.bias, o.activation, dropout, accumulate, da, dbias);
  saved.a.release(), saved.g.release();
  const Tensor n = norm_output(context, o, w.norm, w.place, saved.norm);
  linear_backward_weight(context, da, n, accumulate, dw.in.weight, with_product ? dw.in.bias : Tensor());
  return back.finish(std::move(da), w.in.weight, w.norm, saved.norm, dw.norm, below);
}

}  // namespace frit
