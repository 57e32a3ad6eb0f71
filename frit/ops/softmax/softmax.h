// Softmax over rows of attention scores, with scale, mask and dropout.
#pragma once
#include "frit/backend/context.h"

namespace frit {

struct SoftmaxArgs {
  float scale = 1;  // scores are multiplied by it first
  Tensor lengths;   // i32 [rows], optional: columns at and past lengths[r] are masked
  Tensor mask;      // f32 [rows, cols], optional: added to the scaled scores; -inf masks
  Dropout dropout;  // element (first_row + r % rows_per_head, column) of head r / rows_per_head
  int64_t first_row = 0;
  int64_t rows_per_head = 0;  // 0: all rows belong to head 0
};

// Math: p = softmax(scale * x + mask) over the unmasked columns; y = dropout(p); lse = log sum exp of the masked,
// scaled scores. A fully masked row gives y = 0 and lse = -inf, never NaN. Shapes: x, y [rows, cols] (y may be x
// without backward); lse f32 [rows], optional.
void softmax_forward(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y, const Tensor& lse);

// Math: p = exp(scale * x + mask - lse) computed again; g = mask/keep * dy; dx = scale * p * (g - sum(g * p)).
// Shapes: dy, x, dx [rows, cols] (dx may be dy or x); lse f32 [rows].
void softmax_backward(Context& context, const Tensor& dy, const Tensor& x, const Tensor& lse, const SoftmaxArgs& args,
                      const Tensor& dx);

}  // namespace frit
