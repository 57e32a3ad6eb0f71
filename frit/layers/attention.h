// Self-attention and cross-attention sublayers.
#pragma once
#include "frit/layers/layer.h"

namespace frit {

struct SelfAttention {
  LayerNorm norm;  // in front
  Linear qkv;      // [3H, H]: the rows of q, then k, then v; three parameters on disk
  Linear out;      // [H, H]
  Place place;     // of weights; a struct of gradients needs none
};
struct SelfAttentionSaved {
  NormSaved norm;
  Buffer qkv;    // [tokens, 3H]
  Buffer heads;  // attention's output [tokens, H]
  Buffer lse;    // f32 [tokens, N]
};

// Math: y = residual + dropout(attention(q, k, v of norm(x)) * out^T + bias), and the norm above of y.
// Shapes: x, y [tokens, H]; x and norm(x) are in saved.norm, y and its norm go to above.saved.
void self_attention_forward(Context& context, const LayerOptions& options, const SelfAttention& w,
                            const Sequences& sequences, bool causal, SelfAttentionSaved& saved, const NormAbove& above);
// Returns dx, through the end of what lies below; gradients go to dw, added to if accumulate.
OutputGradient self_attention_backward(Context& context, const LayerOptions& options, const SelfAttention& w,
                                       const Sequences& sequences, bool causal, OutputGradient dy,
                                       SelfAttentionSaved& saved, bool accumulate, const SelfAttention& dw,
                                       const EndBelow& below);

// Keys and values come ready from the layer-batched product over the encoder's output.
struct CrossAttention {
  LayerNorm norm;
  Linear q;    // [H, H]
  Linear out;  // [H, H]
  Place place;
};
struct CrossAttentionSaved {
  NormSaved norm;
  Buffer q;      // [tokens, H]
  Buffer heads;  // [tokens, H]
  Buffer lse;    // f32 [tokens, N]
};
// One layer's keys and values, and its queries' and keys' sequences.
struct CrossKeysValues {
  Tensor k, v;        // [source tokens, H], any row stride
  Sequences queries;  // target side
  Sequences keys;     // source side
};

void cross_attention_forward(Context& context, const LayerOptions& options, const CrossAttention& w,
                             const CrossKeysValues& kv, CrossAttentionSaved& saved, const NormAbove& above);
// Writes dk and dv (as kv.k, any row stride); returns dx.
OutputGradient cross_attention_backward(Context& context, const LayerOptions& options, const CrossAttention& w,
                                        const CrossKeysValues& kv, OutputGradient dy, CrossAttentionSaved& saved,
                                        bool accumulate, const CrossAttention& dw, const Tensor& dk, const Tensor& dv,
                                        const EndBelow& below);

}  // namespace frit
