#include "frit/train/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "frit/ops/attention/attention.h"
#include "frit/ops/gradient_norm/gradient_norm.h"
#include "frit/ops/optimizer/per_tensor.h"
#include "frit/simt/copy.h"

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

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

constexpr std::string_view kOperators[] = {
#define FRIT_OP(op, gradient, gpu) #op,
#include "frit/ops/OPS.def"
#undef FRIT_OP
};

constexpr int64_t kRates = 2 * TrainingStep::kAhead;

// What begin() gives: it reads and writes nothing else.
struct Header {
  double rates[kRates], first;
  float inverse_tokens;
};
// Where the numbers that result() tells of lie in TrainingStep::told_.
constexpr size_t kToldTotals = 0, kToldState = kAlignment, kToldLossScale = 2 * kAlignment, kToldBytes = 3 * kAlignment;
static_assert(kOptimizerNumbers * sizeof(double) <= kAlignment);

}  // namespace

// One update on the way: what it found, and when. On a GPU `told` and `header` are pinned memory that kernels read and
// write themselves: a copy by the GPU's copying engine would have the kernels around it wait for microseconds.
struct TrainingStep::Slot {
  std::array<char, kToldBytes> host;
  char* told = host.data();
  PinnedBlock pinned;  // what is told, then the header
  Header* header = nullptr;

  template <typename T>
  T read(size_t at) const {
    T value;
    std::memcpy(&value, told + at, sizeof(T));
    return value;
  }
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
    : model_(model),
      settings_(settings),
      gpu_(gpu),
      caching_(gpu && !settings.planned_memory ? std::make_unique<CachingMemory>(*gpu) : nullptr),
      memory_(caching_ ? static_cast<DeviceMemory*>(caching_.get()) : gpu),
      context_(pool, memory_, gpu) {
  // Temporaries lie somewhere else at every step: nothing that was recorded would find them.
  if (!settings_.planned_memory) settings_.graphs = false;
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
  scale_ = scalar(DType::kF32, 1), evaluation_ = scalar(DType::kF64, 3);
  squares_ = scalar(DType::kF64, 1), not_finite_ = scalar(DType::kI32, 1);
  told_ = scalar(DType::kU8, kToldBytes);
  const auto told = [&](size_t at, DType dtype, int64_t count) {
    return Tensor(static_cast<char*>(told_.raw()) + at, dtype, {count}, context_.device());
  };
  totals_ = told(kToldTotals, DType::kF64, 3), state_.numbers = told(kToldState, DType::kF64, kOptimizerNumbers);
  state_.loss_scale = told(kToldLossScale, DType::kF32, 1);
  state_.prepared = scalar(DType::kF32, kOptimizerConstants);
  const Workspace& w = model_.workspace();
  if (!w.training()) return;
  set_numbers({.updates = 0, .finite = 0, .loss_scale = settings_.loss_scale});
  for (int i = 0; i <= kAhead; ++i) {  // one more, so that the update before the oldest is still known
    Slot& slot = *slots_.emplace_back(std::make_unique<Slot>());
    if (!gpu_) continue;
    slot.pinned = gpu_->allocate_pinned(kToldBytes + sizeof(Header));
    slot.told = slot.pinned.get();
    slot.header = new (slot.told + kToldBytes) Header();
    for (auto& event : slot.events) event = gpu_->make_event();
  }
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
  if (settings_.per_tensor_update && optimizer_copies_gradients(w))
    gradient_copy_ = block(gradient_copy_block_, DType::kF32, {elements});
  if (settings_.count_swallowed) {
    std::vector<int64_t> ends;
    for (const auto& slice : w.layout().slices()) ends.push_back(slice.offset + slice.shape.numel());
    const auto slices = static_cast<int64_t>(ends.size());
    slice_ends_ = block(slice_ends_block_, DType::kI64, {slices});
    swallowed_ = block(swallowed_block_, DType::kI64, {slices, 2});
    to_device(slice_ends_, ends.data());
  }
  memory_.begin_recording();
  update_parameters();
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

size_t TrainingStep::extra_bytes() const {
  size_t bytes = 0;
  for (const Tensor* t : {&ema_, &aside_, &gradient_copy_})
    if (t->defined()) bytes += static_cast<size_t>(t->bytes());
  return bytes;
}

BatchSize padded_size(const BatchSize& size) {
  BatchSize padded = size;
  padded.source_tokens = size.sentences * size.longest_source,
  padded.target_tokens = size.sentences * size.longest_target;
  padded.sentences = 2 * size.sentences;
  return padded;
}

void pad_batch(const Batch& batch, int32_t pad, Batch* padded) {
  const int64_t source = BatchView::longest(batch.source_offsets), target = BatchView::longest(batch.target_offsets);
  for (auto* v : {&padded->source_ids, &padded->target_ids, &padded->labels}) v->clear();
  padded->source_offsets.assign(1, 0), padded->target_offsets.assign(1, 0);
  padded->sentence_index = batch.sentence_index;
  const auto fill_up = [](const std::vector<int32_t>& from, int64_t begin, int64_t end, int64_t longest, int32_t fill,
                          std::vector<int32_t>& to) {
    to.insert(to.end(), from.begin() + begin, from.begin() + end);
    to.insert(to.end(), static_cast<size_t>(longest - (end - begin)), fill);
  };
  const auto two = [](std::vector<int32_t>& offsets, int64_t real, int64_t longest) {
    const int32_t begin = offsets.back();
    offsets.push_back(begin + static_cast<int32_t>(real)), offsets.push_back(begin + static_cast<int32_t>(longest));
  };
  for (size_t s = 0; s + 1 < batch.source_offsets.size(); ++s) {
    const int64_t s0 = batch.source_offsets[s], s1 = batch.source_offsets[s + 1];
    const int64_t t0 = batch.target_offsets[s], t1 = batch.target_offsets[s + 1];
    fill_up(batch.source_ids, s0, s1, source, pad, padded->source_ids);
    fill_up(batch.target_ids, t0, t1, target, pad, padded->target_ids);
    fill_up(batch.labels, t0, t1, target, -1, padded->labels);
    two(padded->source_offsets, s1 - s0, source), two(padded->target_offsets, t1 - t0, target);
  }
}

namespace {
// The self-attention of one side. Cross-attention goes by the larger of both.
AttentionShape attention_shape(const Transformer& model, bool training, bool causal, int64_t tokens, int64_t longest,
                               int64_t sentences) {
  const TransformerConfig& c = model.config();
  const int64_t heads = causal ? c.decoder_heads : c.encoder_heads;
  return {.dtype = compute_dtype(model.workspace().precision()),
          .heads = heads,
          .width = c.d_model / heads,
          .tokens = round_up_tokens(tokens),
          .sequences = std::max<int64_t>(sentences, 1),
          .longest = std::max<int64_t>(longest, 1),
          .causal = causal,
          .p_drop = training ? static_cast<float>(c.attention_dropout) : 0.0f};
}
// What decides about a batch: the encoder's, the decoder's, and the cross-attention's.
std::array<AttentionShape, 3> attention_shapes(const Transformer& model, bool training, const BatchSize& size) {
  AttentionShape cross = attention_shape(model, training, false, std::max(size.source_tokens, size.target_tokens),
                                         std::max(size.longest_source, size.longest_target), size.sentences);
  cross.heads = model.config().decoder_heads, cross.width = model.config().d_model / cross.heads;
  return {attention_shape(model, training, false, size.source_tokens, size.longest_source, size.sentences),
          attention_shape(model, training, true, size.target_tokens, size.longest_target, size.sentences), cross};
}
}  // namespace

std::vector<AttentionChoice> TrainingStep::tune_attention(const std::vector<BatchSize>& sizes, Tuning& tuning,
                                                          double seconds, bool again, AttentionTimer timer) {
  FRIT_CHECK(gpu_ && plans_.empty() && unplanned_.empty(), "[train] attention is chosen on a GPU, before plans");
  context_.set_tuning(&tuning);
  attention_tuned_ = settings_.attention.empty();
  if (!attention_tuned_ || (!timer && !built_with_cuda())) return {};
  if (!timer)
    timer = [this](const AttentionShape& shape, std::string_view implementation) {
      return time_attention(*gpu_, context_.pool(), shape, implementation);
    };
  std::map<std::string, AttentionShape> largest;  // of each key
  for (const BatchSize& given : sizes) {
    const BatchSize size = settings_.packed ? given : padded_size(given);
    for (const AttentionShape& shape : attention_shapes(model_, true, size)) {
      const auto [at, added] = largest.emplace(attention_key(attention_args(shape)), shape);
      if (!added && shape.tokens > at->second.tokens) at->second = shape;
    }
  }
  std::vector<AttentionShape> shapes;
  for (const auto& [key, shape] : largest) shapes.push_back(shape);
  std::stable_sort(shapes.begin(), shapes.end(), [](const AttentionShape& a, const AttentionShape& b) {
    return a.tokens * a.longest > b.tokens * b.longest;
  });
  return choose_attention(context_, shapes, tuning, seconds, again, timer);
}

bool TrainingStep::is_short(Kind kind, const BatchSize& size) const {
  if (!short_attention_ || std::max(size.longest_source, size.longest_target) > kAttentionShortLongest) return false;
  if (!attention_tuned_) return true;
  for (const AttentionShape& shape : attention_shapes(model_, kind != Kind::kEvaluate, size)) {
    const std::string_view chosen = context_.tuning()->find(kAttentionTuning, attention_key(attention_args(shape)));
    if (!chosen.empty() && chosen != "short" && chosen != kAttentionByOrder) return false;
  }
  return true;
}

TrainingStep::Extent TrainingStep::extent_of(Kind kind, const BatchSize& given) const {
  const BatchSize size = settings_.packed ? given : padded_size(given);
  Extent extent{round_up_tokens(size.source_tokens), round_up_tokens(size.target_tokens)};
  if (!gpu_ || is_short(kind, size)) return extent;
  const auto longest = [](int64_t length) {
    return attention_rounded(std::max<int64_t>(length, 1), kAttentionLengthStep);
  };
  extent.sequences = attention_rounded(std::max<int64_t>(size.sentences, 1), kAttentionSequenceStep);
  extent.longest_source = longest(size.longest_source), extent.longest_target = longest(size.longest_target);
  return extent;
}

std::vector<Lifetime> TrainingStep::record(Kind kind, const BatchSize& size) {
  const Extent extent = extent_of(kind, size);
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
  const Key key{kind, extent_of(kind, size)};
  if (!planned()) {
    if (gpu_ && unplanned_.insert(key).second) record(kind, size);
    return nullptr;
  }
  use(key.second);
  const auto found = plans_.find(key);
  if (found != plans_.end()) return &found->second;
  const Plan& made = plans_.emplace(key, plan_memory(record(kind, size))).first->second;
  note(made);
  return &made;
}

// Rounded lengths and numbers of sequences have no end of combinations: those that came longest ago are forgotten.
void TrainingStep::use(const Extent& extent) {
  if (extent.sequences == 0) return;
  last_used_[extent] = ++uses_;
  if (static_cast<int64_t>(last_used_.size()) <= std::max<int64_t>(settings_.most_lengths, 1)) return;
  const auto oldest = std::min_element(last_used_.begin(), last_used_.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
  for (const Kind kind : {Kind::kTrain, Kind::kAccumulate, Kind::kEvaluate}) plans_.erase({kind, oldest->first});
  for (const bool adds : {false, true}) graphs_.erase({oldest->first, adds});
  last_used_.erase(oldest);
}

void TrainingStep::note(const Plan& plan) {
  peak_ = std::max(peak_, plan.peak);
  lower_bound_ = std::max(lower_bound_, plan.lower_bound);
  total_ = std::max(total_, plan.total);
}

void TrainingStep::reserve() {
  if (gpu_ && !staging_.empty()) {
    int64_t tokens = 0;
    const auto room = [&](const Key& key) {
      tokens = std::max({tokens, key.second.source_tokens, key.second.target_tokens});
    };
    for (const auto& [key, plan] : plans_) room(key);
    for (const Key& key : unplanned_) room(key);
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

BatchView TrainingStep::place(Kind kind, const Batch& given) {
  if (!settings_.packed) pad_batch(given, static_cast<int32_t>(model_.config().pad_id), &padded_);
  const Batch& batch = settings_.packed ? given : padded_;
  if (!gpu_) return BatchView::of(batch);
  // Ids and labels, each filled up, then the offsets; each part begins at a multiple of kAlignment.
  const BatchSize size = batch_size(given);
  const Extent extent = extent_of(kind, size);
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
  placed_ = &staging, placed_bytes_ = bytes;
  return {placed[0],
          placed[3],
          placed[1],
          placed[2],
          placed[4],
          extent.sequences > 0 ? extent.longest_source : size.longest_source,
          extent.sequences > 0 ? extent.longest_target : size.longest_target};
}

void TrainingStep::fetch() {
  if (!gpu_) return;
  const auto raw = [&](char* p) {
    return Tensor(p, DType::kU8, {static_cast<int64_t>(placed_bytes_)}, gpu_->device());
  };
  copy_gpu(context_, raw(placed_->block.get()), raw(inputs_.get()));
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
  Header given;
  for (int64_t i = 0; i < kRates; ++i) given.rates[i] = rates[std::min(static_cast<size_t>(i), rates.size() - 1)];
  given.first = static_cast<double>(first);
  given.inverse_tokens = static_cast<float>(1.0 / static_cast<double>(step_tokens));
  if (timing_) slot.mark(Slot::kBegin);
  Tensor given_rates = rates_, given_first = first_, given_inverse = inverse_tokens_;
  if (gpu_) {
    *slot.header = given;
    given_rates = Tensor(slot.header->rates, DType::kF64, {kRates}, gpu_->device());
    given_first = Tensor(&slot.header->first, DType::kF64, {1}, gpu_->device());
    given_inverse = Tensor(&slot.header->inverse_tokens, DType::kF32, {1}, gpu_->device());
  } else {
    to_device(rates_, given.rates), to_device(first_, &given.first), to_device(inverse_tokens_, &given.inverse_tokens);
  }
  optimizer_begin(context_, given_rates, given_first, given_inverse, state_, scale_);
}

void TrainingStep::forward_backward(const Batch& batch, int64_t stream) {
  const GpuRange range(gpu_, "forward and backward");
  context_.set_random(settings_.seed, static_cast<uint32_t>(attempt_), static_cast<uint32_t>(stream));
  const Kind kind = stream > 0 ? Kind::kAccumulate : Kind::kTrain;
  const Plan* plan = ready(kind, batch);
  const BatchView view = place(kind, batch);
  Slot& slot = *slots_[static_cast<size_t>(attempts_done_) % slots_.size()];
  StepOptions options = step_options(stream > 0);
  if (timing_) options.backward_begins = [&slot] { slot.mark(Slot::kForward); };
  const auto work = [&] {
    fetch();
    Replay replay(memory_, plan);
    model_.train_step(context_, view, scale_, totals_, options);
    replay.finish();
  };
  run(plan && gpu_ ? &graphs_[{extent_of(kind, batch_size(batch)), stream > 0}] : nullptr, work);
  if (gpu_) placed_->copied->record();
  if (timing_) slot.mark(Slot::kBackward);
}

void TrainingStep::update_parameters() {
  Replay replay(memory_, context_.planning() ? nullptr : update_plan());
  model_.hold_pad_row(context_);
  gradient_norm(context_, model_.workspace().gradients(), squares_, not_finite_);
  optimizer_prepare(context_, settings_.optimizer, settings_.prepare, squares_, not_finite_, state_);
  if (swallowed_.defined())
    optimizer_swallowed(context_, settings_.optimizer, {.prepared = state_.prepared}, blocks(), slice_ends_,
                        swallowed_);
  if (settings_.per_tensor_update)
    optimizer_step_per_tensor(context_, settings_.optimizer, {.prepared = state_.prepared}, model_.workspace(),
                              gradient_copy_);
  else
    optimizer_step(context_, settings_.optimizer, {.prepared = state_.prepared}, model_.workspace());
  if (ema_.defined()) ema_update(context_, settings_.ema_decay, blocks(), ema_, state_.numbers);
  replay.finish();
}

void TrainingStep::update() {
  const GpuRange range(gpu_, "update");
  Slot& slot = *slots_[static_cast<size_t>(attempts_done_) % slots_.size()];
  run(gpu_ ? &update_graph_ : nullptr, [&] {
    update_parameters();
    if (gpu_) copy_gpu(context_, told_, Tensor(slot.told, DType::kU8, told_.shape(), gpu_->device()));
  });
  if (!gpu_) std::memcpy(slot.told, told_.raw(), kToldBytes);
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
  const auto totals = slot.read<std::array<double, 3>>(kToldTotals);
  const auto state = slot.read<std::array<double, kOptimizerNumbers>>(kToldState);
  StepResult r;
  r.attempt = slot.attempt;
  r.loss = {totals[0], totals[1], static_cast<int64_t>(totals[2])};
  r.updates = static_cast<int64_t>(state[kUpdates]);
  r.grad_norm = state[kGradientNorm];
  r.finite = r.updates > updates_told_;
  updates_told_ = r.updates;
  r.loss_scale = slot.read<float>(kToldLossScale);
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
  const BatchView view = place(Kind::kEvaluate, batch);
  fetch();
  if (gpu_) placed_->copied->record();
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

std::map<std::string, double> TrainingStep::time_parts(const Batch& batch, int replays,
                                                       const std::vector<std::string>& only) {
  FRIT_CHECK(gpu_ && on_the_way() == 0, "[train] parts are timed on a GPU, between steps");
  const Plan* plan = ready(Kind::kTrain, batch);
  const BatchView view = place(Kind::kTrain, batch);
  fetch();
  placed_->copied->record();
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
    return median(std::move(times));
  };
  // Kernels of one operator belong together: one reads what another wrote.
  const auto part_of = [](std::string_view name) {
    std::string_view part;  // the longest: an operator's name may begin another's
    for (const std::string_view op : kOperators)
      if (name.starts_with(op) && op.size() > part.size()) part = op;
    return part.empty() ? name : part;
  };
  std::set<std::string, std::less<>> names(only.begin(), only.end());
  std::map<std::string, double> parts;
  if (only.empty())
    parts["all"] = time([&](std::string_view name) {
      if (names.find(part_of(name)) == names.end()) names.emplace(part_of(name));
      return true;
    });
  for (const std::string& part : names)
    parts[part] = time([&](std::string_view name) { return part_of(name) == part; });
  return parts;
}

double TrainingStep::time_copy(int replays) {
  FRIT_CHECK(gpu_ && on_the_way() == 0, "[train] a copy is timed on a GPU, between steps");
  const Workspace& w = model_.workspace();
  const bool moments = w.moment1().defined() && w.moment2().defined();
  const Tensor from = moments ? w.moment1() : w.parameters(), to = moments ? w.moment2() : w.gradients();
  const int64_t bytes = std::min(from.bytes(), to.bytes()) / 16 * 16;
  const auto raw = [&](const Tensor& t) { return Tensor(t.raw(), DType::kU8, {bytes}, t.device()); };
  const double us = median(gpu_->time_graph([&] { copy_gpu(context_, raw(from), raw(to)); }, replays));
  return 2e6 * static_cast<double>(bytes) / us;
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
