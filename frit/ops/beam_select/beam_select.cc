#include "frit/ops/beam_select/beam_select.h"

#include <limits>

#include "frit/ops/beam_select/cpu.h"
#include "frit/ops/beam_select/gpu.h"

namespace frit {

void beam_select(Context& context, const Tensor& logits, int64_t count, const Tensor& values, const Tensor& columns,
                 const Tensor& lse, const Tensor& survivors) {
  FRIT_CHECK(logits.rank() == 2, "[beam_select] logits are {}, expected [rows, V]", logits.to_string());
  FRIT_CHECK(logits.dtype() == DType::kF32 || is_16bit_float(logits.dtype()),
             "[beam_select] logits are {}, expected f32, bf16 or f16", logits.to_string());
  FRIT_CHECK(logits.dtype() != DType::kF16 || context.on_gpu(), "[beam_select] f16 needs a GPU");
  const int64_t rows = logits.dim(0), vocabulary = logits.dim(1);
  FRIT_CHECK(vocabulary <= std::numeric_limits<int32_t>::max(),
             "[beam_select] logits are {}, expected less than 2^31 columns", logits.to_string());
  FRIT_CHECK(count >= 1 && count <= vocabulary, "[beam_select] count is {}, expected 1 to V = {}", count, vocabulary);
  FRIT_CHECK(values.shape() == (Shape{rows, count}) && values.dtype() == DType::kF32,
             "[beam_select] values are {}, expected f32[{}, {}]", values.to_string(), rows, count);
  FRIT_CHECK(columns.shape() == (Shape{rows, count}) && columns.dtype() == DType::kI32,
             "[beam_select] columns are {}, expected i32[{}, {}]", columns.to_string(), rows, count);
  if (lse.defined()) {
    FRIT_CHECK(lse.shape() == Shape{rows} && lse.dtype() == DType::kF32 && lse.contiguous(),
               "[beam_select] lse is {}, expected f32[{}]", lse.to_string(), rows);
  }
  if (survivors.defined()) {
    FRIT_CHECK(survivors.shape() == Shape{rows} && survivors.dtype() == DType::kI32 && survivors.contiguous(),
               "[beam_select] survivors are {}, expected i32[{}]", survivors.to_string(), rows);
  }
  if (context.on_gpu()) {
    FRIT_CHECK(vocabulary <= kBeamSelectLargestGpuVocabulary,
               "[beam_select] logits are {}, expected at most {} columns on a GPU", logits.to_string(),
               kBeamSelectLargestGpuVocabulary);
    return beam_select_gpu(context, logits, count, values, columns, lse, survivors);
  }
  beam_select_cpu(context, logits, count, values, columns, lse, survivors);
}

}  // namespace frit
