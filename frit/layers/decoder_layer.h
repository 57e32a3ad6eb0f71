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

// Shapes: x, y [target tokens, H]; kv: this layer's keys and values (kv.queries are the target's).
Buffer decoder_layer_forward(Context& context, const LayerOptions& options, const DecoderLayer& w,
                             const CrossKeysValues& kv, Buffer x, DecoderLayerSaved& saved);
// Returns dx; writes dk and dv [source tokens, H] (any row stride); gradients go to dw, added to if accumulate.
Buffer decoder_layer_backward(Context& context, const LayerOptions& options, const DecoderLayer& w,
                              const CrossKeysValues& kv, Buffer dy, DecoderLayerSaved& saved, bool accumulate,
                              const DecoderLayer& dw, const Tensor& dk, const Tensor& dv);

}  // namespace frit
