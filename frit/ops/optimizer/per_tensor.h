// The update as it was before a model's parameters lay in one block: tensor by tensor, over fp32 copies. To compare
// with.
#pragma once
#include "frit/ops/optimizer/optimizer.h"

namespace frit {

// What optimizer_step does, bit for bit, for each parameter of the workspace by itself: its gradient copied to fp32,
// the update in fp32 alone, and the new value copied to 16 bits. fp32 runs have no copies to make, and 16-bit ones
// whose gradients are fp32 none of these.
// Shapes: gradient_copy f32 [elements of the layout], whatever it holds; undefined where the gradients are fp32.
// Cost: 3 launches a parameter (fp32: 1; fp32 gradients: 2), and 40 bytes an element (28; 34).
// Errors: std::invalid_argument unless the precision is fp32 or has an fp32 master, if gradient_copy differs, and as
// optimizer_step.
// Source: the baseline of LightSeq2 (arXiv:2110.05722), section on the trainer.
void optimizer_step_per_tensor(Context& context, const OptimizerArgs& args, const OptimizerStep& step,
                               const Workspace& workspace, const Tensor& gradient_copy);
// Does it need a gradient_copy?
inline bool optimizer_copies_gradients(const Workspace& workspace) {
  return workspace.gradients().dtype() != DType::kF32;
}

// to[begin, end) = from[begin, end), one of them f32 and the other one f16 or bf16, rounded to nearest even. Both of
// rank 1 and of one length, at multiples of 16 bytes. Cost: 1 launch, 6 bytes an element.
void optimizer_cast_gpu(Context& context, const Tensor& from, const Tensor& to, int64_t begin, int64_t end);

}  // namespace frit
