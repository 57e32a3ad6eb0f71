#include "frit/layers/decoder_layer.h"

#include <utility>

namespace frit {

void decoder_layer_forward(Context& context, const LayerOptions& options, const DecoderLayer& w,
                           const CrossKeysValues& kv, DecoderLayerSaved& saved, const NormAbove& above) {
  self_attention_forward(context, options, w.attention, kv.queries, /*causal=*/true, saved.attention,
                         {&w.cross.norm, &w.cross.place, &saved.cross.norm});
  if (!options.training) saved.attention = {};
  cross_attention_forward(context, options, w.cross, kv, saved.cross,
                          {&w.feed_forward.norm, &w.feed_forward.place, &saved.feed_forward.norm});
  if (!options.training) saved.cross = {};
  feed_forward_forward(context, options, w.feed_forward, saved.feed_forward, above);
  if (!options.training) saved.feed_forward = {};
}

OutputGradient decoder_layer_backward(Context& context, const LayerOptions& options, const DecoderLayer& w,
                                      const CrossKeysValues& kv, OutputGradient dy, DecoderLayerSaved& saved,
                                      bool accumulate, const DecoderLayer& dw, const Tensor& dk, const Tensor& dv,
                                      const EndBelow& below) {
  dy = feed_forward_backward(context, options, w.feed_forward, std::move(dy), saved.feed_forward, accumulate,
                             dw.feed_forward, {&w.cross.place, dw.cross.out.bias});
  dy = cross_attention_backward(context, options, w.cross, kv, std::move(dy), saved.cross, accumulate, dw.cross, dk, dv,
                                {&w.attention.place, dw.attention.out.bias});
  return self_attention_backward(context, options, w.attention, kv.queries, /*causal=*/true, std::move(dy),
                                 saved.attention, accumulate, dw.attention, below);
}

}  // namespace frit
