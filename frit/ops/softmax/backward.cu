#include "frit/ops/softmax/backward.h"
#include "frit/ops/softmax/whole.h"

namespace frit {

using namespace simt;

void softmax_backward_gpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& lse,
                          const SoftmaxArgs& args, const Tensor& dx) {
  if (args.p.defined()) return softmax_backward_stored_gpu(context, dy, lse, args, dx);
  const bool two_dtypes = dx.dtype() != x.dtype();
  const bool plain = softmax_plain(x, args, dx, dy), ragged = !softmax_rows_whole(x, dx, dy);
  const int instance = choose_softmax_instance(context, "softmax_backward", x, args, two_dtypes, plain);
  SoftmaxShape s = softmax_shape(x, args, dx);
  s.dy_stride = dy.row_stride();
  if (const int vectors = softmax_whole_vectors(instance, x.dim(1), ragged); vectors > 0 && plain) {
    if (ragged) return softmax_backward_ragged_gpu(context, instance, s, dy, x, lse, dx);
    const auto start = [&](auto t) {
      using T = decltype(t);
      for_softmax_whole(instance, vectors, [&](auto g, auto v) {
        launch(context, "softmax_backward_whole_kernel", softmax_backward_whole_kernel<T, g, v>,
               softmax_launch(instance, s.rows), softmax_whole(s), global<const T>(dy), global<const T>(x),
               global<const float>(lse), global<T>(dx));
      });
    };
    return x.dtype() == DType::kBF16 ? start(bfloat16()) : start(float16());
  }
  const auto run = [&](auto t, auto tx, auto i) {
    using T = decltype(t);
    using TX = decltype(tx);
    launch(context, "softmax_backward_rows_kernel", softmax_backward_rows_kernel<T, TX, i, false>,
           softmax_launch(i, s.rows), s, global<const T>(dy), global<const T>(x), global<const float>(lse),
           global<const int32_t>(args.lengths), global<const float>(args.mask), Global<const uint8_t>(),
           global<TX>(dx));
  };
  if (two_dtypes) {
    if (dx.dtype() == DType::kBF16) return run(float(), bfloat16(), softmax_constant<kAny>());
    return run(float(), float16(), softmax_constant<kAny>());
  }
  dispatch_float(x.dtype(), [&](auto t) { for_softmax_instance(instance, [&](auto i) { run(t, t, i); }); });
}

}  // namespace frit
