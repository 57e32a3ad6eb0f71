// The GPU form of attention: "short", one fused kernel a direction for sequences of up to 256 queries and keys.
#pragma once
#include "frit/ops/attention/attention.h"

namespace frit {

constexpr int64_t kAttentionShortLongest = 256;

// What an operator may take for the longest sequence of a [tokens, N, D]: `given` (AttentionArgs::max_q or max_k), or
// the number of tokens where that is less or nothing is given.
int64_t attention_longest(int64_t given, const Tensor& t);

// Queries of one block of forward, by the shape alone: 16 to 128, whole warps of 16.
int64_t attention_short_tile(int64_t sequences, int64_t heads, int64_t max_q);
// Warps of one block of backward.
int64_t attention_short_backward_warps(int64_t max_q, int64_t max_k);
// Blocks that write the zeros of the rows past the last sequence.
constexpr int64_t kAttentionTailBlocks = 16;

// Forward, f16 and bf16. Math: as attention.h has it; scores in registers, softmax online over tiles of 32 keys;
// probabilities are rounded to 16 bits before they meet the values. Cost: 1 launch, 1 barrier; a block takes
// attention_short_tile queries of one sequence and head, and reads its keys and values once. Shared memory: those, and
// one bit a query and key with dropout.
// Backward: 1 launch; a block takes one sequence and head and reads q, k, v, out, dout and lse once; scores and
// probabilities are computed once for dq (a warp owns 16 queries) and once transposed for dk and dv (a warp owns 16
// keys), so that nothing is added up across warps and the bits never change. 1 barrier where the four operands fit into
// shared memory together, else 2 a tile of queries or keys.
// f32 takes plain multiply-adds: a warp owns 4 queries (or keys) and streams tiles of 32 of the other side.
// Queries and keys past max_q and max_k of their sequence do not exist for the kernels; offsets outside of the tensors
// are taken for the nearest end. Rows past the last sequence: out, dq, dk, dv are 0, lse is -inf.
void attention_short_forward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);
void attention_short_backward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                  const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv);

// The f32 halves of the two above.
void attention_short_forward_f32_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);
void attention_short_backward_f32_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                      const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv);

}  // namespace frit
