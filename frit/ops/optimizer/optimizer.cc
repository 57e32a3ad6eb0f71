#include "frit/ops/optimizer/optimizer.h"

#include <cmath>

#include "frit/ops/optimizer/cpu.h"

namespace frit {
namespace {

constexpr OptimizerKind kKinds[] = {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSgd};

void check_block(const char* name, const Tensor& block, DType dtype, const Tensor& parameters) {
  FRIT_CHECK(block.defined(), "[optimizer] {} is missing", name);
  FRIT_CHECK(block.dtype() == dtype && block.shape() == parameters.shape() && block.contiguous(),
             "[optimizer] {} is {}, expected contiguous {}{}", name, block.to_string(), name_of(dtype),
             parameters.shape().to_string());
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
  if (blocks.precision == Precision::kBF16Master) check_block("master", blocks.master, DType::kF32, p);
  if (blocks.precision == Precision::kBF16Residual) check_block("residual", blocks.residual, DType::kBF16, p);
  if (end < 0) end = p.numel();
  FRIT_CHECK(0 <= begin && begin <= end && end <= p.numel(), "[optimizer] elements {} to {} of {}", begin, end,
             p.numel());
  FRIT_CHECK(step.step >= 1, "[optimizer] step is {}, the first is 1", step.step);
  FRIT_CHECK(step.learning_rate >= 0 && std::isfinite(step.learning_rate),
             "[optimizer] learning rate is {}, expected a finite number of at least 0", step.learning_rate);
  FRIT_CHECK(args.weight_decay >= 0 && std::isfinite(args.weight_decay),
             "[optimizer] weight decay is {}, expected a finite number of at least 0", args.weight_decay);
  if (adam) {
    FRIT_CHECK(args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1,
               "[optimizer] beta1 and beta2 are {} and {}, expected 0 <= beta < 1", args.beta1, args.beta2);
    // Without it an element that never had a gradient, such as padding, would become 0 / 0.
    FRIT_CHECK(static_cast<float>(args.eps) > 0 && std::isfinite(args.eps),
               "[optimizer] eps is {}, expected a positive fp32 number", args.eps);
  } else {
    FRIT_CHECK(args.momentum >= 0 && std::isfinite(args.momentum),
               "[optimizer] momentum is {}, expected a finite number of at least 0", args.momentum);
  }
  if (context.planning()) return;
  optimizer_step_cpu(context, args, step, blocks, begin, end);
}

void optimizer_step(Context& context, const OptimizerArgs& args, const OptimizerStep& step, Workspace& workspace,
                    int64_t begin, int64_t end) {
  const OptimizerBlocks blocks{workspace.precision(), workspace.parameters(), workspace.gradients(),
                               workspace.moment1(),   workspace.moment2(),    workspace.master(),
                               workspace.residual()};
  optimizer_step(context, args, step, blocks, begin, end);
}

}  // namespace frit
