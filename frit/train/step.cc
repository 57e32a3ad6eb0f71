#include "frit/train/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>

#include "frit/ops/attention/attention.h"
#include "frit/ops/gradient_norm/gradient_norm.h"

namespace frit {
namespace {

using Clock = std::chrono::steady_clock;

int64_t round_up_tokens(int64_t tokens) {
  return std::max<int64_t>(1, (tokens + kPlanTokens - 1) / kPlanTokens) * kPlanTokens;
}

// Replays a plan for as long as it lives. finish() tells of tensors that outlived the plan; after an exception nothing
// more is told.
class Replay {
 public:
  // Without a plan temporaries come from the heap.
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

// Waits without a call that the GPU's run time would have to serve at once.
void wait_for(GpuEvent& event) {
  while (!event.done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

constexpr std::string_view kOperators[] = {
#define FRIT_OP(op, gradient, gpu) #op,
#include "frit/ops/OPS.def"
#undef FRIT_OP
};

constexpr int64_t kRates = 2 * TrainingStep::kAhead;

}  // namespace

// One update on the way: what it found, and when. On a GPU `numbers` is pinned memory that is written at the end of the
// update.
struct TrainingStep::Slot {
  struct Numbers {
    double totals[3];
    double state[kOptimizerNumbers];
    float loss_scale;
  };
  Numbers host;
  Numbers* numbers = &host;
  PinnedBlock pinned;  // Numbers, then the header that begin() uploads
  double* header = nullptr;
  int64_t attempt = 0;
  enum Point { kBegin, kForward, kBackward, kDone, kPoints };
  std::array<std::unique_ptr<GpuEvent>, kPoints> events;
  std::array<Clock::time_point, kPoints> times;

  void mark(Point point) {
    if (events[point])
      events[point]->record();
    else
      times[point] = Clock::now();
  }
  // From the end of another update to the end of this one.
  double since(const Slot& other) const {
    if (events[kDone]) return events[kDone]->milliseconds_since(*other.events[kDone]);
    return 1e3 * std::chrono::duration<double>(times[kDone] - other.times[kDone]).count();
  }
  double between(Point from, Point to) const {
    if (events[from]) return events[to]->milliseconds_since(*events[from]);
    return 1e3 * std::chrono::duration<double>(times[to] - times[from]).count();
  }
};

// Pinned memory that a batch is copied from.
struct TrainingStep::Staging {
  PinnedBlock block;
  std::unique_ptr<GpuEvent> copied;
};

TrainingStep::TrainingStep(Transformer& model, ThreadPool& pool, const StepSettings& settings, Gpu* gpu)
    : model_(model), settings_(settings), gpu_(gpu), memory_(gpu), context_(pool, memory_, gpu) {
  // A plan has one product after the other for each chunk of rows: all batches of a key must have as many chunks.
  if (settings_.criterion.chunk_rows > 0)
    settings_.criterion.chunk_rows = round_up_tokens(settings_.criterion.chunk_rows);
  if (!settings_.attention.empty()) context_.force("attention", settings_.attention);
  const TransformerConfig& sizes = model_.config();
  short_attention_ = (settings_.attention.empty() || settings_.attention == "short") &&
                     attention_short_takes(sizes.d_model / sizes.encoder_heads) &&
                     attention_short_takes(sizes.d_model / sizes.decoder_heads);
  if (!settings_.gemm.empty()) context_.force("gemm", settings_.gemm);
  if (!settings_.bias_gradient.empty()) context_.force("bias_gradient", settings_.bias_gradient);
  if (!settings_.fused_norm)
    for (const char* direction : {"bias_dropout_residual_norm_forward", "bias_dropout_residual_norm_backward"})
      context_.force(direction, "apart");

  constexpr size_t kScalarBytes = 16 * kAlignment;
  scalars_ = allocate_block(kScalarBytes, gpu_);
  rates_ = scalar(DType::kF64, kRates), first_ = scalar(DType::kF64, 1), inverse_tokens_ = scalar(DType::kF32, 1);
  scale_ = scalar(DType::kF32, 1), totals_ = scalar(DType::kF64, 3), evaluation_ = scalar(DType::kF64, 3);
  squares_ = scalar(DType::kF64, 1), not_finite_ = scalar(DType::kI32, 1);
  state_.numbers = scalar(DType::kF64, kOptimizerNumbers), state_.loss_scale = scalar(DType::kF32, 1);
  state_.prepared = scalar(DType::kF32, kOptimizerConstants);
  const Workspace& w = model_.workspace();
  if (!w.training()) return;
  set_numbers({.updates = 0, .finite = 0, .loss_scale = settings_.loss_scale});
  for (int i = 0; i <= kAhead; ++i) {  // one more, so that the update before the oldest is still known
    Slot& slot = *slots_.emplace_back(std::make_unique<Slot>());
    if (!gpu_) continue;
    slot.pinned = gpu_->allocate_pinned(2 * kAlignment + kScalarBytes);
    slot.numbers = new (slot.pinned.get()) Slot::Numbers();
    slot.header = reinterpret_cast<double*>(slot.pinned.get() + 2 * kAlignment);
    for (auto& event : slot.events) event = gpu_->make_event();
  }
  static_assert(sizeof(Slot::Numbers) <= 2 * kAlignment);
  if (gpu_)
    for (int i = 0; i < kAhead; ++i) staging_.push_back(std::make_unique<Staging>());
  // A block of zeros.
  const auto block = [&](Block& owned, DType dtype, Shape shape) {
    const auto bytes = static_cast<size_t>(shape.numel() * size_of(dtype));
    owned = allocate_block(bytes, gpu_);
    if (gpu_) {
      gpu_->born(owned.get(), bytes, dtype), born_.push_back(owned.get());
      gpu_->fill(owned.get(), 0, bytes);
    } else {
      std::memset(owned.get(), 0, bytes);
    }
    return Tensor(owned.get(), dtype, shape, context_.device());
  };
  const int64_t elements = w.layout().elements();
  if (settings_.ema_decay > 0) {
    ema_ = block(ema_block_, DType::kF32, {elements});
    if (w.precision() != Precision::kF32) aside_ = block(aside_block_, compute_dtype(w.precision()), {elements});
  }
  if (settings_.count_swallowed) {
    std::vector<int64_t> ends;
    for (const auto& slice : w.layout().slices()) ends.push_back(slice.offset + slice.shape.numel());
    const auto slices = static_cast<int64_t>(ends.size());
    slice_ends_ = block(slice_ends_block_, DType::kI64, {slices});
    swallowed_ = block(swallowed_block_, DType::kI64, {slices, 2});
    to_device(slice_ends_, ends.data());
  }
  memory_.begin_recording();
  gradient_norm(context_, w.gradients(), squares_, not_finite_);
  optimizer_prepare(context_, settings_.optimizer, settings_.prepare, squares_, not_finite_, state_);
  if (swallowed_.defined())
    optimizer_swallowed(context_, settings_.optimizer, {.prepared = state_.prepared}, blocks(), slice_ends_,
                        swallowed_);
  optimizer_step(context_, settings_.optimizer, {.prepared = state_.prepared}, model_.workspace());
  update_plan_ = plan_memory(memory_.end_recording());
  note(update_plan_);
}

TrainingStep::~TrainingStep() {
  if (!gpu_) return;
  try {
    gpu_->synchronize();             // what is on the way uses memory that goes now
  } catch (const std::exception&) {  // it was or will be told where results are read
  }
  for (void* p : born_) gpu_->died(p);
  if (inputs_) gpu_->died(inputs_.get());
}

// The next piece of scalars_, zeroed.
Tensor TrainingStep::scalar(DType dtype, int64_t count) {
  char* at = scalars_.get() + scalars_used_;
  const auto bytes = static_cast<size_t>(count * size_of(dtype));
  scalars_used_ += align_up(bytes);
  if (gpu_) {
    gpu_->born(at, bytes, dtype), born_.push_back(at);
    gpu_->fill(at, 0, bytes);
  } else {
    std::memset(at, 0, bytes);
  }
  return Tensor(at, dtype, {count}, context_.device());
}

void TrainingStep::to_device(const Tensor& to, const void* from) {
  const auto bytes = static_cast<size_t>(to.bytes());
  if (gpu_)
    gpu_->upload(to.raw(), from, bytes);
  else
    std::memcpy(to.raw(), from, bytes);
}
void TrainingStep::from_device(void* to, const Tensor& from) {
  const auto bytes = static_cast<size_t>(from.bytes());
  if (gpu_)
    gpu_->download(to, from.raw(), bytes);
  else
    std::memcpy(to, from.raw(), bytes);
}

OptimizerBlocks TrainingStep::blocks() const {
  const Workspace& w = model_.workspace();
  return {w.precision(), w.parameters(), w.gradients(), w.moment1(), w.moment2(), w.master(), w.residual()};
}

StepOptions TrainingStep::step_options(bool accumulate) {
  StepOptions options;
  options.criterion = settings_.criterion;
  options.accumulate = accumulate;
  options.recompute = settings_.recompute;
  return options;
}

BatchSize TrainingStep::batch_size(const Batch& batch) {
  return {batch.source_tokens(), batch.target_tokens(), batch.sentences(), BatchView::longest(batch.source_offsets),
          BatchView::longest(batch.target_offsets)};
}

TrainingStep::Extent TrainingStep::extent_of(const BatchSize& size) const {
  Extent extent{round_up_tokens(size.source_tokens), round_up_tokens(size.target_tokens)};
  if (!gpu_ || (short_attention_ && std::max(size.longest_source, size.longest_target) <= kAttentionShortLongest))
    return extent;
  const auto longest = [](int64_t length) {
    return attention_rounded(std::max<int64_t>(length, 1), kAttentionLengthStep);
  };
  extent.sequences = attention_rounded(std::max<int64_t>(size.sentences, 1), kAttentionSequenceStep);
  extent.longest_source = longest(size.longest_source), extent.longest_target = longest(size.longest_target);
  return extent;
}

std::vector<Lifetime> TrainingStep::record(Kind kind, const BatchSize& size) {
  const Extent extent = extent_of(size);
  BatchView batch =
      BatchView::planned(std::max<int64_t>(extent.sequences, 1), extent.source_tokens, extent.target_tokens);
  batch.max_source = extent.sequences > 0 ? extent.longest_source : std::max<int64_t>(size.longest_source, 1);
  batch.max_target = extent.sequences > 0 ? extent.longest_target : std::max<int64_t>(size.longest_target, 1);
  memory_.begin_recording();
  try {
    if (kind != Kind::kEvaluate) {
      model_.train_step(context_, batch, scale_, totals_, step_options(kind == Kind::kAccumulate));
    } else {
      CriterionOptions criterion = settings_.criterion;
      criterion.smoothing = 0;
      model_.evaluate(context_, batch, evaluation_, criterion);
    }
  } catch (...) {
    memory_.end_recording();
    throw;
  }
  return memory_.end_recording();
}

const Plan* TrainingStep::plan(Kind kind, const BatchSize& size) {
  if (!planned()) return nullptr;
  const Key key{kind, extent_of(size)};
  const auto found = plans_.find(key);
  if (found != plans_.end()) return &found->second;
  const Plan& made = plans_.emplace(key, plan_memory(record(kind, size))).first->second;
  note(made);
  return &made;
}

void TrainingStep::note(const Plan& plan) {
  peak_ = std::max(peak_, plan.peak);
  lower_bound_ = std::max(lower_bound_, plan.lower_bound);
  total_ = std::max(total_, plan.total);
}

void TrainingStep::reserve() {
  if (gpu_ && !staging_.empty()) {
    int64_t tokens = 0;
    for (const auto& [key, plan] : plans_)
      tokens = std::max({tokens, key.second.source_tokens, key.second.target_tokens});
    reserve_inputs(tokens);
  }
  if (peak_ <= memory_.arena_bytes()) return;
  if (gpu_) gpu_->synchronize();        // steps on the way use the arena that goes
  graphs_.clear(), update_graph_ = {};  // they have its addresses
  memory_.reserve(peak_);
}

void TrainingStep::reserve_inputs(int64_t tokens) {
  // Ids, ids, labels, and the offsets of as many sentences as there are tokens.
  const size_t bytes = 5 * align_up(static_cast<size_t>(tokens + 1) * sizeof(int32_t));
  if (bytes <= inputs_bytes_) return;
  gpu_->synchronize();  // a step on the way reads them
  if (inputs_) gpu_->died(inputs_.get());
  inputs_.reset();
  inputs_ = allocate_block(bytes, gpu_);
  gpu_->born(inputs_.get(), bytes, DType::kI32);
  inputs_bytes_ = bytes;
  for (auto& staging : staging_) {
    staging->block = gpu_->allocate_pinned(bytes);
    if (!staging->copied) staging->copied = gpu_->make_event();
  }
}

const Plan* TrainingStep::ready(Kind kind, const Batch& batch) {
  const Plan* found = plan(kind, batch_size(batch));
  if (found && found->peak > memory_.arena_bytes()) {
    const size_t before = memory_.arena_bytes();
    reserve();
    if (before > 0 && on_grow) on_grow(before, memory_.arena_bytes());
  }
  return found;
}

BatchView TrainingStep::place(const Batch& batch) {
  if (!gpu_) return BatchView::of(batch);
  // Ids and labels, each filled up, then the offsets; each part begins at a multiple of kAlignment.
  const BatchSize size = batch_size(batch);
  const Extent extent = extent_of(size);
  const int64_t source = extent.source_tokens, target = extent.target_tokens;
  const auto sequences = static_cast<int64_t>(batch.source_offsets.size());
  struct Part {
    const std::vector<int32_t>& values;
    int64_t count;
    int32_t fill;
  };
  const auto pad = static_cast<int32_t>(model_.config().pad_id);
  const Part parts[] = {{batch.source_ids, source, pad},
                        {batch.target_ids, target, pad},
                        {batch.labels, target, -1},
                        {batch.source_offsets, sequences, 0},
                        {batch.target_offsets, sequences, 0}};
  size_t bytes = 0;
  for (const Part& part : parts) bytes += align_up(static_cast<size_t>(part.count) * sizeof(int32_t));
  if (bytes > inputs_bytes_) reserve_inputs(std::max(source, target));  // a batch that was not planned for
  Staging& staging = *staging_[next_staging_];
  next_staging_ = (next_staging_ + 1) % staging_.size();
  wait_for(*staging.copied);
  Tensor placed[5];
  size_t at = 0;
  for (int i = 0; i < 5; ++i) {
    const Part& part = parts[i];
    auto* to = reinterpret_cast<int32_t*>(staging.block.get() + at);
    const size_t size = align_up(static_cast<size_t>(part.count) * sizeof(int32_t));
    std::copy(part.values.begin(), part.values.end(), to);
    std::fill(to + part.values.size(), to + size / sizeof(int32_t), part.fill);
    placed[i] = Tensor(inputs_.get() + at, DType::kI32, {part.count}, gpu_->device());
    at += size;
  }
  gpu_->upload_async(inputs_.get(), staging.block.get(), bytes);
  staging.copied->record();
  return {placed[0],
          placed[3],
          placed[1],
          placed[2],
          placed[4],
          extent.sequences > 0 ? extent.longest_source : size.longest_source,
          extent.sequences > 0 ? extent.longest_target : size.longest_target};
}

// Does work(), or what it did before from a graph: it runs directly when it comes first.
template <typename Work>
void TrainingStep::run(Recorded* recorded, Work&& work) {
  if (!recorded || !settings_.graphs || timing_ || recorded->seen++ == 0) return work();
  const std::function<void()> again = std::ref(work);
  if (!recorded->graph || !gpu_->rerecord(*recorded->graph, again)) recorded->graph = gpu_->record(again);
  recorded->graph->launch();
}

void TrainingStep::begin(int64_t attempt, int64_t step_tokens, std::span<const double> rates, int64_t first) {
  FRIT_CHECK(step_tokens > 0, "[train] a step of {} target tokens, expected 1 or more", step_tokens);
  FRIT_CHECK(!rates.empty(), "[train] a step without a learning rate");
  Slot& slot = *slots_[static_cast<size_t>(attempts_done_) % slots_.size()];
  FRIT_CHECK(on_the_way() < kAhead, "[train] {} updates are on the way and none was asked for", on_the_way());
  attempt_ = slot.attempt = attempt;
  double given[kRates];
  for (int64_t i = 0; i < kRates; ++i) given[i] = rates[std::min(static_cast<size_t>(i), rates.size() - 1)];
  const auto first_update = static_cast<double>(first);
  const float inverse = static_cast<float>(1.0 / static_cast<double>(step_tokens));
  if (timing_) slot.mark(Slot::kBegin);
  if (gpu_) {  // the three tensors lie one behind the other
    char* header = reinterpret_cast<char*>(slot.header);
    const char* base = static_cast<const char*>(rates_.raw());
    const auto part = [&](const Tensor& t) { return header + (static_cast<const char*>(t.raw()) - base); };
    std::memcpy(part(rates_), given, sizeof(given));
    std::memcpy(part(first_), &first_update, sizeof(first_update));
    std::memcpy(part(inverse_tokens_), &inverse, sizeof(inverse));
    const auto bytes = static_cast<size_t>(static_cast<const char*>(scale_.raw()) - base);
    gpu_->upload_async(rates_.raw(), header, bytes);
  } else {
    to_device(rates_, given), to_device(first_, &first_update), to_device(inverse_tokens_, &inverse);
  }
  optimizer_begin(context_, rates_, first_, inverse_tokens_, state_, scale_);
}

void TrainingStep::forward_backward(const Batch& batch, int64_t stream) {
  const GpuRange range(gpu_, "forward and backward");
  context_.set_random(settings_.seed, static_cast<uint32_t>(attempt_), static_cast<uint32_t>(stream));
  const Plan* plan = ready(stream > 0 ? Kind::kAccumulate : Kind::kTrain, batch);
  const BatchView view = place(batch);
  Slot& slot = *slots_[static_cast<size_t>(attempts_done_) % slots_.size()];
  StepOptions options = step_options(stream > 0);
  if (timing_) options.backward_begins = [&slot] { slot.mark(Slot::kForward); };
  const auto work = [&] {
    Replay replay(memory_, plan);
    model_.train_step(context_, view, scale_, totals_, options);
    replay.finish();
  };
  run(plan && gpu_ ? &graphs_[{extent_of(batch_size(batch)), stream > 0}] : nullptr, work);
  if (timing_) slot.mark(Slot::kBackward);
}

void TrainingStep::update_parameters() {
  Replay replay(memory_, &update_plan_);
  model_.hold_pad_row(context_);
  gradient_norm(context_, model_.workspace().gradients(), squares_, not_finite_);
  optimizer_prepare(context_, settings_.optimizer, settings_.prepare, squares_, not_finite_, state_);
  if (swallowed_.defined())
    optimizer_swallowed(context_, settings_.optimizer, {.prepared = state_.prepared}, blocks(), slice_ends_,
                        swallowed_);
  optimizer_step(context_, settings_.optimizer, {.prepared = state_.prepared}, model_.workspace());
  if (ema_.defined()) ema_update(context_, settings_.ema_decay, blocks(), ema_, state_.numbers);
  replay.finish();
}

void TrainingStep::update() {
  const GpuRange range(gpu_, "update");
  Slot& slot = *slots_[static_cast<size_t>(attempts_done_) % slots_.size()];
  run(gpu_ ? &update_graph_ : nullptr, [&] { update_parameters(); });
  const auto read = [&](auto& to, const Tensor& from) {
    if (gpu_)
      gpu_->download_async(&to, from.raw(), static_cast<size_t>(from.bytes()));
    else
      std::memcpy(&to, from.raw(), static_cast<size_t>(from.bytes()));
  };
  read(slot.numbers->totals, totals_);
  read(slot.numbers->state, state_.numbers);
  read(slot.numbers->loss_scale, state_.loss_scale);
  slot.mark(Slot::kDone);
  ++attempts_done_;
}

std::optional<StepResult> TrainingStep::result(bool wait) {
  if (on_the_way() == 0) return std::nullopt;
  Slot& slot = *slots_[static_cast<size_t>(results_told_) % slots_.size()];
  if (gpu_ && !slot.events[Slot::kDone]->done()) {
    if (!wait) return std::nullopt;
    wait_for(*slot.events[Slot::kDone]);
  }
  const Slot::Numbers& n = *slot.numbers;
  StepResult r;
  r.attempt = slot.attempt;
  r.loss = {n.totals[0], n.totals[1], static_cast<int64_t>(n.totals[2])};
  r.updates = static_cast<int64_t>(n.state[kUpdates]);
  r.grad_norm = n.state[kGradientNorm];
  r.finite = r.updates > updates_told_;
  updates_told_ = r.updates;
  r.loss_scale = n.loss_scale;
  if (results_told_ > 0) {
    const Slot& before = *slots_[static_cast<size_t>(results_told_ - 1) % slots_.size()];
    r.step_ms = slot.since(before);
  }
  if (timing_) {
    r.forward_ms = slot.between(Slot::kBegin, Slot::kForward);
    r.backward_ms = slot.between(Slot::kForward, Slot::kBackward);
    r.update_ms = slot.between(Slot::kBackward, Slot::kDone);
  }
  ++results_told_;
  return r;
}

void TrainingStep::evaluate(const Batch& batch) {
  const GpuRange range(gpu_, "evaluate");
  CriterionOptions criterion = settings_.criterion;
  criterion.smoothing = 0;
  const Plan* plan = ready(Kind::kEvaluate, batch);
  const BatchView view = place(batch);
  Replay replay(memory_, plan);
  model_.evaluate(context_, view, evaluation_, criterion, std::exchange(evaluating_, true));
  replay.finish();
}

Loss TrainingStep::evaluated() {
  if (!std::exchange(evaluating_, false)) return {};
  LossTotals totals;
  from_device(totals.values, evaluation_);
  return totals.loss();
}

double TrainingStep::sum_of_squares(const Tensor& block) {
  // The norm's scratch depends on the number of elements, and on a GPU on their size.
  auto plan = squares_plans_.find(block.dtype());
  if (plan == squares_plans_.end()) {
    memory_.begin_recording();
    gradient_norm(context_, block, squares_, not_finite_);
    plan = squares_plans_.emplace(block.dtype(), plan_memory(memory_.end_recording())).first;
  }
  Replay replay(memory_, &plan->second);
  gradient_norm(context_, block, squares_, not_finite_);
  replay.finish();
  double squares = 0;
  from_device(&squares, squares_);
  return squares;
}

std::map<std::string, double> TrainingStep::time_parts(const Batch& batch, int replays) {
  FRIT_CHECK(gpu_ && on_the_way() == 0, "[train] parts are timed on a GPU, between steps");
  const Plan* plan = ready(Kind::kTrain, batch);
  const BatchView view = place(batch);
  const auto work = [&] {
    {
      Replay replay(memory_, plan);
      model_.train_step(context_, view, scale_, totals_, step_options(false));
      replay.finish();
    }
    update_parameters();
  };
  const auto time = [&](std::function<bool(std::string_view)> runs) {
    gpu_->set_filter(std::move(runs));
    std::vector<double> times = gpu_->time_graph(work, replays);
    gpu_->set_filter(nullptr);
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    return times[times.size() / 2];
  };
  // Kernels of one operator belong together: one reads what another wrote.
  const auto part_of = [](std::string_view name) {
    std::string_view part;  // the longest: an operator's name may begin another's
    for (const std::string_view op : kOperators)
      if (name.starts_with(op) && op.size() > part.size()) part = op;
    return part.empty() ? name : part;
  };
  std::set<std::string, std::less<>> names;
  std::map<std::string, double> parts;
  parts["all"] = time([&](std::string_view name) {
    if (names.find(part_of(name)) == names.end()) names.emplace(part_of(name));
    return true;
  });
  for (const std::string& part : names)
    parts[part] = time([&](std::string_view name) { return part_of(name) == part; });
  return parts;
}

TrainingStep::Numbers TrainingStep::numbers() {
  double numbers[kOptimizerNumbers];
  from_device(numbers, state_.numbers);
  Numbers n;
  n.updates = static_cast<int64_t>(numbers[kUpdates]), n.finite = static_cast<int64_t>(numbers[kFinite]);
  from_device(&n.loss_scale, state_.loss_scale);
  return n;
}

void TrainingStep::set_numbers(const Numbers& n) {
  double numbers[kOptimizerNumbers] = {};
  numbers[kUpdates] = static_cast<double>(n.updates), numbers[kFinite] = static_cast<double>(n.finite);
  to_device(state_.numbers, numbers);
  to_device(state_.loss_scale, &n.loss_scale);
  updates_told_ = n.updates;
}

std::vector<TrainingStep::Swallowed> TrainingStep::swallowed() {
  std::vector<Swallowed> found;
  if (!swallowed_.defined()) return found;
  const auto& slices = model_.workspace().layout().slices();
  std::vector<int64_t> counts(2 * slices.size());
  from_device(counts.data(), swallowed_);
  for (size_t i = 0; i < slices.size(); ++i) found.push_back({slices[i].name, counts[2 * i], counts[2 * i + 1]});
  std::fill(counts.begin(), counts.end(), 0);
  to_device(swallowed_, counts.data());
  return found;
}

void TrainingStep::get_ema(float* values) {
  from_device(values, ema_);
}
void TrainingStep::set_ema(const float* values) {
  to_device(ema_, values);
}
void TrainingStep::exchange_ema(bool in) {
  ema_exchange(context_, in, blocks(), ema_, aside_);
}

}  // namespace frit
