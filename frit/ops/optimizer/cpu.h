// The CPU form of the optimizer.
#pragma once
#include "frit/ops/optimizer/constants.h"

namespace frit {

// Updates elements [begin, end), in parallel. Shapes and dtypes have been checked.
void optimizer_step_cpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                        const OptimizerBlocks& blocks, int64_t begin, int64_t end);
// Cost: 1 parallel region, a slice a task.
void optimizer_swallowed_cpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                             const OptimizerBlocks& blocks, const Tensor& slice_ends, const Tensor& counts);

// `step` is 1 - decay.
void ema_update_cpu(Context& context, double step, const OptimizerBlocks& blocks, const Tensor& ema);
void ema_exchange_cpu(Context& context, bool in, const OptimizerBlocks& blocks, const Tensor& ema, const Tensor& aside);

}  // namespace frit
