#include "frit/ops/bias_dropout_residual_norm/gpu.h"
#include "frit/ops/layer_norm/forward-inl.h"
#include "frit/ops/layer_norm/held-inl.h"

namespace frit {

bool bias_dropout_residual_norm_forward_gpu(Context& context, const Tensor& x, const Tensor& bias,
                                            const Tensor& residual, const Dropout& dropout, const Tensor& gamma,
                                            const Tensor& beta, float eps, const Tensor& s, const Tensor& y,
                                            const Tensor& mean, const Tensor& rstd) {
  using namespace layer_norm;
  constexpr const char* kOp = "bias_dropout_residual_norm_forward";
  const std::string_view forced = context.forced(kOp);
  if (forced == "apart") return context.note_used(kOp, "apart"), false;
  const ForwardShape shape(x);
  int instance = -1;
  if (forced.empty()) {
    instance = choose_forward(context, x);
  } else {
    for (int i = 0; i < kTwoSync; ++i)
      if (forced == kForwardInstances[i] && i != kLooped) instance = i;
    FRIT_CHECK(instance >= 0 && shape.fits(instance), "[bias_dropout_residual_norm] no instance {} of x {}", forced,
               x.to_string());
  }
  const bool whole = whole_vectors(x) && whole_vectors(residual) && whole_vectors(s) && whole_vectors(y);
  const bool shared_whole = whole_vectors(bias) && whole_vectors(gamma) && whole_vectors(beta);
  const bool takes = instance == kHeld ? whole && shared_whole : whole || !ForwardShape::is_spans(instance);
  FRIT_CHECK(forced.empty() || takes, "[bias_dropout_residual_norm] {} is for rows of whole aligned vectors, x is {}",
             forced, x.to_string());
  if (instance == kLooped || instance >= kTwoSync || !takes) return context.note_used(kOp, "apart"), false;
  context.note_used(kOp, kForwardInstances[instance]);
  if (instance == kHeld) {
    const auto start = [&](auto t) {
      using T = decltype(t);
      const HeldSummed<T> summed = {global<const T>(x),    global<const T>(bias), global<const T>(residual),
                                    residual.row_stride(), DropoutTable(dropout), global<T>(s),
                                    s.row_stride()};
      launch_held<T, Held::kWhole>(context, shape, summed, x.row_stride(), gamma, beta, eps, y, mean, rstd);
    };
    x.dtype() == DType::kBF16 ? start(bfloat16()) : start(float16());
    return true;
  }
  dispatch_float(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const RowsSummed<T> summed = {
        global<const T>(x),    x.row_stride(),        global<const T>(bias), global<const T>(residual),
        residual.row_stride(), DropoutTable(dropout), global<T>(s),          s.row_stride()};
    launch_forward<T>(context, instance, shape, summed, whole && shared_whole, gamma, beta, eps, y, mean, rstd);
  });
  return true;
}

}  // namespace frit
