#include "frit/layers/feed_forward.h"

#include <utility>

#include "frit/ops/gemm/gemm.h"

namespace frit {

Buffer feed_forward_forward(Context& context, const LayerOptions& o, const FeedForward& w, Buffer x,
                            FeedForwardSaved& saved) {
  const Tensor n = norm_forward(context, o, w.norm, w.place, std::move(x), saved.norm);
  const int64_t tokens = n.dim(0), F = w.in.weight.dim(0);
  saved.a = allocate(context, w.place, {tokens, F}, n.dtype(), "a");
  linear(context, n, w.in.weight, {}, saved.a);
  // Without backward the activation is written over its input.
  if (o.training) saved.g = allocate(context, w.place, {tokens, F}, n.dtype(), "g");
  const Tensor& g = o.training ? saved.g : saved.a;
  bias_activation_dropout_forward(context, saved.a, w.in.bias, o.activation,
                                  context.dropout(o.p_activation, w.place.activation), g);
  Buffer y = allocate(context, w.place, n.shape(), n.dtype(), "y");
  linear(context, g, w.out.weight, {}, y);
  if (o.recompute) saved.g.release();
  end_sublayer_forward(context, o, w.place, w.out.bias, saved.norm, y);
  norm_drop_output(o, saved.norm);
  return y;
}

Buffer feed_forward_backward(Context& context, const LayerOptions& o, const FeedForward& w, Buffer dy,
                             FeedForwardSaved& saved, bool accumulate, const FeedForward& dw) {
  const Dropout dropout = context.dropout(o.p_activation, w.place.activation);
  if (!saved.g.defined()) {
    saved.g = allocate(context, w.place, saved.a->shape(), saved.a->dtype(), "g_again");
    bias_activation_dropout_forward(context, saved.a, w.in.bias, o.activation, dropout, saved.g);
  }
  SublayerBackward back(context, o, w.place, std::move(dy), accumulate, saved.g, dw.out);
  saved.g.release();
  Buffer da = allocate(context, w.place, saved.a->shape(), saved.a->dtype(), "da");
  linear_backward_input(context, back.dz(), w.out.weight, false, da);
  back.release_dz();
  // As SublayerBackward does it; the norm's input has the shape of its output, which is rebuilt later.
  const bool with_product = linear_sums_bias_gradient(context, da, saved.norm.x, accumulate, dw.in.weight, dw.in.bias);
  bias_activation_dropout_backward(context, da, saved.a, w.in.bias, o.activation, dropout, accumulate, da,
                                   with_product ? Tensor() : dw.in.bias);
  saved.a.release();
  const Tensor n = norm_output(context, o, w.norm, w.place, saved.norm);
  linear_backward_weight(context, da, n, accumulate, dw.in.weight, with_product ? dw.in.bias : Tensor());
  return back.finish(std::move(da), w.in.weight, w.norm, saved.norm, dw.norm);
}

}  // namespace frit
