#include "frit/ops/sample_step/sample_step.h"

#include "frit/ops/sample_step/gpu.h"

namespace frit {

void sample_step(Context& context, const SampleStepArgs& a) {
  FRIT_CHECK(context.on_gpu(), "[sample_step] needs a GPU: on the CPU a Generator draws by itself");
  FRIT_CHECK(a.logits.rank() == 2 && a.logits.dtype() == DType::kF32 && a.logits.dim(1) >= 1 &&
                 a.logits.dim(1) <= (int64_t{1} << 30),
             "[sample_step] logits are {}, expected f32[rows, V]", a.logits.to_string());
  const int64_t rows = a.logits.dim(0), sentences = a.state.live_sentence.dim(0);
  const auto expect = [](const char* name, const Tensor& t, DType dtype, const Shape& shape) {
    FRIT_CHECK(t.defined() && t.dtype() == dtype && t.shape() == shape && t.contiguous(),
               "[sample_step] {} is {}, expected {}{}", name, t.to_string(), name_of(dtype), shape.to_string());
  };
  expect("lse", a.lse, DType::kF32, {rows});
  expect("drawn", a.drawn, DType::kI32, {rows}), expect("drawn_scores", a.drawn_scores, DType::kF32, {rows});
  expect("draw", a.draw, DType::kI64, {kDrawSentences + sentences});
  FRIT_CHECK(rows % a.state.width == 0 && rows / a.state.width <= sentences,
             "[sample_step] {} rows, expected {} a sentence and at most {} sentences", rows, a.state.width, sentences);
  FRIT_CHECK(a.settings.rank() == 1 && a.settings.dtype() == DType::kI32 && a.settings.numel() >= kSearchLists &&
                 a.numbers.rank() == 1 && a.numbers.dtype() == DType::kF32,
             "[sample_step] settings are {} and numbers {}, expected i32 and f32 as search_step has them",
             a.settings.to_string(), a.numbers.to_string());
  if (rows == 0) return;
  sample_step_gpu(context, a);
}

}  // namespace frit
