// One training step over a Transformer: planned memory, forward and backward of micro-batches, and the update.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frit/backend/context.h"
#include "frit/data/batch.h"
#include "frit/memory/planner.h"
#include "frit/models/transformer/transformer.h"
#include "frit/ops/optimizer/optimizer.h"

namespace frit {

struct StepSettings {
  CriterionOptions criterion;  // chunk_rows is rounded up to a multiple of kPlanTokens
  bool recompute = false;
  OptimizerArgs optimizer;
  double clip_norm = 0;   // 0: no clipping
  uint32_t seed = 1;      // of dropout; OptimizerArgs::seed is that of stochastic rounding
  std::string attention;  // forced implementations; empty: chosen
  std::string gemm;
};

// Numbers of tokens are rounded up to a multiple of this for planning: one plan serves all batches of a key.
constexpr int64_t kPlanTokens = 256;

// What an update did.
struct UpdateResult {
  bool finite = true;    // false: the gradient was not, and nothing was changed
  double grad_norm = 0;  // before clipping
};

// Runs steps from static plans. Each key (source tokens, target tokens, both rounded up) is recorded once, in planning
// mode; afterwards its steps allocate nothing. The arena serves all plans; it grows only when a new key needs more,
// which on_grow hears of. One thread drives it.
// Materialised attention, if it is forced, takes scratch by the lengths of sentences, which no key holds: its steps
// take their temporaries from the heap (see planned()).
class TrainingStep {
 public:
  enum class Kind : uint8_t { kTrain, kEvaluate };

  // model and pool must outlive this.
  TrainingStep(Transformer& model, ThreadPool& pool, const StepSettings& settings);

  // False: steps run without plans.
  bool planned() const { return settings_.attention != "materialised"; }
  // The plan for batches of these sizes, recorded if its key is new. Errors: frit::Error if steps are not planned.
  const Plan& plan(Kind kind, int64_t source_tokens, int64_t target_tokens);
  // The lifetimes behind such a plan: names, sizes, births and deaths. Errors: as plan().
  std::vector<Lifetime> record(Kind kind, int64_t source_tokens, int64_t target_tokens);
  // Makes the arena large enough for every plan so far.
  void reserve();
  // The largest sum of sizes alive at one time, and the sum of all sizes, over the plans so far.
  size_t lower_bound() const { return lower_bound_; }
  size_t total() const { return total_; }
  size_t peak() const { return peak_; }
  size_t arena_bytes() const { return memory_.arena_bytes(); }
  int64_t plans() const { return static_cast<int64_t>(plans_.size()); }

  // Forward and backward of one micro-batch. The gradients are those of the mean loss over step_tokens target tokens.
  // `attempt` counts updates tried, skipped ones included: with `stream`, the micro-batch, it decides the dropout
  // masks.
  Loss forward_backward(const Batch& batch, int64_t step_tokens, int64_t attempt, int64_t stream);
  // Updates the parameters from the gradients. step: 1 for the first update.
  UpdateResult update(double learning_rate, int64_t step);
  // Loss without dropout and smoothing.
  Loss evaluate(const Batch& batch);
  // Sum of squares of a block of the workspace, f32 or bf16: not finite if one of its elements is not.
  double sum_of_squares(const Tensor& block);

  // Time between forward's end and backward's begin of the last forward_backward.
  std::chrono::steady_clock::time_point backward_begun() const { return backward_begun_; }

  // Called with the old and new size when the arena grows after reserve().
  std::function<void(size_t before, size_t after)> on_grow;
  Context& context() { return context_; }

 private:
  using Key = std::pair<Kind, std::pair<int64_t, int64_t>>;
  const Plan* ready(Kind kind, const Batch& batch);
  void note(const Plan& plan);
  StepOptions step_options(bool accumulate);

  Transformer& model_;
  StepSettings settings_;
  Memory memory_;
  Context context_;
  std::map<Key, Plan> plans_;
  Plan update_plan_;
  size_t peak_ = 0, lower_bound_ = 0, total_ = 0;
  float scale_ = 0;
  double squares_ = 0;
  int32_t not_finite_ = 0;
  std::chrono::steady_clock::time_point backward_begun_;
};

}  // namespace frit
