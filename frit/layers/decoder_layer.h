// One decoder layer: causal self-attention, cross-attention, then feed-forward.
#pragma once
#include "frit/layers/attention.h"
#include "frit/layers/feed_forward.h"

namespace frit {

struct DecoderLayer {
  SelfAttention attention;
  CrossAttention cross;
  FeedForward feed_forward;
};
struct DecoderLayerSaved {
  SelfAttentionSaved attention;
  CrossAttentionSaved cross;
  FeedForwardSaved feed_forward;
};

// Its input [target tokens, H] and the first norm's output are in saved.attention.norm; its output and the norm above
// go to above.saved (see layer.h). kv: this layer's keys and values (kv.queries are the target's).
void decoder_layer_forward(Context& context, const LayerOptions& options, const DecoderLayer& w,
                           const CrossKeysValues& kv, DecoderLayerSaved& saved, const NormAbove& above);
// Returns dx, through the end of what lies below; writes dk and dv [source tokens, H] (any row stride); gradients go to
// dw, added to if accumulate.
OutputGradient decoder_layer_backward(Context& context, const LayerOptions& options, const DecoderLayer& w,
                                      const CrossKeysValues& kv, OutputGradient dy, DecoderLayerSaved& saved,
                                      bool accumulate, const DecoderLayer& dw, const Tensor& dk, const Tensor& dv,
                                      const EndBelow& below);

}  // namespace frit
