// The feed-forward sublayer.
#pragma once
#include "frit/layers/layer.h"

namespace frit {

struct FeedForward {
  LayerNorm norm;  // in front
  Linear in;       // [F, H]
  Linear out;      // [H, F]
  Place place;
};
struct FeedForwardSaved {
  NormSaved norm;
  Buffer a;  // before bias and activation [tokens, F]; not kept for ReLU, whose output is enough
  Buffer g;  // after activation and dropout [tokens, F]; rebuilt if options.recompute, but for ReLU
};

// Math: y = residual + dropout(dropout(act(norm(x) * in^T + bias)) * out^T + bias), and the norm above of y.
// Shapes: x, y [tokens, H]; x and norm(x) are in saved.norm, y and its norm go to above.saved.
void feed_forward_forward(Context& context, const LayerOptions& options, const FeedForward& w, FeedForwardSaved& saved,
                          const NormAbove& above);
// Returns dx, through the end of what lies below; gradients go to dw, added to if accumulate.
OutputGradient feed_forward_backward(Context& context, const LayerOptions& options, const FeedForward& w,
                                     OutputGradient dy, FeedForwardSaved& saved, bool accumulate, const FeedForward& dw,
                                     const EndBelow& below);

}  // namespace frit
