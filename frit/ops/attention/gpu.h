// The GPU forms of attention: "short", one fused kernel a direction for sequences of up to 256 queries and keys;
// "cudnn", the library's; and "materialised", products and a softmax, which takes everything.
#pragma once
#include "frit/ops/attention/attention.h"

namespace frit {

// What an operator may take for the longest sequence of a [tokens, N, D]: `given` (AttentionArgs::max_q or max_k), or
// the number of tokens where that is less or nothing is given.
int64_t attention_longest(int64_t given, const Tensor& t);

// Queries of one block of forward, by the shape alone: 16 to 128, whole warps of 16.
int64_t attention_short_tile(int64_t sequences, int64_t heads, int64_t max_q);
// Keys that a block of forward waits for at a time.
constexpr int64_t kAttentionForwardStage = 64;
// Warps of one block of backward: one for each 16 queries and each 16 keys, up to 16 (heads 128 wide: 8).
int64_t attention_short_backward_warps(int64_t max_q, int64_t max_k, int64_t d);
// Blocks that write the zeros of the rows past the last sequence.
constexpr int64_t kAttentionTailBlocks = 16;

// Forward, f16 and bf16. Math: as attention.h has it; scores in registers, softmax online over tiles of 64 keys, about
// a maximum that gives way only to scores more than 8 (in units of log 2) above it; probabilities are rounded to 16
// bits before they meet the values. Cost: 1 launch; a block takes attention_short_tile queries of one sequence and
// head, and reads its keys and values once, 1 barrier for each kAttentionForwardStage keys: a tile is computed while
// later ones are under way. Shared memory: those, and one bit a query and key with dropout. Backward: 1 launch; a block
// takes one sequence and head and reads q, k, v, out, dout and lse once. Nothing is added up across warps, so the bits
// never change. Heads up to 64 wide: a warp owns 16 queries; for 32 keys at a time it computes probabilities and
// gradients of scores, takes dq from them and leaves them, rounded to 16 bits, in shared memory, where the warps share
// out dk and dv of these keys. 1 barrier, and 2 for each 32 keys less one. 128 wide: scores and probabilities are
// computed once for dq (a warp owns 16 queries) and once transposed for dk and dv (a warp owns 16 keys); 1 barrier
// where the four operands fit into shared memory together, else 2 a tile of queries or keys. f32 takes plain
// multiply-adds: a warp owns 4 queries (or keys) and streams tiles of 32 of the other side. Queries and keys past max_q
// and max_k of their sequence do not exist for the kernels; offsets outside of the tensors are taken for the nearest
// end. Rows past the last sequence: out, dq, dk, dv are 0, lse is -inf.
void attention_short_forward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);
void attention_short_backward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                  const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv);

// The f32 halves of the two above.
void attention_short_forward_f32_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);
void attention_short_backward_f32_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                      const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv);

// "materialised", any width and length: heads and sequences (pairs) are copied apart into [pairs, longest, D], filled
// up with zeros; then a product for the scores of each pair, softmax with scale, mask and dropout, a product with the
// values; and the result is copied back. Scores are fp32; probabilities have q's dtype. Backward computes scores and
// probabilities again.
// It goes chunk by chunk: as many pairs at a time as have most_scores scores and kMaterialisedRows rows, at least one.
// Cost: forward 5 launches and 2 products a chunk and 1 launch, backward 8 launches and 5 products a chunk and 1
// launch. Rows past the last sequence and what lies past max_q and max_k: as above. Bits do not depend on the chunks,
// but for what the library's products make of their number.
constexpr int64_t kMaterialisedScores = int64_t{1} << 23, kMaterialisedRows = int64_t{1} << 16;
void attention_materialised_forward_gpu(Context& context, const AttentionArgs& args, const Tensor& out,
                                        const Tensor& lse, int64_t most_scores = kMaterialisedScores);
void attention_materialised_backward_gpu(Context& context, const AttentionArgs& args, const Tensor& lse,
                                         const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                         int64_t most_scores = kMaterialisedScores);
// Bytes of scratch that a call asks for, each tensor rounded up as the context does. tokens: of queries or of keys,
// whichever are more.
int64_t attention_materialised_scratch(int64_t heads, int64_t width, int64_t tokens, int64_t max_q, int64_t max_k,
                                       DType dtype, bool backward, int64_t most_scores = kMaterialisedScores);

// "cudnn": the library's flash attention over packed sequences, f16 and bf16. lse is ours, the mask of dropout its own:
// its generator gets a seed made of ours, step, site and micro-batch, so that masks repeat under recompute and resume,
// but are not those of the other implementations. Backward is deterministic. Cost: 2 launches and the library's own,
// which want Gpu::attention_scratch() bytes (backward: up to 2 * N * max_q * max_k bytes a sequence). The number of
// sequences and the longest are rounded up, so that few shapes need a plan.
// What it refuses beyond `attention.cc`, in the library's words; "" if nothing.
std::string attention_library_refuses(const Context& context, const AttentionArgs& args);
void attention_library_forward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);
void attention_library_backward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                    const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv);

// What the library is told of the sequences, by a kernel. lengths i32 [2, sequences]: of queries, then of keys.
// begins i64 [count * (sequences + 1) + 2]: for each operand the element where each sequence begins; then seed and 0.
// Those past the batch's last sequence are empty.
struct AttentionTables {
  static constexpr int kMost = 9;
  int sequences = 0, count = 0;
  int64_t strides[kMost] = {};  // of operand i, elements from token to token
  uint32_t keys = 0;            // bit i: operand i has a row a key, not a query
};
void attention_tables_gpu(Context& context, const AttentionArgs& args, const AttentionTables& tables, int64_t seed,
                          const Tensor& lengths, const Tensor& begins);

// Zeros to the rows past the last sequence of what is defined, -inf to their lse. Any width. 1 launch.
void attention_zero_tail_gpu(Context& context, const AttentionArgs& args, const Tensor& of_queries,
                             const Tensor& of_keys, const Tensor& of_keys_too, const Tensor& lse);

}  // namespace frit
