#include "frit/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <streambuf>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/data/prefetch.h"
#include "frit/train/averaging.h"
#include "frit/train/checkpoint_store.h"
#include "frit/train/checkpoint_weights.h"
#include "frit/train/early_stopping.h"
#include "frit/train/metrics.h"
#include "frit/train/period.h"
#include "frit/train/plan.h"
#include "frit/train/prepare.h"
#include "frit/train/progress.h"
#include "frit/train/run_state.h"
#include "frit/train/speed_report.h"
#include "frit/train/swallowed_report.h"
#include "frit/train/tensorboard.h"
#include "frit/train/tuning_cache.h"
#include "frit/train/update_dump.h"
#include "frit/train/validation.h"

namespace frit {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}
double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}
std::string mib(size_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

// Swallows everything: the log of a silent trainer.
struct NullBuffer : std::streambuf {
  int overflow(int c) override { return c; }
  std::streamsize xsputn(const char*, std::streamsize n) override { return n; }
};

// While it lives, the model computes with the average of its weights, if there is one.
class AverageInModel {
 public:
  explicit AverageInModel(TrainingStep& step) : step_(step) {
    if (step_.ema().defined()) step_.exchange_ema(true);
  }
  ~AverageInModel() {
    if (step_.ema().defined()) try {
        step_.exchange_ema(false);
      } catch (const std::exception&) {  // the GPU fails: whoever uses it next is told
      }
  }
  AverageInModel(const AverageInModel&) = delete;
  AverageInModel& operator=(const AverageInModel&) = delete;

 private:
  TrainingStep& step_;
};

// Adds the time it lives to `seconds`; those inside of another one count once.
class Aside {
 public:
  explicit Aside(double& seconds) : seconds_(seconds), before_(seconds) {}
  ~Aside() { seconds_ = before_ + seconds_between(begin_, Clock::now()); }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

 private:
  double& seconds_;
  double before_;
  Clock::time_point begin_ = Clock::now();
};

}  // namespace

struct Trainer::Impl {
  TrainConfig config;
  TrainerOutput output;
  TrainerHooks hooks;
  fs::path run;
  NullBuffer nothing;
  std::ostream silence{&nothing};
  Progress progress;
  ThreadPool pool;

  std::optional<Tokenizer> tokenizer;
  TransformerConfig sizes;
  TokenFile train_file;
  std::optional<Batcher> batcher;
  std::unique_ptr<Gpu> gpu;           // nullptr: training on the CPU
  std::optional<TuningCache> tuning;  // what timing found on it
  std::unique_ptr<Transformer> model;
  std::unique_ptr<TrainingStep> step;
  std::optional<EarlyStopper> early;
  std::optional<MetricsWriter> metrics;
  std::unique_ptr<TensorBoardWriter> tensorboard;
  std::optional<CheckpointStore> store, aside;  // checkpoints/, interrupted/
  std::vector<Batch> micro;                     // of one step, when several are accumulated
  std::unique_ptr<Validation> validation;       // nullptr: no validation text
  Schedule schedule;
  Period stop_after, log_every, valid_every, save_every;
  RunState state;
  int64_t saved_attempts = -1;  // attempts at the last checkpoint
  Clock::time_point resumed_at;
  double seconds_before = 0;
  std::optional<double> last_norm;  // of this process's last update: a finished run that is run again has none
  // Updates on the way, oldest first: where the data stands behind each.
  struct OnTheWay {
    int64_t attempt = 0, source_tokens = 0, target_tokens = 0, epoch_sentences = 0;
    BatchPosition position;
  };
  std::deque<OnTheWay> on_the_way;
  double aside_s = 0;              // of this process, spent on validations and checkpoints
  int64_t attention_tuned = 0;     // kinds of attention that were timed here
  std::optional<UpdateDump> dump;  // run.dump_steps, in a run's first start alone

  Impl(TrainConfig c, TrainerOutput o, TrainerHooks h)
      : config(std::move(c)),
        output(std::move(o)),
        hooks(std::move(h)),
        run(config.run.directory),
        progress(output.log ? *output.log : silence,
                 {.bar = output.bar, .colour = output.colour, .columns = output.columns}),
        pool(static_cast<int>(config.run.threads)) {}

  void say(std::string_view text) { progress.message(text); }
  bool stop_requested() const { return output.stop_requested && output.stop_requested(); }
  bool has_valid() const { return validation != nullptr; }
  bool use_bleu() const { return config.training.early_stopping_metric == "bleu"; }

  // Passes over the data, the fraction of this one by sentences.
  double epochs() const { return epochs_at(state.position, state.epoch_sentences); }
  double epochs_at(const BatchPosition& position, int64_t sentences) const {
    return static_cast<double>(position.epoch) +
           static_cast<double>(sentences) / static_cast<double>(std::max<int64_t>(1, batcher->counts().used()));
  }
  TrainingPosition here() const { return {state.updates, epochs(), state.target_tokens}; }
  // Where training will stand when all that is on the way has come, if none of it is skipped.
  TrainingPosition ahead() const {
    TrainingPosition p = here();
    if (on_the_way.empty()) return p;
    const OnTheWay& last = on_the_way.back();
    p.updates += static_cast<int64_t>(on_the_way.size());
    p.epochs = epochs_at(last.position, last.epoch_sentences);
    for (const OnTheWay& u : on_the_way) p.target_tokens += u.target_tokens;
    return p;
  }
  double seconds() const { return seconds_before + seconds_between(resumed_at, Clock::now()); }

  TrainResult result(TrainEnd end) const {
    TrainResult r;
    r.end = end;
    r.updates = state.updates, r.skipped = state.skipped, r.target_tokens = state.target_tokens;
    r.epochs = batcher ? epochs() : 0, r.seconds = state.seconds;
    r.loss = state.valid_loss, r.bleu = state.valid_bleu;
    if (end != TrainEnd::kInterrupted) r.model_directory = (run / "model").string();
    return r;
  }

  void event(const std::string& message) {
    say(message);
    MetricsEntry entry;
    entry.kind = MetricsKind::kEvent;
    entry.message = message;
    append(entry);
  }
  void append(MetricsEntry& entry) {
    entry.step = state.updates, entry.epoch = epochs(), entry.time_s = seconds();
    metrics->append(entry);
    ++state.metrics_lines;
  }

  TrainResult train();
  void open_stores();
  std::optional<CheckpointInfo> find_checkpoint();
  void restore(const CheckpointInfo& checkpoint);
  void save(bool interrupted, std::optional<double> metric = std::nullopt);
  void take_largest_batches(const std::optional<CheckpointInfo>& checkpoint);
  void plan();
  void tune_attention(const std::vector<BatchSize>& batch_sizes);
  void tune();
  bool start_update(Prefetcher& prefetcher);
  void finish_updates(bool all);
  void finish_update(const OnTheWay& u, const StepResult& r);
  void show();
  void log_metrics();
  bool validate();
  void finish_model();
};

void Trainer::Impl::open_stores() {
  const Period keep_every = config.training.keep_every.empty() ? Period{} : parse_period(config.training.keep_every);
  CheckpointOptions options;
  options.keep_newest = config.training.keep;
  options.keep_every = std::llround(keep_every.count);
  options.higher_is_better = use_bleu();
  options.before_operation = hooks.checkpoint_operation;
  store.emplace(run / "checkpoints", options);
  // What stopping saves lies apart: it must not push out what an uninterrupted run keeps and averages.
  CheckpointOptions newest;
  newest.keep_newest = 1, newest.keep_best = false;
  newest.before_operation = hooks.checkpoint_operation;
  aside.emplace(run / "interrupted", newest);
  store->recover();
  aside->recover();
}

std::optional<CheckpointInfo> Trainer::Impl::find_checkpoint() {
  std::vector<SkippedCheckpoint> skipped;
  auto periodic = store->latest(&skipped), interrupted = aside->latest(&skipped);
  for (const SkippedCheckpoint& s : skipped)
    say(fmt::format("Checkpoint {} is passed over: {}", s.path.string(), s.reason));
  if (!periodic || (interrupted && interrupted->step >= periodic->step)) return interrupted;
  return periodic;
}

void Trainer::Impl::restore(const CheckpointInfo& checkpoint) {
  TrainConfig before;
  parse_config(before, read_blob(checkpoint, "config.toml"), (checkpoint.path / "config.toml").string());
  const std::string changed = changed_keys(before, config);
  if (!changed.empty())
    fail(
        "[train] {} goes on from {}, but the configuration changed in keys that would change its results:{}\n"
        "Set them back, or train into another run.directory.",
        run.string(), checkpoint.path.string(), changed);
  const RunState saved = RunState::from_json(read_blob(checkpoint, "state.json"));
  const auto same = [&](uint64_t was, uint64_t is, std::string_view what) {
    if (was != is)
      fail("[train] {} goes on from {}, but {} is another one now", run.string(), checkpoint.path.string(), what);
  };
  same(saved.tokenizer_hash, state.tokenizer_hash, "the tokenizer");
  same(saved.train_hash, state.train_hash, "the training text");
  same(saved.valid_hash, state.valid_hash, "the validation text");
  state = saved;
  const Workspace& w = model->workspace();
  for (const auto& [name, block] : named_blocks(w)) {
    BlockBytes bytes(w, block);
    read_blob(checkpoint, name, bytes.bytes());
    bytes.put_back();
  }
  for (const auto& file : checkpoint.files)
    if (file.name == "logits_bias") {
      std::vector<float> bias(static_cast<size_t>(sizes.target_vocab));
      read_blob(checkpoint, file.name, std::as_writable_bytes(std::span(bias)));
      model->set_logits_bias(bias);
    }
  if (step->ema().defined()) {
    std::vector<float> average(static_cast<size_t>(step->ema().numel()));
    read_blob(checkpoint, "ema", std::as_writable_bytes(std::span(average)));
    step->set_ema(average.data());
  }
  step->set_numbers({state.updates, state.finite_updates, static_cast<float>(state.loss_scale)});
  early->restore(state.early_stopping);
  batcher->seek(state.position);
  saved_attempts = state.attempts;
}

void Trainer::Impl::save(bool interrupted, std::optional<double> metric) {
  const Aside counted(aside_s);
  const Workspace& w = model->workspace();
  for (const Tensor& block : {w.parameters(), w.master()})
    if (block.defined() && !std::isfinite(step->sum_of_squares(block)))
      fail(
          "[train] the weights are not finite after update {}: no checkpoint is written; lower training.learning_rate "
          "and go on from the last one",
          state.updates);
  state.seconds = seconds();
  state.early_stopping = early->save();
  const TrainingStep::Numbers numbers = step->numbers();
  state.finite_updates = numbers.finite, state.loss_scale = numbers.loss_scale;
  const std::string json = state.to_json(), toml = dump_config(config, false);
  std::vector<CheckpointBlob> blobs = {CheckpointBlob::text("state.json", json),
                                       CheckpointBlob::text("config.toml", toml)};
  std::deque<BlockBytes> blocks;
  for (const auto& [name, block] : named_blocks(w)) {
    blocks.emplace_back(w, block).fetch();
    blobs.push_back({name, {blocks.back().bytes()}});
  }
  std::vector<float> average;
  if (step->ema().defined()) {
    average.resize(static_cast<size_t>(step->ema().numel()));
    step->get_ema(average.data());
    blobs.push_back(CheckpointBlob::array("ema", std::span<const float>(average)));
  }
  // Not trained, but part of the model that training began from.
  if (!model->logits_bias_values().empty())
    blobs.push_back(CheckpointBlob::array("logits_bias", std::span<const float>(model->logits_bias_values())));
  metrics->sync();
  (interrupted ? *aside : *store).save(state.updates, blobs, metric);
  saved_attempts = state.attempts;
}

// training.batch_tokens 0: the largest budget that fits; a run that goes on keeps what it began with.
void Trainer::Impl::take_largest_batches(const std::optional<CheckpointInfo>& checkpoint) {
  int64_t& tokens = config.training.batch_tokens;
  if (checkpoint) {
    TrainConfig before;
    parse_config(before, read_blob(*checkpoint, "config.toml"), (checkpoint->path / "config.toml").string());
    tokens = before.training.batch_tokens;
    return;
  }
  const int64_t free = gpu ? static_cast<int64_t>(gpu->bytes_free()) : 0;
  if (free == 0)
    fail(
        "[config] training.batch_tokens 0 takes the largest batches that fit on a GPU: give a number for run.device {}",
        config.run.device);
  tokens = largest_batch_tokens(config, sizes, *gpu, free);
  if (tokens == 0) fail("[train] the model does not fit: {} has {} free", gpu->name(), mib(static_cast<size_t>(free)));
  say(fmt::format("Batches: {} tokens, the most that fits into {} of {}", format_count(tokens),
                  mib(static_cast<size_t>(free)), gpu->name()));
}

// Times the implementations of attention where several take a batch, so that plans know which one runs.
void Trainer::Impl::tune_attention(const std::vector<BatchSize>& batch_sizes) {
  tuning.emplace(run, gpu->name(), [this](std::string_view text) { say(text); });
  // A run that goes on times nothing: what it did not know when it began it left to the order.
  if (!tuning->fresh()) {
    step->tune_attention({}, tuning->tuning(), 0, false);
    return;
  }
  const Clock::time_point begin = Clock::now();
  const auto choices =
      step->tune_attention(batch_sizes, tuning->tuning(), kAttentionSeconds, true, hooks.attention_timer);
  int64_t left = 0;
  for (const AttentionChoice& c : choices) {
    if (!c.failures.empty()) say(fmt::format("Note: attention {}: {}", c.key, c.failures));
    if (c.chosen == kAttentionByOrder) {
      ++left;
      continue;
    }
    std::string times;
    for (const auto& [name, us] : c.us) times += fmt::format("{}{} {:.0f} us", times.empty() ? "" : ", ", name, us);
    say(fmt::format("Attention: {}: {} ({})", c.key, c.chosen, times));
  }
  attention_tuned = static_cast<int64_t>(choices.size()) - left;
  if (!choices.empty())
    say(fmt::format("Attention: {} kinds timed in {:.1f} s{}", attention_tuned, seconds_between(begin, Clock::now()),
                    left > 0 ? fmt::format(", {} left to the usual order", left) : ""));
}

// Times kinds of products that no earlier run has met, and keeps what was found.
void Trainer::Impl::tune() {
  const Clock::time_point begin = Clock::now();
  const int64_t found = gpu->tune_products(tuning->tuning());
  tuning->save(found + attention_tuned > 0);
  if (found > 0)
    say(fmt::format("Products: {} shapes timed in {:.1f} s, {} known", found, seconds_between(begin, Clock::now()),
                    tuning->tuning().size()));
}

// Plans every key of the first epoch and of validation, and reserves the arena.
void Trainer::Impl::plan() {
  const Clock::time_point begin = Clock::now();
  const auto plan_step = [&](const BatchSize& size) {
    step->plan(TrainingStep::Kind::kTrain, size);
    if (config.training.accumulate > 1) step->plan(TrainingStep::Kind::kAccumulate, size);
  };
  // Sampling changes lengths from epoch to epoch, and takes as long as reading an epoch: the largest key will do.
  const std::vector<BatchSize> batch_sizes =
      config.data.subword_alpha == 0 ? batcher->sizes(0) : std::vector<BatchSize>{full_batch(config)};
  if (gpu) tune_attention(batch_sizes);
  for (const BatchSize& size : batch_sizes) plan_step(size);
  if (has_valid()) validation->plan(*step);
  if (!step->planned()) {
    if (gpu) tune();
    step->reserve();
    say(fmt::format("Memory: {} parameters, gradients and optimizer; temporaries from {} ({})",
                    mib(static_cast<size_t>(model->workspace().bytes())), gpu ? "a caching allocator" : "the heap",
                    config.run.planned_memory ? "run.attention " + config.run.attention : "run.planned_memory false"));
    return;
  }
  if (gpu) {
    const auto free = static_cast<int64_t>(gpu->bytes_free());
    const auto wanted = static_cast<int64_t>(step->peak());
    if (free > 0 && wanted > free) {
      // What largest_batch_tokens counts itself is free again for it.
      const int64_t all = free + model->workspace().bytes() + static_cast<int64_t>(step->extra_bytes());
      const int64_t tokens = largest_batch_tokens(config, sizes, *gpu, all);
      fail(
          "[train] training.batch_tokens {} does not fit: temporaries need {} and {} has {} free beside the weights. "
          "The "
          "largest that fits is {}",
          config.training.batch_tokens, mib(step->peak()), gpu->name(), mib(static_cast<size_t>(free)), tokens);
    }
    tune();
  }
  step->reserve();
  if (gpu && gpu->bytes_free() > 0)
    say(fmt::format("Memory: it fits, {} of {} stay free", mib(gpu->bytes_free()), gpu->name()));
  step->on_grow = [this](size_t before, size_t after) {
    event(fmt::format("Memory: a batch of a new size made the arena grow from {} to {}", mib(before), mib(after)));
  };
  say(
      fmt::format("Memory: {} parameters, gradients and optimizer; {} arena for {} batch sizes (without sharing {}), "
                  "planned in {:.1f} s",
                  mib(static_cast<size_t>(model->workspace().bytes())), mib(step->arena_bytes()), step->plans(),
                  mib(step->total()), seconds_between(begin, Clock::now())));
}

// Trains on the next batches and puts an update on the way. False if stopping was asked for in between: the step is
// then to be done again from its first batch, which the saved position still names.
bool Trainer::Impl::start_update(Prefetcher& prefetcher) {
  const int64_t count = config.training.accumulate;
  OnTheWay u;
  u.attempt = state.attempts + static_cast<int64_t>(on_the_way.size());
  u.position = on_the_way.empty() ? state.position : on_the_way.back().position;
  u.epoch_sentences = on_the_way.empty() ? state.epoch_sentences : on_the_way.back().epoch_sentences;
  const Batch* batch = nullptr;
  const auto next = [&] {
    batch = prefetcher.next();
    u.target_tokens += batch->target_tokens(), u.source_tokens += batch->source_tokens();
    u.epoch_sentences = prefetcher.position().epoch == u.position.epoch ? u.epoch_sentences + batch->sentences() : 0;
    u.position = prefetcher.position();
  };
  if (count == 1) {
    next();
  } else {  // the gradient's scale wants the tokens of all of them
    for (int64_t i = 0; i < count; ++i) next(), micro[static_cast<size_t>(i)] = *batch;  // within its reserved capacity
  }
  double rates[TrainingStep::kAhead + 1];
  for (int i = 0; i <= TrainingStep::kAhead; ++i) rates[i] = learning_rate(schedule, state.updates + 1 + i);
  step->begin(u.attempt, u.target_tokens, rates, state.updates + 1);
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0 && stop_requested()) return false;
    const Batch& now = count == 1 ? *batch : micro[static_cast<size_t>(i)];
    if (dump) dump->add(now, u.attempt + 1, rates[on_the_way.size()]);
    step->forward_backward(now, i);
  }
  if (hooks.before_update) hooks.before_update(u.attempt, model->workspace());
  step->update();
  if (dump) dump->write();
  on_the_way.push_back(u);
  return true;
}

// Takes in what updates did: those that are done, or all, waiting for them. Leaves room for another one.
void Trainer::Impl::finish_updates(bool all) {
  while (!on_the_way.empty()) {
    const bool wait = all || on_the_way.size() >= static_cast<size_t>(TrainingStep::kAhead);
    const std::optional<StepResult> r = step->result(wait);
    if (!r) return;
    const OnTheWay u = on_the_way.front();
    on_the_way.pop_front();
    const TrainingPosition before = here();
    finish_update(u, *r);
    show();
    if (period_passed(log_every, before, here())) log_metrics();
  }
}

void Trainer::Impl::finish_update(const OnTheWay& u, const StepResult& r) {
  ++state.attempts;
  state.position = u.position, state.epoch_sentences = u.epoch_sentences;
  const double loss_scale_before = std::exchange(state.loss_scale, r.loss_scale);
  if (r.finite) {
    ++state.updates;
    state.skipped_in_a_row = 0;
    state.target_tokens += u.target_tokens, state.source_tokens += u.source_tokens;
    state.window_loss += r.loss.loss, state.window_tokens += u.target_tokens;
    last_norm = r.grad_norm;
    if (hooks.after_update) hooks.after_update(state.updates);
    return;
  }
  ++state.skipped, ++state.skipped_in_a_row;
  const bool lowered = r.loss_scale < loss_scale_before;
  event(fmt::format("Update {} skipped: {} is not finite ({} skipped so far){}", state.updates + 1,
                    std::isfinite(r.loss.loss) ? "the gradient" : "the loss", state.skipped,
                    lowered ? fmt::format("; the loss scale is now {}", r.loss_scale) : ""));
  if (state.skipped_in_a_row >= config.training.max_not_finite && !lowered)
    fail(
        "[train] {} updates in a row were not finite (training.max_not_finite): training stops; no checkpoint holds "
        "them. Lower training.learning_rate, or set training.clip_norm if it is 0",
        state.skipped_in_a_row);
}
void Trainer::Impl::show() {
  ProgressState p;
  p.time_s = seconds();
  const auto& t = config.training;
  p.fraction = stop_after.never() ? -1 : period_fraction(stop_after, here());
  if (t.stop_after_seconds > 0) p.fraction = std::max(p.fraction, std::min(1.0, p.time_s / t.stop_after_seconds));
  p.updates = state.updates, p.epoch = epochs(), p.target_tokens = state.target_tokens;
  if (state.window_tokens > 0) p.loss = state.window_loss / static_cast<double>(state.window_tokens);
  if (state.updates > 0) p.learning_rate = learning_rate(schedule, state.updates), p.grad_norm = last_norm;
  progress.update(p);
}

void Trainer::Impl::log_metrics() {
  if (state.window_tokens == 0) return;
  MetricsEntry entry;
  entry.kind = MetricsKind::kTrain;
  entry.loss = state.window_loss / static_cast<double>(state.window_tokens);
  entry.lr = learning_rate(schedule, std::max<int64_t>(1, state.updates));
  const double now = seconds(), elapsed = now - state.window_seconds;
  if (elapsed > 0 && last_norm) entry.tokens_per_s = static_cast<double>(state.window_tokens) / elapsed;
  if (last_norm) entry.grad_norm = *last_norm;
  entry.target_tokens = state.target_tokens;
  append(entry);
  if (tensorboard) {
    const double wall = wall_time();
    tensorboard->scalar("train/loss", *entry.loss, state.updates, wall);
    tensorboard->scalar("train/learning_rate", *entry.lr, state.updates, wall);
    if (last_norm) tensorboard->scalar("train/grad_norm", *last_norm, state.updates, wall);
    if (entry.tokens_per_s) tensorboard->scalar("train/tokens_per_s", *entry.tokens_per_s, state.updates, wall);
  }
  state.window_loss = 0, state.window_tokens = 0, state.window_seconds = now;
  if (config.training.count_swallowed) say(report_swallowed(run, state.updates, step->swallowed()));
}

// Loss, perplexity and translations of the validation text, with the averaged weights if there are any. False if
// stopping was asked for before it was done.
bool Trainer::Impl::validate() {
  const Clock::time_point begin = Clock::now();
  const Aside counted(aside_s);
  std::optional<ValidationResult> result;
  {
    const AverageInModel averaged(*step);
    result = validation->run(*step, *model, [this] { return stop_requested(); });
  }
  if (!result) return false;
  MetricsEntry entry;
  entry.kind = MetricsKind::kValid;
  entry.loss = result->loss, entry.ppl = result->perplexity, entry.bleu = result->bleu;
  state.valid_loss = entry.loss, state.valid_bleu = entry.bleu;
  append(entry);
  if (tensorboard) {
    const double wall = wall_time();
    tensorboard->scalar("valid/loss", *entry.loss, state.updates, wall);
    tensorboard->scalar("valid/perplexity", *entry.ppl, state.updates, wall);
    if (entry.bleu) tensorboard->scalar("valid/bleu", *entry.bleu, state.updates, wall);
  }
  const auto samples = std::min(result->translations.size(), static_cast<size_t>(config.validation.samples));
  for (size_t i = 0; i < samples; ++i) {
    MetricsEntry sample;
    sample.kind = MetricsKind::kSample;
    sample.source = validation->sources()[i], sample.reference = validation->references()[i];
    sample.hypothesis = result->translations[i];
    append(sample);
    if (tensorboard)
      tensorboard->text(fmt::format("sample/{}", i + 1),
                        fmt::format("{}\n\n{}\n\n{}", sample.source, sample.reference, sample.hypothesis),
                        state.updates, wall_time());
  }
  const std::optional<double> metric = use_bleu() ? entry.bleu : entry.loss;
  const bool improved = early->update(*metric);
  state.validated = state.attempts;
  state.validation_pending = false;
  std::string line = fmt::format("valid | step {} | epoch {:.2f} | loss {:.4f} | ppl {:.2f}",
                                 format_count(state.updates), epochs(), *entry.loss, *entry.ppl);
  if (entry.bleu) line += fmt::format(" | BLEU {:.2f}", *entry.bleu);
  line += fmt::format(" | {:.1f} s{}", seconds_between(begin, Clock::now()), improved ? " | best so far" : "");
  say(line);
  if (improved && std::isfinite(*metric)) save(false, metric);
  return true;
}

// Writes RUN/model: the average of the newest checkpoints, or the best one, or the last; averaged weights if there are.
void Trainer::Impl::finish_model() {
  std::vector<CheckpointInfo> sources;
  std::string what;
  if (config.training.average_checkpoints > 1) {
    sources = store->list();
    const auto keep = static_cast<size_t>(config.training.average_checkpoints);
    if (sources.size() > keep) sources.erase(sources.begin(), sources.end() - static_cast<std::ptrdiff_t>(keep));
    what = fmt::format("the average of {} checkpoints, updates {} to {}", sources.size(), sources.front().step,
                       sources.back().step);
  } else if (auto best = store->best()) {
    what = fmt::format("the best checkpoint, update {}", best->step);
    sources = {*best};
  } else {
    sources = {store->at(state.updates)};
    what = fmt::format("the last checkpoint, update {}", state.updates);
  }
  // A model of its own: what the trainer holds stays as it is.
  Transformer::Options options;
  options.training = false;
  Transformer final_model(sizes, options);
  const auto read = [&](const CheckpointInfo& checkpoint) {
    return read_weights(checkpoint, model->workspace(), step->ema().defined());
  };
  std::vector<float> values;
  if (sources.size() == 1) {
    values = read(sources[0]);
  } else {
    WeightAverage average;
    for (const CheckpointInfo& source : sources) average.add(read(source));
    values.resize(static_cast<size_t>(model->workspace().layout().elements()));
    average.mean(values);
  }
  std::copy(values.begin(), values.end(), final_model.workspace().parameters().data<float>());
  if (!model->logits_bias_values().empty()) final_model.set_logits_bias(model->logits_bias_values());

  const fs::path place = run / "model", temporary = run / "model.tmp", old = run / "model.old";
  std::error_code error;
  fs::remove_all(temporary, error);
  final_model.save(temporary.string());
  tokenizer->save(temporary.string());
  sync_directory(temporary);
  fs::remove_all(old, error);
  if (fs::exists(place)) fs::rename(place, old);
  fs::rename(temporary, place);
  sync_directory(run);
  fs::remove_all(old, error);
  say(fmt::format("Model: {} ({})", place.string(), what));
}

TrainResult Trainer::Impl::train() {
  validate_config(config);
  const auto& t = config.training;
  if (config.data.train_source.empty()) fail("[config] data.train_source and data.train_target are not set");
  check_before_preparing(config);
  stop_after = parse_period(t.stop_after), log_every = parse_period(t.log_every);
  valid_every = parse_period(t.valid_every), save_every = parse_period(t.save_every);
  gpu = training_gpu(config);  // before anything is written: there may be none
  const RunLock lock(run);
  open_stores();
  const Say sink = [this](std::string_view text) { say(text); };
  const StopRequested stop = [this] { return stop_requested(); };
  const auto stopped_preparing = [&] {
    progress.finish();
    say("Stopped while preparing; run again to go on");
    return result(TrainEnd::kInterrupted);
  };

  const auto checkpoint = find_checkpoint();
  tokenizer = prepare_tokenizer(config, run, checkpoint.has_value(), sink, stop);
  if (stop_requested()) return stopped_preparing();
  TokenFile valid_file;
  try {
    train_file = prepare_tokens(config, run, "train", config.data.train_source, config.data.train_target, *tokenizer,
                                pool, sink, stop);
    if (!config.data.valid_source.empty())
      valid_file = prepare_tokens(config, run, "valid", config.data.valid_source, config.data.valid_target, *tokenizer,
                                  pool, sink, stop);
  } catch (const BuildStopped&) {
    return stopped_preparing();
  }
  sizes = model_config(config, *tokenizer);
  if (t.batch_tokens == 0) take_largest_batches(checkpoint);
  batcher.emplace(train_file, train_batches(config, train_file, *tokenizer), &*tokenizer);
  say("Batches: " + batcher->counts().to_string(batcher->options()));
  if (!config.data.valid_source.empty())
    validation = std::make_unique<Validation>(config, sizes, *tokenizer, std::move(valid_file), pool, gpu.get(), sink);
  if (stop_requested()) return stopped_preparing();
  state.tokenizer_hash = tokenizer->hash();
  state.train_hash = train_file.body_hash();
  state.valid_hash = has_valid() ? validation->body_hash() : 0;

  std::string reason;
  if (!sizes.marian_compatible(&reason))
    say(
        fmt::format("Note: transformers cannot load this model ({}); Frit can. It is saved as model_type {}: forced "
                    "through MarianMTModel it would translate nonsense",
                    reason, sizes.model_type()));
  model = std::make_unique<Transformer>(sizes, training_options(config, gpu.get()));
  say(fmt::format("Model: {} parameters, {}; {}, {}", format_count(model->workspace().layout().parameters()),
                  config.model.init_from.empty() ? config.model.preset : config.model.init_from, precision_of(config),
                  gpu ? gpu->name() : fmt::format("{} threads", pool.threads())));
  step = std::make_unique<TrainingStep>(*model, pool, step_settings(config, model->workspace()), gpu.get());
  step->context().on_notice = sink;
  early.emplace(EarlyStopperOptions{t.patience, use_bleu(), t.min_delta});
  schedule = make_schedule(config, *batcher);

  if (checkpoint) {
    restore(*checkpoint);
    // What lies behind the step we go on from is of a line of training that was left.
    const auto left = store->list();
    if (!left.empty() && left.back().step > state.updates) store->drop_after(state.updates);
    MetricsWriter::Repair repair;
    metrics.emplace(MetricsWriter::resume(run / "metrics.jsonl", state.updates, &repair, state.metrics_lines));
    state.metrics_lines = repair.kept;
    say(fmt::format("Going on from {}: update {}, epoch {:.2f}, {} trained", checkpoint->path.string(),
                    format_count(state.updates), epochs(), format_duration(state.seconds)));
  } else {
    if (config.model.init_from.empty())
      model->initialise(static_cast<uint32_t>(t.seed), {}, &pool);
    else
      model->load_weights(config.model.init_from);
    metrics.emplace(MetricsWriter::resume(run / "metrics.jsonl", -1));
    state.loss_scale = step->numbers().loss_scale;
    fs::remove(run / "swallowed.jsonl");
    if (config.run.dump_steps > 0) {
      dump.emplace(run, config.run.dump_steps);
      model->save_weights((run / "start.safetensors").string());
    }
  }
  write_file_atomically(run / "config.toml", dump_config(config, true));
  if (config.run.tensorboard)
    tensorboard = std::make_unique<TensorBoardWriter>(run / "tensorboard", wall_time(), state.updates + 1);
  plan();
  if (t.accumulate > 1) {
    micro.resize(static_cast<size_t>(t.accumulate));
    for (Batch& batch : micro) batcher->reserve(&batch);
  }

  const int64_t tokens_before = state.source_tokens + state.target_tokens;
  resumed_at = Clock::now();
  seconds_before = state.seconds;
  show();
  const auto stopped = [&] {
    finish_updates(true);
    // A checkpoint of this very state may be there already.
    if (saved_attempts != state.attempts || state.validation_pending) save(true);
    state.seconds = seconds();
    progress.finish();
    say(fmt::format("Stopped at update {}; run again to go on", format_count(state.updates)));
    return result(TrainEnd::kInterrupted);
  };
  const auto over = [&] {
    return period_reached(stop_after, here()) || (t.stop_after_seconds > 0 && seconds() >= t.stop_after_seconds);
  };
  TrainEnd end = TrainEnd::kFinished;
  Prefetcher prefetcher(*batcher, static_cast<int>(config.data.prefetch));
  bool due = state.validation_pending;
  for (;;) {
    if (due) {
      state.validation_pending = true;
      if (!validate()) return stopped();
      due = false;
    }
    if (early->should_stop()) {
      end = TrainEnd::kEarlyStopped;
      break;
    }
    if (over()) break;
    if (stop_requested()) return stopped();
    // Before a moment at which something is done with the weights, and at the end, all that is on the way comes in.
    const TrainingPosition before = ahead();
    if (!start_update(prefetcher)) return stopped();
    const TrainingPosition now = ahead();
    const bool meet = period_reached(stop_after, now) || period_passed(save_every, before, now) ||
                      (has_valid() && period_passed(valid_every, before, now)) || over();
    const TrainingPosition was = here();
    finish_updates(meet);
    if (!meet) continue;
    if (has_valid() && period_passed(valid_every, was, here())) {
      due = state.validation_pending = true;
      if (!validate()) return stopped();
      due = false;
    }
    if (period_passed(save_every, was, here()) && saved_attempts != state.attempts) save(false);
  }
  finish_updates(true);
  const double trained_s = seconds_between(resumed_at, Clock::now()) - aside_s;
  if (end == TrainEnd::kFinished && !period_reached(stop_after, here()) && state.updates > 0) {
    const double rate = learning_rate(schedule, state.updates);
    if (schedule.total_steps > 0 && rate > schedule.floor)
      say(
          fmt::format("Note: training.stop_after_seconds came at update {} of {}: the {} schedule was cut off at a "
                      "learning rate of {:.3g}, above its end, {:.3g}",
                      format_count(state.updates), format_count(schedule.total_steps), schedule_name(schedule.kind),
                      rate, schedule.floor));
  }
  log_metrics();
  if (has_valid() && state.validated != state.attempts) {
    state.validation_pending = true;
    if (!validate()) return stopped();
  }
  const auto all = store->list();
  if (all.empty() || all.back().step != state.updates) save(false);
  progress.finish();
  if (end == TrainEnd::kEarlyStopped)
    event(fmt::format("Early stopping: no improvement of the {} in {} validations", t.early_stopping_metric,
                      early->stalled()));
  finish_model();
  state.seconds = seconds();
  if (const int64_t tokens = state.source_tokens + state.target_tokens - tokens_before; tokens > 0 && trained_s > 0)
    say(speed_report(*step, model->workspace().layout().parameters(), t.accumulate,
                     static_cast<double>(tokens) / trained_s, [&]() -> const Batch& { return *prefetcher.next(); }));
  say(fmt::format("Done: {} updates, {:.2f} epochs, {} target tokens in {}", format_count(state.updates), epochs(),
                  format_count(state.target_tokens), format_duration(state.seconds)));
  return result(end);
}

Trainer::Trainer(TrainConfig config, TrainerOutput output, TrainerHooks hooks) {
  validate_config(config);
  impl_ = std::make_unique<Impl>(std::move(config), std::move(output), std::move(hooks));
}
Trainer::~Trainer() = default;

TrainResult Trainer::run() {
  return impl_->train();
}

}  // namespace frit
