// The CPU forms of attention, and the table of them that attention.cc chooses from.
#pragma once
#include "frit/ops/attention/attention.h"

namespace frit {

void attention_flash_forward_cpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);
void attention_flash_backward_cpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                  const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv);
// Bytes of scratch that one call asks for, for budgets. workers: threads of the pool.
int64_t attention_flash_forward_scratch(int64_t workers, int64_t d);
int64_t attention_flash_backward_scratch(int64_t workers, int64_t q_tokens, int64_t n, int64_t d);

// As the papers have it; backward computes the scores again, and needs no out.
void attention_materialised_forward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse);
void attention_materialised_backward(Context& context, const AttentionArgs& args, const Tensor& lse, const Tensor& dout,
                                     const Tensor& dq, const Tensor& dk, const Tensor& dv);

}  // namespace frit
