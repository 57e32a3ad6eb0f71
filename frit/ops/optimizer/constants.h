// The arithmetic of one update's numbers, for host and device.
#pragma once
#include <cmath>
#include <cstdint>

#include "frit/ops/optimizer/optimizer.h"

namespace frit {

// The numbers of one update, rounded to fp32 once. Elements past decay_end take 0 and 1 for the two of weight decay.
struct alignas(16) OptimizerConstants {
  float gradient_scale, weight_decay_l2, weight_keep;                     // L2 factor; AdamW's 1 - lr * weight_decay
  float one_minus_beta1, beta1, beta2, one_minus_beta2, bias2_sqrt, eps;  // Adam
  float minus_step_size;                                                  // -lr / (1 - beta1^step), or SGD's -lr
  float momentum;                                                         // SGD
  uint32_t lerp_from_gradient;  // 1 - beta1 >= 0.5: m is reckoned from g's side, which is exact at beta1 == 0
  uint32_t update;              // 0: leave everything as it is
  uint32_t step;                // of the rounding's key
  uint32_t nearest;             // OptimizerArgs::nearest
  uint32_t unused;
};
static_assert(sizeof(OptimizerConstants) == kOptimizerConstants * sizeof(float));

// On a device the power may differ from the host's in its last place of fp64: the constants are the same but where that
// moves a rounding to fp32.
FRIT_HOST_DEVICE inline OptimizerConstants optimizer_constants(const OptimizerArgs& args, double learning_rate,
                                                               int64_t step, float gradient_scale) {
  const bool adam = args.kind != OptimizerKind::kSgd, decoupled = args.kind == OptimizerKind::kAdamW;
  const double bias1 = adam ? 1 - pow(args.beta1, static_cast<double>(step)) : 1;
  const double bias2 = adam ? 1 - pow(args.beta2, static_cast<double>(step)) : 1;
  OptimizerConstants c = {};
  c.gradient_scale = gradient_scale;
  c.weight_decay_l2 = static_cast<float>(decoupled ? 0 : args.weight_decay);
  c.weight_keep = static_cast<float>(decoupled ? 1 - learning_rate * args.weight_decay : 1);
  c.one_minus_beta1 = static_cast<float>(1 - args.beta1);
  c.beta1 = static_cast<float>(args.beta1);
  c.beta2 = static_cast<float>(args.beta2);
  c.one_minus_beta2 = static_cast<float>(1 - args.beta2);
  c.bias2_sqrt = static_cast<float>(sqrt(bias2));
  c.eps = static_cast<float>(args.eps);
  c.minus_step_size = static_cast<float>(-learning_rate / bias1);
  c.momentum = static_cast<float>(args.momentum);
  c.lerp_from_gradient = 1 - args.beta1 >= 0.5;
  c.update = 1;
  c.step = static_cast<uint32_t>(step);
  c.nearest = args.nearest;
  return c;
}

// Where the rate of the update after `updates` stands among `count` rates from update `first` on: at the nearest end
// if it is not among them.
FRIT_HOST_DEVICE inline int64_t rate_index(double updates, double first, int64_t count) {
  const double at = updates + 1 - first, last = static_cast<double>(count - 1);
  return at > 0 ? static_cast<int64_t>(at < last ? at : last) : 0;  // NaN: 0
}

// 1 - d_t of update t: what ema_update moves the average by. d_t = d (1 - d^(t-1)) / (1 - d^t), so that the average is
// sum_i d^(t-i) p_i / sum_i d^(t-i); d_1 = 0.
FRIT_HOST_DEVICE inline double ema_step(double decay, double t) {
  if (decay == 0 || t <= 1) return 1;
  const double log_decay = log(decay);
  // expm1 keeps the quotient exact for decays near 1, where 1 - d^t loses its digits.
  return 1 - decay * expm1((t - 1) * log_decay) / expm1(t * log_decay);
}

// What optimizer_prepare reads and writes, as numbers.
struct PreparedUpdate {
  double numbers[kOptimizerNumbers];
  float loss_scale;
  OptimizerConstants constants;
};
FRIT_HOST_DEVICE inline void prepare_update(const OptimizerArgs& args, const PrepareArgs& prepare,
                                            double sum_of_squares, bool finite, PreparedUpdate& u) {
  const double scale = u.loss_scale, norm = sqrt(sum_of_squares) / scale;
  u.numbers[kGradientNorm] = norm;
  if (finite) {
    u.numbers[kUpdates] += 1;
    u.numbers[kFinite] += 1;
    u.numbers[kEmaStep] = ema_step(prepare.ema_decay, u.numbers[kUpdates]);
    const double clip = prepare.max_norm > 0 && norm > prepare.max_norm ? prepare.max_norm / norm : 1;
    u.constants = optimizer_constants(args, u.numbers[kLearningRate], static_cast<int64_t>(u.numbers[kUpdates]),
                                      static_cast<float>(clip / scale));
  } else {
    u.numbers[kSkipped] += 1;
    u.numbers[kEmaStep] = 0;
    u.constants = {};
  }
  if (prepare.growth_interval <= 0) return;
  const float changed = !finite                                                              ? u.loss_scale / 2
                        : u.numbers[kFinite] >= static_cast<double>(prepare.growth_interval) ? u.loss_scale * 2
                                                                                             : u.loss_scale;
  if (changed == u.loss_scale) return;
  u.numbers[kFinite] = 0;
  if (changed >= prepare.least_loss_scale && changed <= prepare.largest_loss_scale) u.loss_scale = changed;
}

}  // namespace frit
