// The trainer: one pass over the parameter workspace updates the whole model.
#pragma once
#include <string_view>

#include "frit/backend/context.h"
#include "frit/memory/workspace.h"

namespace frit {

enum class OptimizerKind : uint8_t { kAdam, kAdamW, kSgd };
const char* name_of(OptimizerKind kind);               // "adam", "adamw", "sgd"
OptimizerKind parse_optimizer(std::string_view name);  // Errors: frit::Error with the known names

// What changes from step to step; lives on the device so that a captured step can be replayed.
struct OptimizerStep {
  double learning_rate = 0;
  int64_t step = 1;          // 1 for the first update: bias correction 1 - beta^step
  float gradient_scale = 1;  // multiplies every gradient: clipping and loss scale in one factor
};

// In double, as PyTorch has them: (1 - 0.999f) is already 1.3e-5 away from 0.001.
struct OptimizerArgs {
  OptimizerKind kind = OptimizerKind::kAdam;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double momentum = 0.9;    // SGD: m = momentum * m + g; p -= lr * m (PyTorch's form, no dampening). 0: needs no moment
  double weight_decay = 0;  // Adam and SGD: added to the gradient (L2); AdamW: decoupled. For elements below decay_end
  int64_t decay_end = 0;
  uint32_t seed = 0;  // stochastic rounding: Philox key (seed, step), counter (element / 8, 0, kRoundingSite)
};
constexpr uint32_t kRoundingSite = dropout_site("optimizer.rounding");

// The blocks one update works on: all rank 1 and of one length. Those that precision and kind have no use for are
// ignored.
struct OptimizerBlocks {
  Precision precision = Precision::kF32;
  Tensor parameters;        // in the precision's compute dtype
  Tensor gradients;         // f32 or the compute dtype; read
  Tensor moment1, moment2;  // f32
  Tensor master;            // f32, kBF16Master
  Tensor residual;          // 16 bits an element in a bf16 tensor, kBF16Residual
};

// Updates parameters (and master or residual), moment1 and moment2 of the workspace in one pass.
// Math: fp32, each operation rounded on its own (no fused multiply-add), so the bits are the same on every SIMD target;
// bias correction in double on the host. g = gradient_scale * gradient, then as torch.optim.Adam does it:
//   m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g;
//   p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// AdamW multiplies p by 1 - lr * weight_decay before. Slice by slice or whole gives the same bits. begin and end bound
// the elements updated (whole: 0, -1).
//   kBF16Stochastic rounds up with the probability (distance from below) / spacing, in steps of 2^-16: unbiased.
// Cost: one read and write of each block, 1 parallel region. Bytes a parameter: fp32 28; bf16 alone 22; residual 26;
// master 28; with fp32 gradients 2 more in the bf16 modes.
// Errors: std::invalid_argument if the workspace is not a training one or lacks a moment that the kind needs, for a
// range outside of the blocks, and for betas, eps, step or learning rate out of range. Source: Kingma & Ba 2014
// (arXiv:1412.6980); Loshchilov & Hutter 2017 (arXiv:1711.05101).
void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step, Workspace& workspace,
                    int64_t begin = 0, int64_t end = -1);
void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step,
                    const OptimizerBlocks& blocks, int64_t begin = 0, int64_t end = -1);

}  // namespace frit
