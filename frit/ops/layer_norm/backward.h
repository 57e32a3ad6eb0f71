// What the two halves of layer_norm's backward share: the launches that write dx, and those that only sum columns.
#pragma once
#include <cstdint>

#include "frit/backend/context.h"

namespace frit {

// A launch of layer_norm_backward: operands, and where partial sums of dgamma and dbeta go, f32 [pieces, 2 * cols], the
// columns of dgamma first. No partials: dx alone.
struct LayerNormBackward {
  const Tensor &dy, &x, &gamma, &mean, &rstd, &dresidual, &dx;
  Tensor partials;
};

// Ways to sum dgamma and dbeta in launches of their own.
enum class ColumnWay { kSerial, kAtomic, kTiled32x32, kTiled32x33 };

// partials' rows become sums over pieces of the rows, one each (tiled: only one). 1 launch; atomic 2.
void layer_norm_sum_columns(Context& context, const LayerNormBackward& b, ColumnWay way);
// dgamma and dbeta (+)= the sum of partials' rows, in order of a fixed tree. 1 launch, 2 if their types differ.
void layer_norm_add_partials(Context& context, Buffer partials, bool accumulate, const Tensor& dgamma,
                             const Tensor& dbeta);

}  // namespace frit
