// The CPU form of linear_rows. Arguments are checked already.
#pragma once
#include "frit/ops/linear_rows/linear_rows.h"

namespace frit {

void linear_rows_cpu(Context& context, const LinearRowsArgs& args, const Tensor& y);

}  // namespace frit
