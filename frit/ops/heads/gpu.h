// The GPU forms of the changes of layout between joined rows and heads. Arguments are checked already.
#pragma once
#include "frit/ops/heads/heads.h"

namespace frit {

// apart[b][t][i] = joined[t][b][i] (+ bias[b][i]); blocks = parts * N heads of width d. Cost: 1 launch, no barrier;
// reads joined once and writes apart once, 16 bytes at a time where d is whole vectors; bias is read once for every 4
// tokens.
void joined_to_heads_gpu(Context& context, const Tensor& joined, const Tensor& bias, const Tensor& apart,
                         int64_t blocks, int64_t d);
// joined[t][b][i] = apart[b][t][i]; dbias (+)= its column sums, if dbias is defined. Cost: reads apart once, writes
// joined once. Without dbias 1 launch, no barrier; with it 2 launches, and partial sums of at most kMostBlocks rows are
// written and read.
void heads_to_joined_gpu(Context& context, const Tensor& apart, const Tensor& joined, bool accumulate,
                         const Tensor& dbias, int64_t blocks, int64_t d);

}  // namespace frit
