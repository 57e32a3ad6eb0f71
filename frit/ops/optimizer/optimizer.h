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
  // The stochastic precisions round to nearest even instead: 16 bits alone, the published form, where an update below
  // half a spacing is lost. To compare with; no other precision looks at it.
  bool nearest = false;
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
// Math: fp32, each operation rounded on its own (no fused multiply-add), so the bits are the same on every SIMD
// target and on the GPU; bias correction in double. g = gradient_scale * gradient, then as torch.optim.Adam does it:
//   m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g;
//   p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// AdamW multiplies p by 1 - lr * weight_decay before. Slice by slice or whole gives the same bits. begin and end bound
// the elements updated (whole: 0, -1).
//   kBF16Stochastic rounds up with the probability (distance from below) / spacing, in steps of 2^-16: unbiased.
//   kF16Stochastic likewise (exact steps of 2^-13 from 2^-14 on, of 2^-16 below); it never makes an infinity of what
//   rounding to nearest keeps finite.
// Cost: one read and write of each block, 1 parallel region or launch. Bytes a parameter: fp32 28; 16 bits alone 22;
// residual 26; master 28; with fp32 gradients 2 more in the 16-bit modes.
// Errors: std::invalid_argument for an fp16 precision without a GPU, if the workspace is not a training one or lacks a
// moment that the kind needs, for a range outside of the blocks, for blocks that do not begin at a multiple of 16 bytes
// (GPU), and for betas, eps, step or learning rate out of range (the last two without `prepared`).
// Source: Kingma & Ba 2014 (arXiv:1412.6980); Loshchilov & Hutter 2017 (arXiv:1711.05101).
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
  kEmaStep,       // of the last step: 1 - decay for ema_update, bias-corrected; 0 if there was no update
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
  double ema_decay = 0;  // of the average of weights, for kEmaStep
};

// Makes one update's numbers from what gradient_norm found: writes state.prepared for optimizer_step and kEmaStep for
// ema_update, counts the update, and moves the loss scale. If not_finite[0] is set, the update will leave everything
// as it is.
// Math: norm = sqrt(sum_of_squares) / loss_scale; gradient scale = min(1, max_norm / norm) / loss_scale.
// Shapes: sum_of_squares f64 [1], may be undefined without clipping; not_finite i32 [1], may be undefined: all finite.
// Cost: 1 launch of one thread, or no parallel region.
// Errors: std::invalid_argument if a shape or dtype differs, or an argument is out of range.
void optimizer_prepare(Context& context, const OptimizerArgs& args, const PrepareArgs& prepare,
                       const Tensor& sum_of_squares, const Tensor& not_finite, const OptimizerState& state);

// What a step does before its forward pass: takes the next update's learning rate, and the factor of the loss.
// Math: numbers[kLearningRate] = rates[numbers[kUpdates] + 1 - first[0]]; scale[0] = inverse_tokens[0] * loss_scale[0]
// (1 where there is no loss scale), in fp32. rates are those of the updates first, first + 1, ...: a window, of which a
// skipped update takes one fewer without the host's knowing. An update outside of the window takes the window's nearest
// rate: the host sees to it that this does not happen, by a window as long as the steps it is ahead.
// Shapes: rates f64 [1 or more]; first f64 [1], a whole number; inverse_tokens, scale f32 [1]. state.prepared is not
// looked at.
// Cost: 1 launch of one thread, or no parallel region.
// Errors: std::invalid_argument if a shape or dtype differs.
void optimizer_begin(Context& context, const Tensor& rates, const Tensor& first, const Tensor& inverse_tokens,
                     const OptimizerState& state, const Tensor& scale);

// Counts the updates that get lost: run before optimizer_step, with its arguments. Changes nothing but counts.
// Slice s are the elements from slice_ends[s - 1] (0 for the first) to slice_ends[s]. Adds to
//   counts[s, 0] the elements that the update would move: its last addend (lr m / (sqrt v + eps) with all corrections,
//     or SGD's lr m) is not zero in fp32, or the fp32 value that it makes is not the old one (AdamW's decay);
//   counts[s, 1] those of them that stay where they are, as the run keeps them. 16 bits alone (the stochastic
//     precisions, `nearest` or with the random numbers of this very step): the new 16-bit value is the old one. fp32,
//     master, residual: the new fp32 value is the old one.
// The numbers are those optimizer_step works with, bit for bit (one source of the arithmetic). NaN is never lost. With
// `prepared` that says that there is no update, nothing is counted. Counts of several steps add up; zero them first.
// Shapes: slice_ends i64 [slices], rising, the last at most the blocks' length (elements behind it are not counted, a
// slice's padding does not move); counts i64 [slices, 2].
// Cost: reads what optimizer_step reads; 1 launch, or 1 parallel region with a slice a task. Counts are whole numbers:
// the same on every device and number of threads.
// Errors: as optimizer_step; std::invalid_argument if slice_ends or counts have other shapes or dtypes, or (CPU) if
// slice_ends fall or end behind the blocks. A GPU cannot look: there such slices get some count or none.
void optimizer_swallowed(Context& context, const OptimizerArgs& args, const OptimizerStep& step,
                         const OptimizerBlocks& blocks, const Tensor& slice_ends, const Tensor& counts);

// Moves the exponential average of the weights towards the parameters' fp32 values: the master, both halves joined, or
// the 16-bit value.
// Math: ema += (1 - decay) * (p - ema), each operation in fp64 on its own, rounded to fp32 once: the same bits on every
// device. Equal values stay exact.
// With `numbers` (f64 [kOptimizerNumbers] in the device's memory, as optimizer_prepare left them) numbers[kEmaStep]
// takes the place of 1 - decay, and 0 there leaves the average as it is: the update was skipped. So neither this nor
// the bias correction, which depends on how many updates there were, waits for the host. (kEmaStep is the device's: its
// logarithm and exponential may differ from the host's in the last place.)
// Shapes: ema f32, of the blocks' length; of the blocks only parameters and master or residual are looked at.
// Cost: 1 launch or parallel region; reads the parameters' values and the average once, writes the average: 10 bytes a
// parameter (16 bits alone), else 12.
// Errors: std::invalid_argument if a shape or dtype differs, if decay is not in [0, 1], for an fp16 precision without a
// GPU, and for blocks that do not begin at a multiple of 16 bytes (GPU).
void ema_update(Context& context, double decay, const OptimizerBlocks& blocks, const Tensor& ema,
                const Tensor& numbers = {});

// Puts the average into the model (in) and takes it out again (not in), to compute with it in between. fp32 precision:
// the parameters and ema change places, both times. Others: the 16-bit parameters go to `aside`, and the average
// rounded to nearest even is put in their place; then `aside` comes back. Master and residual stay as they are.
// Shapes: ema f32, aside of the parameters' dtype (may be undefined for fp32), all of one length.
// Cost: 1 launch or parallel region; 16 bytes a parameter (fp32), else 10 in and 4 out.
// Errors: as ema_update.
void ema_exchange(Context& context, bool in, const OptimizerBlocks& blocks, const Tensor& ema, const Tensor& aside);

}  // namespace frit
