// The CPU form of embedding. Arguments are checked already.
#pragma once
#include "frit/ops/embedding/embedding.h"

namespace frit {

void embedding_forward_cpu(Context& context, const EmbeddingArgs& args, const Tensor& y);
void embedding_backward_cpu(Context& context, const EmbeddingArgs& args, const Tensor& dy, int64_t pad_id,
                            bool accumulate, const Tensor& dtable, const Tensor& dpositions);

}  // namespace frit
