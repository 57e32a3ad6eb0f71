#include "frit/ops/layer_norm/backward_held-inl.h"

namespace frit::layer_norm {

void start_backward_held(Context& context, const BackwardShape& shape, const LayerNormBackward& b, bool whole) {
  const auto start = [&](auto t) {
    using T = decltype(t);
    if (whole && shape.held_full()) return launch_held<T, true>(context, shape, b, NoneBelow<true>());
    launch_held<T, false>(context, shape, b, NoneBelow<>());
  };
  if (b.x.dtype() == DType::kBF16) return start(bfloat16());
  start(float16());
}

}  // namespace frit::layer_norm
