// One encoder layer: self-attention, then feed-forward.
#pragma once
#include "frit/layers/attention.h"
#include "frit/layers/feed_forward.h"

namespace frit {

struct EncoderLayer {
  SelfAttention attention;
  FeedForward feed_forward;
};
struct EncoderLayerSaved {
  SelfAttentionSaved attention;
  FeedForwardSaved feed_forward;
};

// Shapes: x, y [tokens, H]. The norm behind the last layer is the caller's (see layer.h).
Buffer encoder_layer_forward(Context& context, const LayerOptions& options, const EncoderLayer& w,
                             const Sequences& sequences, Buffer x, EncoderLayerSaved& saved);
// Returns dx; gradients go to dw, added to if accumulate.
Buffer encoder_layer_backward(Context& context, const LayerOptions& options, const EncoderLayer& w,
                              const Sequences& sequences, Buffer dy, EncoderLayerSaved& saved, bool accumulate,
                              const EncoderLayer& dw);

}  // namespace frit
