#include "frit/layers/decoder_layer.h"

#include <utility>

namespace frit {

Buffer decoder_layer_forward(Context& context, const LayerOptions& options, const DecoderLayer& w,
                             const CrossKeysValues& kv, Buffer x, DecoderLayerSaved& saved) {
  x = self_attention_forward(context, options, w.attention, kv.queries, /*causal=*/true, std::move(x), saved.attention);
  if (!options.training) saved.attention = {};
  x = cross_attention_forward(context, options, w.cross, kv, std::move(x), saved.cross);
  if (!options.training) saved.cross = {};
  x = feed_forward_forward(context, options, w.feed_forward, std::move(x), saved.feed_forward);
  if (!options.training) saved.feed_forward = {};
  return x;
}

Buffer decoder_layer_backward(Context& context, const LayerOptions& options, const DecoderLayer& w,
                              const CrossKeysValues& kv, Buffer dy, DecoderLayerSaved& saved, bool accumulate,
                              const DecoderLayer& dw, const Tensor& dk, const Tensor& dv) {
  dy = feed_forward_backward(context, options, w.feed_forward, std::move(dy), saved.feed_forward, accumulate,
                             dw.feed_forward);
  dy =
      cross_attention_backward(context, options, w.cross, kv, std::move(dy), saved.cross, accumulate, dw.cross, dk, dv);
  return self_attention_backward(context, options, w.attention, kv.queries, /*causal=*/true, std::move(dy),
                                 saved.attention, accumulate, dw.attention);
}

}  // namespace frit
