#include "frit/ops/softmax/forward.h"
#include "frit/ops/softmax/whole.h"

namespace frit {

using namespace simt;

void softmax_forward_gpu(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y,
                         const Tensor& lse) {
  if (args.p.defined()) return softmax_forward_stored_gpu(context, x, args, y, lse);
  const bool two_dtypes = y.dtype() != x.dtype();
  const bool plain = softmax_plain(x, args, y, Tensor()), ragged = !softmax_rows_whole(x, y, Tensor());
  const int instance = choose_softmax_instance(context, "softmax_forward", x, args, two_dtypes, plain);
  const SoftmaxShape s = softmax_shape(x, args, y);
  if (const int vectors = softmax_whole_vectors(instance, x.dim(1), ragged); vectors > 0 && plain) {
    if (ragged) return softmax_forward_ragged_gpu(context, instance, s, x, y, lse);
    const auto start = [&](auto t) {
      using T = decltype(t);
      for_softmax_whole(instance, vectors, [&](auto g, auto v) {
        launch(context, "softmax_forward_whole_kernel", softmax_forward_whole_kernel<T, g, v>,
               softmax_launch(instance, s.rows), softmax_whole(s), global<const T>(x), global<T>(y),
               global<float>(lse));
      });
    };
    return x.dtype() == DType::kBF16 ? start(bfloat16()) : start(float16());
  }
  const auto run = [&](auto t, auto ty, auto i) {
    using T = decltype(t);
    using TY = decltype(ty);
    launch(context, "softmax_forward_rows_kernel", softmax_forward_rows_kernel<T, TY, i, false>,
           softmax_launch(i, s.rows), s, global<const T>(x), global<const int32_t>(args.lengths),
           global<const float>(args.mask), global<TY>(y), global<float>(lse), Global<TY>(), Global<uint8_t>());
  };
  if (two_dtypes) {
    if (y.dtype() == DType::kBF16) return run(float(), bfloat16(), softmax_constant<kAny>());
    return run(float(), float16(), softmax_constant<kAny>());
  }
  dispatch_float(x.dtype(), [&](auto t) { for_softmax_instance(instance, [&](auto i) { run(t, t, i); }); });
}

}  // namespace frit
