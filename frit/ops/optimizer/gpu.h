// The GPU form of the optimizer.
#pragma once
#include "frit/ops/optimizer/constants.h"

namespace frit {

// Updates elements [begin, end) with the constants in `prepared` (f32 [kOptimizerConstants] on the device), or, where
// that is undefined, with those given.
// Cost: 1 launch (0 without elements), no barrier; each block read once and all but the gradients written once; the
// constants again in each thread, where they are prepared.
void optimizer_step_gpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                        const Tensor& prepared, const OptimizerBlocks& blocks, int64_t begin, int64_t end);
void optimizer_prepare_gpu(Context& context, const OptimizerArgs& args, const PrepareArgs& prepare,
                           const Tensor& sum_of_squares, const Tensor& not_finite, const OptimizerState& state);

}  // namespace frit
