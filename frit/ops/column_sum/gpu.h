// The GPU form of column_sum, and the last step that other operators' column sums share.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// y (+)= sum over partials' rows in an order that depends on their number alone; z likewise from the columns behind
// y's. Shapes: partials f32 [pieces, y.numel() + z.numel()]; y and z f32, bf16 or f16, z optional. Rows may be 0. Cost:
// 1 launch (2 with z); reads partials once; 1 barrier. Where the context collects such sums (LaterSums), they are left.
void add_partial_sums_gpu(Context& context, Buffer partials, bool accumulate, const Tensor& y, const Tensor& z = {});
// Leaves such sums to the context's LaterSums; false, and nothing done, if it has none.
bool leave_partial_sums(Context& context, Buffer& partials, bool accumulate, const Tensor& y, const Tensor& z);
// Does what was left, in one launch.
void add_later_sums_gpu(Context& context);

void column_sum_gpu(Context& context, const Tensor& x, bool accumulate, const Tensor& y);

}  // namespace frit
