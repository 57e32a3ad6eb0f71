#include "frit/ops/layer_norm/backward-inl.h"

namespace frit::layer_norm {

void start_backward_spans(Context& context, int i, const BackwardShape& shape, const LayerNormBackward& b, bool whole) {
  dispatch_float(b.x.dtype(), [&](auto type) {
    using T = decltype(type);
    if (whole) return launch_spans<T>(context, i, shape, b, NoneBelow<true>());
    launch_spans<T>(context, i, shape, b, NoneBelow<>());
  });
}

}  // namespace frit::layer_norm
