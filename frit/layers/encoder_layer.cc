#include "frit/layers/encoder_layer.h"

#include <utility>

namespace frit {

void encoder_layer_forward(Context& context, const LayerOptions& options, const EncoderLayer& w,
                           const Sequences& sequences, EncoderLayerSaved& saved, const NormAbove& above) {
  self_attention_forward(context, options, w.attention, sequences, /*causal=*/false, saved.attention,
                         {&w.feed_forward.norm, &w.feed_forward.place, &saved.feed_forward.norm});
  if (!options.training) saved.attention = {};
  feed_forward_forward(context, options, w.feed_forward, saved.feed_forward, above);
  if (!options.training) saved.feed_forward = {};
}

OutputGradient encoder_layer_backward(Context& context, const LayerOptions& options, const EncoderLayer& w,
                                      const Sequences& sequences, OutputGradient dy, EncoderLayerSaved& saved,
                                      bool accumulate, const EncoderLayer& dw, const EndBelow& below) {
  dy = feed_forward_backward(context, options, w.feed_forward, std::move(dy), saved.feed_forward, accumulate,
                             dw.feed_forward, {&w.attention.place, dw.attention.out.bias});
  return self_attention_backward(context, options, w.attention, sequences, /*causal=*/false, std::move(dy),
                                 saved.attention, accumulate, dw.attention, below);
}

}  // namespace frit
