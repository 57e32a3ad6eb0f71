#include "frit/ops/column_sum/column_sum.h"

#include "frit/ops/column_sum/cpu.h"
#include "frit/ops/column_sum/gpu.h"

namespace frit {

void column_sum(Context& context, const Tensor& x, bool accumulate, const Tensor& y) {
  FRIT_CHECK(x.rank() == 2, "[column_sum] x is {}, expected [rows, cols]", x.to_string());
  FRIT_CHECK(y.rank() == 1 && y.dim(0) == x.dim(1), "[column_sum] y is {}, x has {} columns", y.to_string(), x.dim(1));
  check_float("column_sum", "x", x, context);
  FRIT_CHECK(y.dtype() == DType::kF32 || y.dtype() == x.dtype(), "[column_sum] y is {}, expected f32 or {}",
             y.to_string(), name_of(x.dtype()));
  if (context.on_gpu()) return column_sum_gpu(context, x, accumulate, y);
  column_sum_cpu(context, x, accumulate, y);
}

LaterSums::LaterSums(Context& context) : context_(context) {
  if (!context.on_gpu() || context.later_sums || context.forced("column_sum") == "at_once") return;
  left_.reserve(kMost);
  context.later_sums = &left_;
}
LaterSums::~LaterSums() {
  if (context_.later_sums == &left_) context_.later_sums = nullptr;
}
void LaterSums::finish() {
  if (context_.later_sums == &left_) add_later_sums_gpu(context_);
}

}  // namespace frit
