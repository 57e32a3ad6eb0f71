// The GPU form of the embedding.
#pragma once
#include "frit/ops/embedding/embedding.h"

namespace frit {

// Backward's sums are cut in pieces of so many tokens, so that one frequent word is the work of many multiprocessors.
constexpr int64_t kEmbeddingPiece = 8;
// Neighbouring tokens whose rows one warp of forward writes.
constexpr int64_t kEmbeddingTokens = 4;

// Cost: 1 launch, no barrier; reads the ids, a row of the table (and of the positions) and writes y, once a token.
void embedding_forward_gpu(Context& context, const EmbeddingArgs& args, const Tensor& y);
// Instances (Context::force("embedding_backward", name)): blocks_256, blocks_128: that many blocks look for words. Sums
// of runs of more than 8 tokens may differ in their last bits between the two. Cost: 3 launches (7 with learned
// positions, 6 if their ids are given): words with few tokens or without one, of which each block has some, having
// looked through all ids for theirs (4 barriers); sums of the pieces of the others (none), and of those sums (2
// barriers for each run of more than 8 pieces that ends up in one block). Reads dy once (twice with learned positions),
// writes the gradients once; scratch of 5 bytes a token and H / 8 fp32 numbers a token. No atomics in global memory:
// tokens keep their order.
void embedding_backward_gpu(Context& context, const EmbeddingArgs& args, const Tensor& dy, int64_t pad_id,
                            bool accumulate, const Tensor& dtable, const Tensor& dpositions);

}  // namespace frit
