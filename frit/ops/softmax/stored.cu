// The published form of softmax: forward writes the probabilities and a byte mask, which backward reads. For
// measurement beside the form that keeps one number a row.
#include "frit/ops/softmax/backward.h"
#include "frit/ops/softmax/forward.h"

namespace frit {

using namespace simt;

namespace {
// A short row wants more blocks, a long one more vectors in registers; kAny loops over what is longer still.
int stored_instance(const Tensor& x, const SoftmaxArgs& args) {
  return !args.mask.defined() && softmax_chunks(x) > softmax_lanes(kAny) * softmax_vectors(kAny) &&
                 softmax_chunks(x) <= softmax_lanes(kLongRowPerWarp) * softmax_vectors(kLongRowPerWarp)
             ? kLongRowPerWarp
             : kAny;
}
}  // namespace

void softmax_forward_stored_gpu(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y,
                                const Tensor& lse) {
  const SoftmaxShape s = softmax_shape(x, args, y);
  dispatch_float(x.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto i) {
      launch(context, "softmax_forward_rows_kernel", softmax_forward_rows_kernel<T, T, i, true>,
             softmax_launch(i, s.rows), s, global<const T>(x), global<const int32_t>(args.lengths),
             global<const float>(args.mask), global<T>(y), global<float>(lse), global<T>(args.p),
             global<uint8_t>(args.keep));
    };
    if (stored_instance(x, args) == kAny)
      run(softmax_constant<kAny>());
    else
      run(softmax_constant<kLongRowPerWarp>());
  });
}

void softmax_backward_stored_gpu(Context& context, const Tensor& dy, const Tensor& lse, const SoftmaxArgs& args,
                                 const Tensor& dx) {
  SoftmaxShape s = softmax_shape(args.p, args, dx);
  s.dy_stride = dy.row_stride();
  dispatch_float(dy.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto i) {
      launch(context, "softmax_backward_rows_kernel", softmax_backward_rows_kernel<T, T, i, true>,
             softmax_launch(i, s.rows), s, global<const T>(dy), global<const T>(args.p), global<const float>(lse),
             global<const int32_t>(args.lengths), global<const float>(args.mask), global<const uint8_t>(args.keep),
             global<T>(dx));
    };
    if (stored_instance(args.p, args) == kAny)
      run(softmax_constant<kAny>());
    else
      run(softmax_constant<kLongRowPerWarp>());
  });
}

}  // namespace frit
