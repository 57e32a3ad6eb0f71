// What the case tables of operators that end in a column_sum need of its own.
#pragma once
#include "frit/ops/case.h"

namespace frit {

// What column_sum costs on a GPU for x [rows, cols] of `dtype` whose rows lie packed, and y of `out`, not accumulating.
// Stated where a row is whole vectors and one block is as wide as it; elsewhere nothing is asserted.
GpuBudget column_sum_gpu_budget(int64_t rows, int64_t cols, DType dtype, DType out);

}  // namespace frit
