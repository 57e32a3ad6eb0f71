#include "frit/ops/bias_dropout_residual_norm/gpu.h"
#include "frit/ops/layer_norm/backward_held-inl.h"
#include "frit/ops/layer_norm/forward.h"

namespace frit {

bool bias_dropout_residual_norm_backward_gpu(Context& context, const Tensor& dy, const Tensor& s, const Tensor& gamma,
                                             const Tensor& mean, const Tensor& rstd, const Tensor& dresidual,
                                             const Dropout& dropout, bool accumulate, const Tensor& ds,
                                             const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta,
                                             const Tensor& dbias) {
  using namespace layer_norm;
  constexpr const char* kOp = "bias_dropout_residual_norm_backward";
  const std::string_view forced = context.forced(kOp);
  const BackwardShape shape(s);
  const bool whole =
      whole_vectors(s) && whole_vectors(dy) && whole_vectors(dresidual) && whole_vectors(ds) && whole_vectors(dx);
  const bool holds = whole && (shape.held_vectors() == 2 || shape.held_vectors() == 3);
  const struct {
    int instance;
    const char* name;
    bool fits;
  } instances[] = {{kXhat1, "xhat_1", shape.widest() == kXhat1},
                   {kHeldBackward, "held", holds},
                   {kSpans2Backward, "spans_2", whole && shape.spans_fit(kSpans2Backward)},
                   {kSpans4Backward, "spans_4", whole && shape.spans_fit(kSpans4Backward)}};
  const int rule = holds ? kHeldBackward : shape.rule_but_held();
  int instance = -1;
  for (const auto& i : instances)
    if (i.fits && (forced.empty() ? i.instance == rule : forced == i.name))
      instance = i.instance, context.note_used(kOp, i.name);
  FRIT_CHECK(instance >= 0 || forced.empty() || forced == "apart",
             "[bias_dropout_residual_norm] no instance {} of s {}", forced, s.to_string());
  if (instance < 0) return context.note_used(kOp, "apart"), false;
  const int64_t blocks = shape.cut(instance, 3).blocks;
  Buffer partials = context.allocate({blocks, 2 * shape.cols}, DType::kF32, "bias_dropout_residual_norm.partials");
  Buffer bias_partials;
  if (dbias.defined())
    bias_partials = context.allocate({blocks, shape.cols}, DType::kF32, "bias_dropout_residual_norm.bias_partials");
  const LayerNormBackward operands = {dy, s, gamma, mean, rstd, dresidual, ds, partials};
  dispatch_float(s.dtype(), [&](auto type) {
    using T = decltype(type);
    const DroppedBelow<T> below = {DropoutTable(dropout), global<T>(dx), dx.row_stride(),
                                   global<float>(bias_partials.tensor())};
    if constexpr (sizeof(T) == 2) {
      if (instance == kHeldBackward) {
        if (shape.held_full()) return launch_held<T, true>(context, shape, operands, below);
        return launch_held<T, false>(context, shape, operands, below);
      }
    }
    if (BackwardShape::is_spans(instance)) return launch_spans<T>(context, instance, shape, operands, below);
    launch_rows<T>(context, instance, shape, operands, below);
  });
  if (dbias.defined())
    layer_norm_add_all_partials(context, std::move(partials), std::move(bias_partials), accumulate, dgamma, dbeta,
                                dbias);
  else
    layer_norm_add_partials(context, std::move(partials), accumulate, dgamma, dbeta);
  return true;
}

}  // namespace frit
