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

// Its input and the first norm's output are in saved.attention.norm; its output and the norm above go to above.saved
// (see layer.h).
void encoder_layer_forward(Context& context, const LayerOptions& options, const EncoderLayer& w,
                           const Sequences& sequences, EncoderLayerSaved& saved, const NormAbove& above);
// Returns dx, through the end of what lies below; gradients go to dw, added to if accumulate.
OutputGradient encoder_layer_backward(Context& context, const LayerOptions& options, const EncoderLayer& w,
                                      const Sequences& sequences, OutputGradient dy, EncoderLayerSaved& saved,
                                      bool accumulate, const EncoderLayer& dw, const EndBelow& below);

}  // namespace frit
