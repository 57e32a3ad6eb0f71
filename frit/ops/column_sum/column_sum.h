// Sums over rows: bias gradients.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: y[c] (+)= sum over rows of x[r][c], in fp32, in an order that depends on the shape alone.
// Shapes: x [rows, cols] f32 or bf16, any row stride; y [cols] f32 or x's dtype.
void column_sum(Context& context, const Tensor& x, bool accumulate, const Tensor& y);

}  // namespace frit
