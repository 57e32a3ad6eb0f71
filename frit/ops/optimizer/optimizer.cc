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
  const Tensor& p = blocks.parameters;
  const DType dtype = compute_dtype(blocks.precision);
  FRIT_CHECK(p.defined() && p.rank() == 1 && p.dtype() == dtype && p.contiguous(),
             "[optimizer] parameters are {}, expected contiguous {} of rank 1", p.to_string(), name_of(dtype));
  FRIT_CHECK(blocks.gradients.defined(), "[optimizer] there are no gradients: the workspace was made without training");
  check_block("gradients", blocks.gradients, blocks.gradients.dtype() == DType::kF32 ? DType::kF32 : dtype, p);
  const bool adam = args.kind != OptimizerKind::kSgd;
  if (adam || args.momentum != 0) check_block("moment1", blocks.moment1, DType::kF32, p);
  if (adam) check_block("moment2", blocks.moment2, DType::kF32, p);
  if (keeps_master(blocks.precision)) check_block("master", blocks.master, DType::kF32, p);
  if (blocks.precision == Precision::kBF16Residual) check_block("residual", blocks.residual, DType::kBF16, p);
  FRIT_CHECK(context.on_gpu() || dtype != DType::kF16, "[optimizer] {} needs a GPU", name_of(blocks.precision));
  if (context.on_gpu())
    for (const Tensor* block :
         {&p, &blocks.gradients, &blocks.moment1, &blocks.moment2, &blocks.master, &blocks.residual})
      FRIT_CHECK(!block->defined() || reinterpret_cast<uintptr_t>(block->raw()) % 16 == 0,
                 "[optimizer] a block begins at address {}, expected a multiple of 16", block->raw());
  if (end < 0) end = p.numel();
  FRIT_CHECK(0 <= begin && begin <= end && end <= p.numel(), "[optimizer] elements {} to {} of {}", begin, end,
             p.numel());
  check_args(args);
  OptimizerConstants constants = {};
  if (step.prepared.defined()) {
    check_numbers("prepared", step.prepared, DType::kF32, kOptimizerConstants);
  } else {
    FRIT_CHECK(step.step >= 1, "[optimizer] step is {}, the first is 1", step.step);
    FRIT_CHECK(step.learning_rate >= 0 && std::isfinite(step.learning_rate),
               "[optimizer] learning rate is {}, expected a finite number of at least 0", step.learning_rate);
    constants = optimizer_constants(args, step.learning_rate, step.step, step.gradient_scale);
  }
  if (context.on_gpu()) return optimizer_step_gpu(context, args, constants, step.prepared, blocks, begin, end);
  if (context.planning()) return;
  if (step.prepared.defined()) {
    std::memcpy(&constants, step.prepared.raw(), sizeof(constants));
    if (!constants.update) return;
  }
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

void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step, Workspace& workspace,
                    int64_t begin, int64_t end) {
  const OptimizerBlocks blocks{workspace.precision(), workspace.parameters(), workspace.gradients(),
                               workspace.moment1(),   workspace.moment2(),    workspace.master(),
                               workspace.residual()};
  optimizer_step(context, args, step, blocks, begin, end);
}

}  // namespace frit
