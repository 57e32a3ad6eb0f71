// The CPU form of the optimizer.
#pragma once
#include "frit/ops/optimizer/constants.h"

namespace frit {

// Updates elements [begin, end), in parallel. Shapes and dtypes have been checked.
void optimizer_step_cpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                        const OptimizerBlocks& blocks, int64_t begin, int64_t end);

}  // namespace frit
