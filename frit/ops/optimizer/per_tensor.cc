#include "frit/ops/optimizer/per_tensor.h"

namespace frit {
namespace {

void cast(Context& context, const Tensor& from, const Tensor& to, int64_t begin, int64_t end) {
  if (context.on_gpu()) return optimizer_cast_gpu(context, from, to, begin, end);
  if (context.planning()) return;
  constexpr int64_t kGrain = 1 << 16;
  context.pool().parallel_for(end - begin, kGrain, [&](int64_t first, int64_t last, int) {
    if (to.dtype() == DType::kF32)
      for (int64_t i = begin + first; i < begin + last; ++i)
        to.data<float>()[i] = static_cast<float>(from.data<bfloat16>()[i]);
    else
      for (int64_t i = begin + first; i < begin + last; ++i) to.data<bfloat16>()[i] = bfloat16(from.data<float>()[i]);
  });
}

}  // namespace

void optimizer_step_per_tensor(Context& context, const OptimizerArgs& args, const OptimizerStep& step,
                               const Workspace& workspace, const Tensor& gradient_copy) {
  const Workspace& w = workspace;
  const bool wide = w.precision() == Precision::kF32, copies = optimizer_copies_gradients(w);
  FRIT_CHECK(wide || keeps_master(w.precision()), "[optimizer] {} has no fp32 parameters to update tensor by tensor",
             name_of(w.precision()));
  FRIT_CHECK(!copies || (gradient_copy.dtype() == DType::kF32 && gradient_copy.shape() == w.gradients().shape() &&
                         gradient_copy.contiguous()),
             "[optimizer] gradient_copy is {}, expected contiguous f32{}", gradient_copy.to_string(),
             w.gradients().shape().to_string());
  OptimizerBlocks blocks;
  blocks.precision = Precision::kF32;
  blocks.parameters = wide ? w.parameters() : w.master();
  blocks.gradients = copies ? gradient_copy : w.gradients();
  blocks.moment1 = w.moment1(), blocks.moment2 = w.moment2();
  for (const auto& slice : w.layout().slices()) {
    const int64_t begin = slice.offset, end = begin + slice.shape.numel();
    if (copies) cast(context, w.gradients(), gradient_copy, begin, end);
    optimizer_step(context, args, step, blocks, begin, end);
    if (!wide) cast(context, w.master(), w.parameters(), begin, end);
  }
}

}  // namespace frit
