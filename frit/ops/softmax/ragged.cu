// The kernels of whole.h on rows that are not whole aligned vectors.
#include "frit/ops/softmax/whole.h"

namespace frit {

using namespace simt;

namespace {
// Calls f with a value of x's type and the vectors a thread holds, as a constant.
template <typename F>
void for_ragged(int instance, const Tensor& x, F&& f) {
  const int vectors = softmax_whole_vectors(instance, x.dim(1), true);
  const auto start = [&](auto t) {
    if (vectors == 2) return f(t, softmax_constant<2>());
    if (vectors == 4) return f(t, softmax_constant<4>());
    return f(t, softmax_constant<8>());
  };
  return x.dtype() == DType::kBF16 ? start(bfloat16()) : start(float16());
}
}  // namespace

void softmax_forward_ragged_gpu(Context& context, int instance, const SoftmaxShape& shape, const Tensor& x,
                                const Tensor& y, const Tensor& lse) {
  for_ragged(instance, x, [&](auto t, auto v) {
    using T = decltype(t);
    launch(context, "softmax_forward_ragged_kernel", softmax_forward_whole_kernel<T, 32, v, true>,
           softmax_launch(instance, shape.rows), softmax_whole(shape), global<const T>(x), global<T>(y),
           global<float>(lse));
  });
}

void softmax_backward_ragged_gpu(Context& context, int instance, const SoftmaxShape& shape, const Tensor& dy,
                                 const Tensor& x, const Tensor& lse, const Tensor& dx) {
  for_ragged(instance, x, [&](auto t, auto v) {
    using T = decltype(t);
    launch(context, "softmax_backward_ragged_kernel", softmax_backward_whole_kernel<T, 32, v, true>,
           softmax_launch(instance, shape.rows), softmax_whole(shape), global<const T>(dy), global<const T>(x),
           global<const float>(lse), global<T>(dx));
  });
}

}  // namespace frit
