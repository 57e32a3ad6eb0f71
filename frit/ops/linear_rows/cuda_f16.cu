#include "frit/ops/linear_rows/mma-inl.h"

namespace frit {

void linear_rows_f16_gpu(Context& context, const LinearRowsArgs& args, const Tensor& y, int i) {
  linear_rows_tile::run_instance<float16>(context, args, y, i);
}

}  // namespace frit
