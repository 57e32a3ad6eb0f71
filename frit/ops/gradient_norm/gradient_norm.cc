#include "frit/ops/gradient_norm/gradient_norm.h"

#include "frit/ops/gradient_norm/cpu.h"
#include "frit/ops/gradient_norm/gpu.h"

namespace frit {

void gradient_norm(Context& context, const Tensor& gradients, const Tensor& sum_of_squares, const Tensor& not_finite) {
  FRIT_CHECK(gradients.defined() && gradients.contiguous() &&
                 (gradients.dtype() == DType::kF32 || is_16bit_float(gradients.dtype())),
             "[gradient_norm] gradients are {}, expected contiguous f32, bf16 or f16", gradients.to_string());
  FRIT_CHECK(context.on_gpu() || gradients.dtype() != DType::kF16, "[gradient_norm] f16 needs a GPU");
  FRIT_CHECK(sum_of_squares.defined() && sum_of_squares.dtype() == DType::kF64 && sum_of_squares.numel() == 1,
             "[gradient_norm] sum_of_squares is {}, expected f64[1]", sum_of_squares.to_string());
  FRIT_CHECK(not_finite.defined() && not_finite.dtype() == DType::kI32 && not_finite.numel() == 1,
             "[gradient_norm] not_finite is {}, expected i32[1]", not_finite.to_string());
  if (context.on_gpu()) return gradient_norm_gpu(context, gradients, sum_of_squares, not_finite);
  gradient_norm_cpu(context, gradients, sum_of_squares, not_finite);
}

}  // namespace frit
