#include "frit/train/step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "frit/ops/gradient_norm/gradient_norm.h"

namespace frit {
namespace {

int64_t round_up_tokens(int64_t tokens) {
  return std::max<int64_t>(1, (tokens + kPlanTokens - 1) / kPlanTokens) * kPlanTokens;
}

// Replays a plan, if there is one, for as long as it lives. finish() tells of tensors that outlived the plan; after an
// exception nothing more is told.
class Replay {
 public:
  Replay(Memory& memory, const Plan* plan) : memory_(memory), open_(plan != nullptr) {
    if (plan) memory_.begin_replay(*plan);
  }
  ~Replay() {
    if (open_) try {
        memory_.end_replay();
      } catch (const std::logic_error&) {  // what unwinds already is the cause
      }
  }
  void finish() {
    if (std::exchange(open_, false)) memory_.end_replay();
  }

 private:
  Memory& memory_;
  bool open_;
};

}  // namespace

TrainingStep::TrainingStep(Transformer& model, ThreadPool& pool, const StepSettings& settings)
    : model_(model), settings_(settings), context_(pool, memory_) {
  // A plan has one product after the other for each chunk of rows: all batches of a key must have as many chunks.
  if (settings_.criterion.chunk_rows > 0)
    settings_.criterion.chunk_rows = round_up_tokens(settings_.criterion.chunk_rows);
  if (!settings_.attention.empty()) context_.force("attention", settings_.attention);
  if (!settings_.gemm.empty()) context_.force("gemm", settings_.gemm);
  if (!model_.workspace().training()) return;
  memory_.begin_recording();
  gradient_norm(context_, model_.workspace().gradients(), Tensor(&squares_, DType::kF64, {1}),
                Tensor(&not_finite_, DType::kI32, {1}));
  optimizer_step(context_, settings_.optimizer, {.learning_rate = 1, .step = 1, .gradient_scale = 1},
                 model_.workspace());
  update_plan_ = plan_memory(memory_.end_recording());
  note(update_plan_);
}

StepOptions TrainingStep::step_options(bool accumulate) {
  StepOptions options;
  options.criterion = settings_.criterion;
  options.accumulate = accumulate;
  options.recompute = settings_.recompute;
  options.backward_begun = &backward_begun_;
  return options;
}

std::vector<Lifetime> TrainingStep::record(Kind kind, int64_t source_tokens, int64_t target_tokens) {
  if (!planned())
    fail(
        "[train] materialised attention takes scratch by the lengths of sentences, so that its steps cannot be planned "
        "from numbers of tokens: expected run.attention to be flash or empty");
  const int64_t source = round_up_tokens(source_tokens), target = round_up_tokens(target_tokens);
  const BatchView batch = BatchView::planned(1, source, target);
  memory_.begin_recording();
  try {
    if (kind == Kind::kTrain) {
      model_.train_step(context_, batch, Tensor(&scale_, DType::kF32, {1}), step_options(false));
    } else {
      CriterionOptions criterion = settings_.criterion;
      criterion.smoothing = 0;
      model_.evaluate(context_, batch, criterion);
    }
  } catch (...) {
    memory_.end_recording();
    throw;
  }
  return memory_.end_recording();
}

const Plan& TrainingStep::plan(Kind kind, int64_t source_tokens, int64_t target_tokens) {
  const Key key{kind, {round_up_tokens(source_tokens), round_up_tokens(target_tokens)}};
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  const Plan& made = plans_.emplace(key, plan_memory(record(kind, source_tokens, target_tokens))).first->second;
  note(made);
  return made;
}

void TrainingStep::note(const Plan& plan) {
  peak_ = std::max(peak_, plan.peak);
  lower_bound_ = std::max(lower_bound_, plan.lower_bound);
  total_ = std::max(total_, plan.total);
}

void TrainingStep::reserve() {
  memory_.reserve(peak_);
}

const Plan* TrainingStep::ready(Kind kind, const Batch& batch) {
  if (!planned()) return nullptr;
  const Plan& found = plan(kind, batch.source_tokens(), batch.target_tokens());
  if (found.peak > memory_.arena_bytes()) {
    const size_t before = memory_.arena_bytes();
    reserve();
    if (before > 0 && on_grow) on_grow(before, memory_.arena_bytes());
  }
  return &found;
}

Loss TrainingStep::forward_backward(const Batch& batch, int64_t step_tokens, int64_t attempt, int64_t stream) {
  FRIT_CHECK(step_tokens > 0, "[train] a step of {} target tokens, expected 1 or more", step_tokens);
  scale_ = static_cast<float>(1.0 / static_cast<double>(step_tokens));
  context_.set_random(settings_.seed, static_cast<uint32_t>(attempt), static_cast<uint32_t>(stream));
  Replay replay(memory_, ready(Kind::kTrain, batch));
  const Loss loss =
      model_.train_step(context_, BatchView::of(batch), Tensor(&scale_, DType::kF32, {1}), step_options(stream > 0));
  replay.finish();
  return loss;
}

UpdateResult TrainingStep::update(double learning_rate, int64_t step) {
  Replay replay(memory_, &update_plan_);
  model_.hold_pad_row(context_);
  gradient_norm(context_, model_.workspace().gradients(), Tensor(&squares_, DType::kF64, {1}),
                Tensor(&not_finite_, DType::kI32, {1}));
  UpdateResult result;
  result.grad_norm = std::sqrt(squares_);
  result.finite = not_finite_ == 0;
  if (result.finite) {
    const bool clip = settings_.clip_norm > 0 && result.grad_norm > settings_.clip_norm;
    const float scale = clip ? static_cast<float>(settings_.clip_norm / result.grad_norm) : 1.0f;
    optimizer_step(context_, settings_.optimizer,
                   {.learning_rate = learning_rate, .step = step, .gradient_scale = scale}, model_.workspace());
  }
  replay.finish();
  return result;
}

Loss TrainingStep::evaluate(const Batch& batch) {
  CriterionOptions criterion = settings_.criterion;
  criterion.smoothing = 0;
  Replay replay(memory_, ready(Kind::kEvaluate, batch));
  const Loss loss = model_.evaluate(context_, BatchView::of(batch), criterion);
  replay.finish();
  return loss;
}

double TrainingStep::sum_of_squares(const Tensor& block) {
  double squares = 0;
  int32_t not_finite = 0;
  Replay replay(memory_, &update_plan_);  // the norm's scratch depends on the number of elements alone
  gradient_norm(context_, block, Tensor(&squares, DType::kF64, {1}), Tensor(&not_finite, DType::kI32, {1}));
  replay.finish();
  return squares;
}

}  // namespace frit
