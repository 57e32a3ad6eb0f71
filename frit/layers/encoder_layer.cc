#include "frit/layers/encoder_layer.h"

#include <utility>

namespace frit {

Buffer encoder_layer_forward(Context& context, const LayerOptions& options, const EncoderLayer& w,
                             const Sequences& sequences, Buffer x, EncoderLayerSaved& saved) {
  x = self_attention_forward(context, options, w.attention, sequences, /*causal=*/false, std::move(x), saved.attention);
  if (!options.training) saved.attention = {};
  x = feed_forward_forward(context, options, w.feed_forward, std::move(x), saved.feed_forward);
  if (!options.training) saved.feed_forward = {};
  return x;
}

Buffer encoder_layer_backward(Context& context, const LayerOptions& options, const EncoderLayer& w,
                              const Sequences& sequences, Buffer dy, EncoderLayerSaved& saved, bool accumulate,
                              const EncoderLayer& dw) {
  dy = feed_forward_backward(context, options, w.feed_forward, std::move(dy), saved.feed_forward, accumulate,
                             dw.feed_forward);
  return self_attention_backward(context, options, w.attention, sequences, /*causal=*/false, std::move(dy),
                                 saved.attention, accumulate, dw.attention);
}

}  // namespace frit
