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

// Math: y = residual + dropout(dropout(act(norm(x) * in^T + bias)) * out^T + bias). Shapes: x, y [tokens, H].
Buffer feed_forward_forward(Context& context, const LayerOptions& options, const FeedForward& w, Buffer x,
                            FeedForwardSaved& saved);
// Returns dx; gradients go to dw, added to if accumulate.
Buffer feed_forward_backward(Context& context, const LayerOptions& options, const FeedForward& w, Buffer dy,
                             FeedForwardSaved& saved, bool accumulate, const FeedForward& dw);

}  // namespace frit
