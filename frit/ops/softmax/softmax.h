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
  // For the published form (variant "stored", on a GPU alone): forward also writes p before dropout, [rows, cols] of
  // y's dtype, and keep, u8 [rows, cols], 1 where dropout keeps, 0 past a row's length; backward reads them in the
  // place of x. Both or neither.
  Tensor p, keep;
};

// Math: p = softmax(scale * x + mask) over the unmasked columns; y = dropout(p); lse = log sum exp of the masked,
// scaled scores. A fully masked row gives y = 0 and lse = -inf, never NaN. Shapes: x, y [rows, cols] (y may be x
// without backward); lse f32 [rows], optional. f16 needs a GPU, where y has x's dtype or x is f32, and scale > 0. A
// length out of range throws on the CPU; on a GPU the nearest end counts in its place.
void softmax_forward(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y, const Tensor& lse);

// Math: p = exp(scale * x + mask - lse) computed again; g = mask/keep * dy; dx = scale * p * (g - sum(g * p)).
// Shapes: dy, x, dx [rows, cols] (dx may be dy or x); lse f32 [rows].
void softmax_backward(Context& context, const Tensor& dy, const Tensor& x, const Tensor& lse, const SoftmaxArgs& args,
                      const Tensor& dx);

}  // namespace frit
