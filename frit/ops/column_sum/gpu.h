// The GPU form of column_sum, and the last step that other operators' column sums share.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// y (+)= sum over partials' rows in an order that depends on their number alone; z likewise from the columns behind
// y's. Shapes: partials f32 [pieces, y.numel() + z.numel()]; y and z f32, bf16 or f16, z optional. Rows may be 0. Cost:
// 1 launch; reads partials once; 1 barrier.
void add_partial_sums_gpu(Context& context, const Tensor& partials, bool accumulate, const Tensor& y,
                          const Tensor& z = {});

void column_sum_gpu(Context& context, const Tensor& x, bool accumulate, const Tensor& y);

}  // namespace frit
