// The CPU forms of the changes of layout between joined rows and heads. blocks = parts * N heads of width d.
#pragma once
#include "frit/ops/heads/heads.h"

namespace frit {

// apart[b][t][i] = joined[t][b][i] (+ bias[b][i]). 1 parallel region.
void joined_to_heads_cpu(Context& context, const Tensor& joined, const Tensor& bias, const Tensor& apart,
                         int64_t blocks, int64_t d);
// joined[t][b][i] = apart[b][t][i]; dbias (+)= its column sums, if dbias is defined. 1 parallel region, 2 with dbias.
void heads_to_joined_cpu(Context& context, const Tensor& apart, const Tensor& joined, bool accumulate,
                         const Tensor& dbias, int64_t blocks, int64_t d);

}  // namespace frit
