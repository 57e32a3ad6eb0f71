// The kernels of the embedding for 16-bit rows that are no whole vectors, in matrices without gaps.
#pragma once
#include "frit/ops/embedding/lookup-inl.h"
#include "frit/ops/embedding/sums-inl.h"

namespace frit {

// Can they run these rows? Every matrix of the launch must.
inline bool shifts(const Tensor& t) {
  return size_of(t.dtype()) == 2 && t.contiguous() && reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0 &&
         t.dim(1) % 8 != 0 && t.dim(1) >= 8 && t.dim(1) <= 8192;
}

void start_embedding_forward_shifted(Context& context, const simt::Lookup<bfloat16>& a);
void start_embedding_forward_shifted(Context& context, const simt::Lookup<float16>& a);
// Sums short runs and the pieces of long ones.
void start_embedding_backward_shifted(Context& context, const simt::Sums<bfloat16, bfloat16>& a, bool few);
void start_embedding_backward_shifted(Context& context, const simt::Sums<float16, float16>& a, bool few);

}  // namespace frit
