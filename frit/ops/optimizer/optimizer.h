// The trainer: one pass over the parameter workspace updates the whole model.
#pragma once
#include <string_view>

#include "frit/backend/context.h"
#include "frit/memory/workspace.h"

namespace frit {

enum class OptimizerKind : uint8_t { kAdam, kAdamW, kSgd };
const char* name_of(OptimizerKind kind);                // "adam", "adamw", "sgd"
OptimizerKind parse_optimizer(std::string_view name);   // Errors: frit::Error with the known names

// What changes from step to step; lives on the device so that a captured step can be replayed.
struct OptimizerStep {
  float learning_rate = 0;
  int64_t step = 1;           // 1 for the first update: bias correction 1 - beta^step
  float gradient_scale = 1;   // multiplies every gradient: clipping and loss scale in one factor
};

struct OptimizerArgs {
  OptimizerKind kind = OptimizerKind::kAdam;
  float beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f;
  float momentum = 0.9f;      // SGD: m = momentum * m + g; p -= lr * m (PyTorch's form, no dampening)
  float weight_decay = 0;     // Adam and SGD: added to the gradient (L2); AdamW: decoupled. Applies to elements below decay_end
  int64_t decay_end = 0;
  uint32_t seed = 0;          // stochastic rounding: Philox key (seed, step), counter (element / 8, ...)
};

// Updates parameters (and master or residual), moment1 and moment2 of the workspace in one pass.
// Math: Kingma & Ba 2014 (arXiv:1412.6980) with bias correction as torch.optim.Adam; AdamW as torch.optim.AdamW; fp32
// arithmetic. Slice by slice or whole gives the same bits. begin and end bound the elements updated (whole: 0, -1).
// Cost: one read and write of each block, 1 parallel region. Bytes a parameter: fp32 28; bf16 alone 22; residual 26; master 28.
// Errors: std::invalid_argument if the workspace is not a training one or lacks a moment that the kind needs.
void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step, Workspace& workspace,
                    int64_t begin = 0, int64_t end = -1);

}  // namespace frit
