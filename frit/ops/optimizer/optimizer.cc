#include "frit/ops/optimizer/optimizer.h"

#include <cmath>
#include <cstring>

#include "frit/ops/optimizer/cpu.h"
#include "frit/ops/optimizer/gpu.h"

namespace frit {
namespace {

constexpr OptimizerKind kKinds[] = {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSgd};

void check_block(const char* name, const Tensor& block, DType dtype, const Tensor& parameters) {
  FRIT_CHECK(block.defined(), "[optimizer] {} is missing", name);
  FRIT_CHECK(block.dtype() == dtype && block.shape() == parameters.shape() && block.contiguous(),
             "[optimizer] {} is {}, expected contiguous {}{}", name, block.to_string(), name_of(dtype),
             parameters.shape().to_string());
}

void check_numbers(const char* name, const Tensor& t, DType dtype, int64_t count) {
  FRIT_CHECK(t.defined() && t.dtype() == dtype && t.numel() == count, "[optimizer] {} is {}, expected {}[{}]", name,
             t.to_string(), name_of(dtype), count);
}

void check_args(const OptimizerArgs& args) {
  FRIT_CHECK(args.weight_decay >= 0 && std::isfinite(args.weight_decay),
             "[optimizer] weight decay is {}, expected a finite number of at least 0", args.weight_decay);
  if (args.kind == OptimizerKind::kSgd) {
    FRIT_CHECK(args.momentum >= 0 && std::isfinite(args.momentum),
               "[optimizer] momentum is {}, expected a finite number of at least 0", args.momentum);
    return;
  }
  FRIT_CHECK(args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1,
             "[optimizer] beta1 and beta2 are {} and {}, expected 0 <= beta < 1", args.beta1, args.beta2);
  // Without it an element that never had a gradient, such as padding, would become 0 / 0.
  FRIT_CHECK(static_cast<float>(args.eps) > 0 && std::isfinite(args.eps),
             "[optimizer] eps is {}, expected a positive fp32 number", args.eps);
}

// The blocks that hold the parameters' values.
void check_values(const Context& context, const OptimizerBlocks& blocks) {
  const Tensor& p = blocks.parameters;
  const DType dtype = compute_dtype(blocks.precision);
  FRIT_CHECK(p.defined() && p.rank() == 1 && p.dtype() == dtype && p.contiguous(),
             "[optimizer] parameters are {}, expected contiguous {} of rank 1", p.to_string(), name_of(dtype));
  if (keeps_master(blocks.precision)) check_block("master", blocks.master, DType::kF32, p);
  if (blocks.precision == Precision::kBF16Residual) check_block("residual", blocks.residual, DType::kBF16, p);
  FRIT_CHECK(context.on_gpu() || dtype != DType::kF16, "[optimizer] {} needs a GPU", name_of(blocks.precision));
}

void check_aligned(const Context& context, std::initializer_list<const Tensor*> blocks) {
  if (!context.on_gpu()) return;
  for (const Tensor* block : blocks)
    FRIT_CHECK(!block->defined() || reinterpret_cast<uintptr_t>(block->raw()) % 16 == 0,
               "[optimizer] a block begins at address {}, expected a multiple of 16", block->raw());
}

// All blocks that an update reads.
void check_blocks(const Context& context, const OptimizerArgs& args, const OptimizerBlocks& blocks) {
  check_values(context, blocks);
  const Tensor& p = blocks.parameters;
  FRIT_CHECK(blocks.gradients.defined(), "[optimizer] there are no gradients: the workspace was made without training");
  check_block("gradients", blocks.gradients, blocks.gradients.dtype() == DType::kF32 ? DType::kF32 : p.dtype(), p);
  const bool adam = args.kind != OptimizerKind::kSgd;
  if (adam || args.momentum != 0) check_block("moment1", blocks.moment1, DType::kF32, p);
  if (adam) check_block("moment2", blocks.moment2, DType::kF32, p);
  check_aligned(context, {&p, &blocks.gradients, &blocks.moment1, &blocks.moment2, &blocks.master, &blocks.residual});
}

// The numbers of a step that brings its own; with `prepared` they are on the device.
OptimizerConstants constants_of(const OptimizerArgs& args, const OptimizerStep& step) {
  check_args(args);
  if (step.prepared.defined()) {
    check_numbers("prepared", step.prepared, DType::kF32, kOptimizerConstants);
    return {};
  }
  FRIT_CHECK(step.step >= 1, "[optimizer] step is {}, the first is 1", step.step);
  FRIT_CHECK(step.learning_rate >= 0 && std::isfinite(step.learning_rate),
             "[optimizer] learning rate is {}, expected a finite number of at least 0", step.learning_rate);
  return optimizer_constants(args, step.learning_rate, step.step, step.gradient_scale);
}
// On the CPU `prepared` can be read. False: there is no update.
bool read_prepared(const OptimizerStep& step, OptimizerConstants& constants) {
  if (step.prepared.defined()) std::memcpy(&constants, step.prepared.raw(), sizeof(constants));
  return constants.update != 0;
}

}  // namespace

const char* name_of(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdam:
      return "adam";
    case OptimizerKind::kAdamW:
      return "adamw";
    case OptimizerKind::kSgd:
      return "sgd";
  }
  return "?";
}

OptimizerKind parse_optimizer(std::string_view name) {
  for (OptimizerKind kind : kKinds)
    if (name == name_of(kind)) return kind;
  fail("[optimizer] unknown name {}, expected adam, adamw or sgd", name);
}

void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step,
                    const OptimizerBlocks& blocks, int64_t begin, int64_t end) {
  check_blocks(context, args, blocks);
  const int64_t n = blocks.parameters.numel();
  if (end < 0) end = n;
  FRIT_CHECK(0 <= begin && begin <= end && end <= n, "[optimizer] elements {} to {} of {}", begin, end, n);
  OptimizerConstants constants = constants_of(args, step);
  if (context.on_gpu()) return optimizer_step_gpu(context, args, constants, step.prepared, blocks, begin, end);
  if (context.planning() || !read_prepared(step, constants)) return;
  optimizer_step_cpu(context, args, constants, blocks, begin, end);
}

void optimizer_prepare(Context& context, const OptimizerArgs& args, const PrepareArgs& prepare,
                       const Tensor& sum_of_squares, const Tensor& not_finite, const OptimizerState& state) {
  check_args(args);
  FRIT_CHECK(prepare.max_norm >= 0, "[optimizer] the largest norm is {}, expected at least 0", prepare.max_norm);
  FRIT_CHECK(prepare.least_loss_scale > 0 && prepare.least_loss_scale <= prepare.largest_loss_scale &&
                 std::isfinite(prepare.largest_loss_scale),
             "[optimizer] the loss scale may go from {} to {}, expected positive and finite numbers, the least first",
             prepare.least_loss_scale, prepare.largest_loss_scale);
  FRIT_CHECK(prepare.ema_decay >= 0 && prepare.ema_decay < 1, "[optimizer] ema_decay is {}, expected 0 <= decay < 1",
             prepare.ema_decay);
  if (prepare.max_norm > 0 || sum_of_squares.defined()) check_numbers("sum_of_squares", sum_of_squares, DType::kF64, 1);
  if (not_finite.defined()) check_numbers("not_finite", not_finite, DType::kI32, 1);
  check_numbers("the state's numbers", state.numbers, DType::kF64, kOptimizerNumbers);
  if (state.loss_scale.defined()) check_numbers("loss_scale", state.loss_scale, DType::kF32, 1);
  check_numbers("prepared", state.prepared, DType::kF32, kOptimizerConstants);
  if (context.on_gpu()) return optimizer_prepare_gpu(context, args, prepare, sum_of_squares, not_finite, state);
  if (context.planning()) return;
  PreparedUpdate u;
  std::memcpy(u.numbers, state.numbers.raw(), sizeof(u.numbers));
  u.loss_scale = state.loss_scale.defined() ? state.loss_scale.data<float>()[0] : 1.0f;
  prepare_update(args, prepare, sum_of_squares.defined() ? sum_of_squares.data<double>()[0] : 0,
                 !not_finite.defined() || not_finite.data<int32_t>()[0] == 0, u);
  std::memcpy(state.numbers.raw(), u.numbers, sizeof(u.numbers));
  if (state.loss_scale.defined()) state.loss_scale.data<float>()[0] = u.loss_scale;
  std::memcpy(state.prepared.raw(), &u.constants, sizeof(u.constants));
}

void optimizer_begin(Context& context, const Tensor& rates, const Tensor& first, const Tensor& inverse_tokens,
                     const OptimizerState& state, const Tensor& scale) {
  FRIT_CHECK(
      rates.defined() && rates.dtype() == DType::kF64 && rates.rank() == 1 && rates.numel() > 0 && rates.contiguous(),
      "[optimizer] rates are {}, expected f64 of rank 1, one rate or more", rates.to_string());
  check_numbers("first", first, DType::kF64, 1);
  check_numbers("inverse_tokens", inverse_tokens, DType::kF32, 1);
  check_numbers("the state's numbers", state.numbers, DType::kF64, kOptimizerNumbers);
  if (state.loss_scale.defined()) check_numbers("loss_scale", state.loss_scale, DType::kF32, 1);
  check_numbers("scale", scale, DType::kF32, 1);
  if (context.on_gpu()) return optimizer_begin_gpu(context, rates, first, inverse_tokens, state, scale);
  if (context.planning()) return;
  double* numbers = state.numbers.data<double>();
  numbers[kLearningRate] = rates.data<double>()[rate_index(numbers[kUpdates], first.data<double>()[0], rates.numel())];
  scale.data<float>()[0] =
      inverse_tokens.data<float>()[0] * (state.loss_scale.defined() ? state.loss_scale.data<float>()[0] : 1.0f);
}

void optimizer_swallowed(Context& context, const OptimizerArgs& args, const OptimizerStep& step,
                         const OptimizerBlocks& blocks, const Tensor& slice_ends, const Tensor& counts) {
  check_blocks(context, args, blocks);
  FRIT_CHECK(
      slice_ends.defined() && slice_ends.dtype() == DType::kI64 && slice_ends.rank() == 1 && slice_ends.contiguous(),
      "[optimizer] slice_ends are {}, expected contiguous i64 of rank 1", slice_ends.to_string());
  const int64_t slices = slice_ends.numel(), n = blocks.parameters.numel();
  FRIT_CHECK(
      counts.defined() && counts.dtype() == DType::kI64 && counts.shape() == Shape({slices, 2}) && counts.contiguous(),
      "[optimizer] counts are {}, expected contiguous i64[{}, 2]", counts.to_string(), slices);
  OptimizerConstants constants = constants_of(args, step);
  if (context.on_gpu())
    return optimizer_swallowed_gpu(context, args, constants, step.prepared, blocks, slice_ends, counts);
  if (context.planning()) return;
  for (int64_t s = 0, before = 0; s < slices; ++s) {
    const int64_t end = slice_ends.data<int64_t>()[s];
    FRIT_CHECK(before <= end && end <= n, "[optimizer] slice {} is of the elements {} to {} of {}", s, before, end, n);
    before = end;
  }
  if (!read_prepared(step, constants)) return;
  optimizer_swallowed_cpu(context, args, constants, blocks, slice_ends, counts);
}

void ema_update(Context& context, double decay, const OptimizerBlocks& blocks, const Tensor& ema,
                const Tensor& numbers) {
  check_values(context, blocks);
  check_block("ema", ema, DType::kF32, blocks.parameters);
  check_aligned(context, {&blocks.parameters, &blocks.master, &blocks.residual, &ema});
  FRIT_CHECK(decay >= 0 && decay <= 1, "[optimizer] the average's decay is {}, expected 0 to 1", decay);
  if (numbers.defined()) check_numbers("the state's numbers", numbers, DType::kF64, kOptimizerNumbers);
  if (context.on_gpu()) return ema_update_gpu(context, 1 - decay, blocks, ema, numbers);
  if (context.planning()) return;
  const double step = numbers.defined() ? numbers.data<double>()[kEmaStep] : 1 - decay;
  if (step != 0) ema_update_cpu(context, step, blocks, ema);
}

void ema_exchange(Context& context, bool in, const OptimizerBlocks& blocks, const Tensor& ema, const Tensor& aside) {
  check_values(context, blocks);
  const Tensor& p = blocks.parameters;
  check_block("ema", ema, DType::kF32, p);
  if (p.dtype() != DType::kF32) check_block("aside", aside, p.dtype(), p);
  check_aligned(context, {&p, &ema, &aside});
  if (context.on_gpu()) return ema_exchange_gpu(context, in, blocks, ema, aside);
  if (context.planning()) return;
  ema_exchange_cpu(context, in, blocks, ema, aside);
}

void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step, Workspace& workspace,
                    int64_t begin, int64_t end) {
  const OptimizerBlocks blocks{workspace.precision(), workspace.parameters(), workspace.gradients(),
                               workspace.moment1(),   workspace.moment2(),    workspace.master(),
                               workspace.residual()};
  optimizer_step(context, args, step, blocks, begin, end);
}

}  // namespace frit
