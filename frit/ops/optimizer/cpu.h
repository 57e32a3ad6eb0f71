// The CPU form of the optimizer.
#pragma once
#include <cstdint>

#include "frit/ops/optimizer/optimizer.h"

namespace frit {

// The numbers of one step, rounded to fp32 once.
struct OptimizerConstants {
  float gradient_scale, weight_decay_l2, weight_keep;                     // L2 factor; AdamW's 1 - lr * weight_decay
  float one_minus_beta1, beta1, beta2, one_minus_beta2, bias2_sqrt, eps;  // Adam
  float minus_step_size;                                                  // -lr / (1 - beta1^step), or SGD's -lr
  float momentum;                                                         // SGD
  bool lerp_from_gradient;  // 1 - beta1 >= 0.5: m is reckoned from g's side, which is exact at beta1 == 0
};

// Updates elements [begin, end), in parallel. Shapes and dtypes have been checked.
void optimizer_step_cpu(Context& context, const OptimizerArgs& args, const OptimizerStep& step,
                        const OptimizerBlocks& blocks, int64_t begin, int64_t end);

}  // namespace frit
