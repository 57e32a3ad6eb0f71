#include "frit/ops/layer_norm/held.h"

#include "frit/ops/layer_norm/held-inl.h"

namespace frit::layer_norm {

void start_forward_held(Context& context, const ForwardShape& shape, bool whole, const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, float eps, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  const auto start = [&](auto t) {
    using T = decltype(t);
    const HeldGiven<T> in = {global<const T>(x)};
    if (whole && shape.cols == int64_t{256} * shape.held_vectors() * shape.warps_of(kHeld))
      return launch_held<T, Held::kFull>(context, shape, in, x.row_stride(), gamma, beta, eps, y, mean, rstd);
    if (begins_whole(gamma) && begins_whole(beta))
      return launch_held<T, Held::kRagged>(context, shape, in, x.row_stride(), gamma, beta, eps, y, mean, rstd);
    launch_held<T, Held::kAny>(context, shape, in, x.row_stride(), gamma, beta, eps, y, mean, rstd);
  };
  if (x.dtype() == DType::kBF16) return start(bfloat16());
  start(float16());
}

}  // namespace frit::layer_norm
