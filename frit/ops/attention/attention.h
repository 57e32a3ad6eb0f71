// Scaled dot-product attention over packed sequences.
#pragma once
#include <string>
#include <vector>

#include "frit/backend/context.h"

namespace frit {

struct AttentionArgs {
  Tensor q;             // [q_tokens, N, D], any row stride (a slice of a joined [tokens, 3, N, D] will do)
  Tensor k, v;          // [k_tokens, N, D], any row stride
  Tensor q_offsets;     // i32 [sequences + 1]: sequence s has queries [q_offsets[s], q_offsets[s+1])
  Tensor k_offsets;     // i32 [sequences + 1]: and keys [k_offsets[s], k_offsets[s+1])
  bool causal = false;  // query i of a sequence of Lq sees keys j <= i + (Lk - Lq)
  float scale = 1;      // usually 1/sqrt(D)
  Dropout dropout;      // on the probabilities: element (packed query row, key index within its sequence) of head n
  // Longest query and key sequence, which the host must know on a GPU, where lengths are device data; the CPU needs
  // neither. 0: not known; then the number of tokens is what a GPU goes by.
  int64_t max_q = 0, max_k = 0;
};

// Numbers of sequences, and longest lengths, up to a multiple of `step`, which doubles until there are no more than
// eight of them: what plans and libraries go by, so that few values occur. attention_rounded(attention_rounded(x)) is
// the same.
constexpr int64_t attention_rounded(int64_t x, int64_t step) {
  while (8 * step < x) step *= 2;
  return (x + step - 1) / step * step;
}
constexpr int64_t kAttentionSequenceStep = 1, kAttentionLengthStep = 64;

// On a GPU "short" takes heads of some widths in sequences of up to so many queries and keys. It needs no scratch, so
// that nothing in a plan depends on their lengths.
constexpr int64_t kAttentionShortLongest = 256;
constexpr bool attention_short_takes(int64_t width) {
  return width == 32 || width == 64 || width == 128;
}

// Math: out[i] = sum_j dropout(softmax_j(scale * q[i].k[j])) * v[j] for each head; lse[i] = log sum exp of the scaled
// scores. A query without visible keys gives out = 0, lse = -inf. A sentence's results have the same bits whatever
// other sentences are packed with it (but for dropout, whose masks follow the packed row).
//
// Shapes: out [q_tokens, N, D]; lse f32 [q_tokens, N].
//
// Implementations: on the CPU "flash" (blocked, scores never written to memory; the default) and "materialised" (the
// papers' form: heads split, then for each sequence a product, softmax, a product, holding its N * Lq * Lk scores; it
// reads the offsets in planning mode, too). On a GPU what timing chose (Context::tuning(), see timing.h), unless that
// refuses; else the first of these that does not refuse: "short" (gpu.h: one
// kernel, scores never written to memory; sequences of up to 256 queries and keys, head widths 32, 64 and 128; needs no
// scratch), "cudnn" (the library's flash attention, 16-bit types; its dropout has its own generator, and a query
// without visible keys what it makes of it) and "materialised" (gpu.h; anything). A refusal is a notice, once a reason.
// Force one with Context::force("attention", ...).
//
// On a GPU rows past the last sequence are padding of a bucket: out and all gradients there are written as 0, lse as
// -inf. Offsets are not checked there: queries and keys that lie past max_q and max_k of their sequence or outside of
// the tensors are not touched.
//
// Errors: std::invalid_argument if shapes or dtypes do not fit, if offsets do not rise (CPU), if the forced
// implementation refuses, or if all do; the message has their reasons.
void attention_forward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);

// What timing chooses by: type, heads, tokens and longest length up to powers of two, causal, dropout. Tuning has its
// choice under (kAttentionTuning, this key): an implementation's name, or kAttentionByOrder.
std::string attention_key(const AttentionArgs& args);
constexpr const char* kAttentionTuning = "attention";
constexpr const char* kAttentionByOrder = "by order";  // was not timed: the first that does not refuse

// The implementations of this device in the order in which they are asked, and why each refuses such a call ("": it
// takes it). The first that takes it is what runs when none is forced.
struct AttentionCandidate {
  const char* name;
  std::string refusal;
};
std::vector<AttentionCandidate> attention_candidates(const Context& context, const AttentionArgs& args);

// Gradients of q, k and v. Scores are computed again from q, k and lse.
// Shapes: out, dout [q_tokens, N, D]; dq as q; dk, dv as k (any row stride). The same bits for any number of threads.
void attention_backward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                        const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv);

}  // namespace frit
