// The trainer: one pass over the parameter workspace updates the whole model.
#pragma once
#include <string_view>

#include "frit/backend/context.h"
#include "frit/memory/workspace.h"

namespace frit {

enum class OptimizerKind : uint8_t { kAdam, kAdamW, kSgd };
const char* name_of(OptimizerKind kind);               // "adam", "adamw", "sgd"
OptimizerKind parse_optimizer(std::string_view name);  // Errors: frit::Error with the known names

// fp32 words that optimizer_prepare writes and an update reads: see constants.h.
constexpr int64_t kOptimizerConstants = 16;

// What changes from step to step.
struct OptimizerStep {
  double learning_rate = 0;
  int64_t step = 1;          // 1 for the first update: bias correction 1 - beta^step
  float gradient_scale = 1;  // multiplies every gradient: clipping and loss scale in one factor
  // f32 [kOptimizerConstants] in the device's memory, optional: what optimizer_prepare wrote there. It replaces the
  // three numbers above, so that a captured update can be replayed, and may say that there is nothing to update.
  Tensor prepared = {};
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
  Tensor master;            // f32, kBF16Master and kF16Master
  Tensor residual;          // 16 bits an element in a bf16 tensor, kBF16Residual
};

// Updates parameters (and master or residual), moment1 and moment2 of the workspace in one pass.
// Math: fp32, each operation rounded on its own (no fused multiply-add), so the bits are the same on every SIMD target;
// and on the GPU; bias correction in double. g = gradient_scale * gradient, then as torch.optim.Adam does it:
//   m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g;
//   p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// AdamW multiplies p by 1 - lr * weight_decay before. Slice by slice or whole gives the same bits. begin and end bound
// the elements updated (whole: 0, -1).
//   kBF16Stochastic rounds up with the probability (distance from below) / spacing, in steps of 2^-16: unbiased.
//   kF16Stochastic likewise (exact steps of 2^-13 from 2^-14 on, of 2^-16 below); it never makes an infinity of what
//   rounding to nearest keeps finite.
// Cost: one read and write of each block, 1 parallel region or launch. Bytes a parameter: fp32 28; bf16 alone 22;
// residual 26; master 28; with fp32 gradients 2 more in the bf16 modes. Errors: std::invalid_argument for an fp16
// precision without a GPU, if the workspace is not a training one or lacks a moment that the kind needs, for a range
// outside of the blocks, for blocks that do not begin at a multiple of 16 bytes (GPU), and for betas, eps, step or
// learning rate out of range (without `prepared`). Source: Kingma & Ba 2014
// (arXiv:1412.6980); Loshchilov & Hutter 2017 (arXiv:1711.05101).
void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step, Workspace& workspace,
                    int64_t begin = 0, int64_t end = -1);
void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step,
                    const OptimizerBlocks& blocks, int64_t begin = 0, int64_t end = -1);

// The optimizer's own numbers, which stay on the device from update to update, so that neither clipping nor loss
// scaling waits for the host. Whole numbers are exact.
enum OptimizerNumber : int {
  kLearningRate,  // of the next update: written by the caller
  kUpdates,       // made so far; the next is number kUpdates + 1
  kSkipped,       // steps without an update, since a gradient was not finite
  kFinite,        // updates since the loss scale last changed
  kGradientNorm,  // of the last step, loss scale taken out, before clipping
  kOptimizerNumbers
};
struct OptimizerState {
  Tensor numbers;     // f64 [kOptimizerNumbers]
  Tensor loss_scale;  // f32 [1], optional: what the loss was multiplied by
  Tensor prepared;    // f32 [kOptimizerConstants]
};
struct PrepareArgs {
  double max_norm = 0;  // gradients are scaled down to this norm; 0: no clipping
  // The loss scale halves when a gradient is not finite, down to the least, and doubles after so many updates in a row,
  // up to the largest. 0: it stays.
  int64_t growth_interval = 2000;
  float least_loss_scale = 0x1p-14f, largest_loss_scale = 0x1p24f;
};

// Makes one update's numbers from what gradient_norm found: writes state.prepared for optimizer_step, counts the
// update, and moves the loss scale. If not_finite[0] is set, the update will leave everything as it is. Math: norm =
// sqrt(sum_of_squares) / loss_scale; gradient scale = min(1, max_norm / norm) / loss_scale. Shapes: sum_of_squares f64
// [1], may be undefined without clipping; not_finite i32 [1], may be undefined: all finite. Cost: 1 launch of one
// thread, or no parallel region. Errors: std::invalid_argument if a shape or dtype differs, or an argument is out of
// range.
void optimizer_prepare(Context& context, const OptimizerArgs& args, const PrepareArgs& prepare,
                       const Tensor& sum_of_squares, const Tensor& not_finite, const OptimizerState& state);

}  // namespace frit
