#include "frit/ops/criterion/criterion.h"

#include "frit/ops/criterion/cpu.h"
#include "frit/ops/criterion/gpu.h"

namespace frit {

void criterion_forward_backward(Context& context, const Tensor& logits, const Tensor& bias, const Tensor& labels,
                                float smoothing, const Tensor& scale, const Tensor& loss, const Tensor& nll) {
  FRIT_CHECK(logits.rank() == 2, "[criterion] logits are {}, expected [tokens, V]", logits.to_string());
  FRIT_CHECK(logits.dtype() == DType::kF32 || is_16bit_float(logits.dtype()),
             "[criterion] logits are {}, expected f32, bf16 or f16", logits.to_string());
  FRIT_CHECK(logits.dtype() != DType::kF16 || context.on_gpu(), "[criterion] f16 needs a GPU");
  const int64_t tokens = logits.dim(0), vocabulary = logits.dim(1);
  FRIT_CHECK(vocabulary > 0, "[criterion] logits are {}, expected at least one column", logits.to_string());
  if (bias.defined()) {
    FRIT_CHECK(bias.rank() == 1 && bias.dim(0) == vocabulary && bias.contiguous(),
               "[criterion] bias is {}, logits are {}", bias.to_string(), logits.to_string());
    FRIT_CHECK(bias.dtype() == DType::kF32 || bias.dtype() == logits.dtype(),
               "[criterion] bias is {}, expected f32 or {}", bias.to_string(), name_of(logits.dtype()));
  }
  FRIT_CHECK(labels.rank() == 1 && labels.dim(0) == tokens && labels.dtype() == DType::kI32 && labels.contiguous(),
             "[criterion] labels are {}, expected i32[{}]", labels.to_string(), tokens);
  FRIT_CHECK(smoothing >= 0 && smoothing <= 1, "[criterion] smoothing is {}, expected 0 to 1", smoothing);
  if (scale.defined()) {
    FRIT_CHECK(scale.numel() == 1 && scale.dtype() == DType::kF32, "[criterion] scale is {}, expected f32[1]",
               scale.to_string());
  }
  for (const Tensor* t : {&loss, &nll})
    FRIT_CHECK(t->rank() == 1 && t->dim(0) == tokens && t->dtype() == DType::kF32 && t->contiguous(),
               "[criterion] {} is {}, expected f32[{}]", t == &loss ? "loss" : "nll", t->to_string(), tokens);
  if (context.on_gpu()) {
    FRIT_CHECK(vocabulary <= kLargestGpuVocabulary, "[criterion] logits are {}, expected at most {} columns on a GPU",
               logits.to_string(), kLargestGpuVocabulary);
    return criterion_forward_backward_gpu(context, logits, bias, labels, smoothing, scale, loss, nll);
  }
  if (!context.planning())
    for (int64_t t = 0; t < tokens; ++t)
      FRIT_CHECK(labels.data<int32_t>()[t] < vocabulary, "[criterion] label {} of token {} is not below V = {}",
                 labels.data<int32_t>()[t], t, vocabulary);
  criterion_forward_backward_cpu(context, logits, bias, labels, smoothing, scale, loss, nll);
}

}  // namespace frit
