#include "frit/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <ostream>
#include <streambuf>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/data/prefetch.h"
#include "frit/train/averaging.h"
#include "frit/train/checkpoint_store.h"
#include "frit/train/early_stopping.h"
#include "frit/train/metrics.h"
#include "frit/train/period.h"
#include "frit/train/prepare.h"
#include "frit/train/progress.h"
#include "frit/train/run_state.h"
#include "frit/train/tensorboard.h"
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
std::span<std::byte> bytes_of(const Tensor& block) {
  return {static_cast<std::byte*>(block.raw()), static_cast<size_t>(block.bytes())};
}

// Swallows everything: the log of a silent trainer.
struct NullBuffer : std::streambuf {
  int overflow(int c) override { return c; }
  std::streamsize xsputn(const char*, std::streamsize n) override { return n; }
};

// Elements [begin, end) of the parameters in fp32, from the master or with the residual where there is one. `scratch`
// has room for them; it is used where they do not lie in memory as fp32 already.
std::span<const float> read_f32(const Workspace& w, int64_t begin, int64_t end, float* scratch) {
  const auto count = static_cast<size_t>(end - begin);
  const Tensor exact = w.precision() == Precision::kF32 ? w.parameters() : w.master();
  if (exact.defined()) return {exact.data<float>() + begin, count};
  const bfloat16* p = w.parameters().data<bfloat16>() + begin;
  if (w.residual().defined()) {
    const bfloat16* low = w.residual().data<bfloat16>() + begin;
    for (size_t i = 0; i < count; ++i) scratch[i] = join_float({p[i].bits, low[i].bits});
  } else {
    for (size_t i = 0; i < count; ++i) scratch[i] = static_cast<float>(p[i]);
  }
  return {scratch, count};
}

// The weights' exponential moving average, fp32, and its way into the model for validation.
class Ema {
 public:
  Ema(const Workspace& workspace, ThreadPool& pool) : workspace_(workspace), pool_(pool) {
    block_ = allocate_block(static_cast<size_t>(elements()) * sizeof(float));
    std::memset(block_.get(), 0, static_cast<size_t>(elements()) * sizeof(float));
    if (workspace.precision() != Precision::kF32)
      aside_ = allocate_block(static_cast<size_t>(elements()) * sizeof(bfloat16));
  }

  std::span<float> values() const { return {reinterpret_cast<float*>(block_.get()), static_cast<size_t>(elements())}; }

  void update(double decay) {
    pool_.parallel_for(elements(), 1 << 16, [&](int64_t begin, int64_t end, int) {
      constexpr int64_t kPiece = 4096;
      float scratch[kPiece];
      for (int64_t i = begin; i < end; i += kPiece) {
        const int64_t to = std::min(end, i + kPiece);
        ema_update(values().subspan(static_cast<size_t>(i), static_cast<size_t>(to - i)),
                   read_f32(workspace_, i, to, scratch), decay);
      }
    });
  }

  // While it lives, the model computes with the average.
  class InModel {
   public:
    explicit InModel(Ema& ema) : ema_(ema) { ema_.exchange(true); }
    ~InModel() { ema_.exchange(false); }
    InModel(const InModel&) = delete;
    InModel& operator=(const InModel&) = delete;

   private:
    Ema& ema_;
  };

 private:
  int64_t elements() const { return workspace_.layout().elements(); }
  void exchange(bool in) {
    const Tensor p = workspace_.parameters();
    pool_.parallel_for(elements(), 1 << 16, [&](int64_t begin, int64_t end, int) {
      if (p.dtype() == DType::kF32) {
        std::swap_ranges(p.data<float>() + begin, p.data<float>() + end, values().data() + begin);
        return;
      }
      bfloat16 *to = p.data<bfloat16>(), *aside = reinterpret_cast<bfloat16*>(aside_.get());
      if (in) {
        std::copy(to + begin, to + end, aside + begin);
        for (int64_t i = begin; i < end; ++i) to[i] = bfloat16(values()[static_cast<size_t>(i)]);
      } else {
        std::copy(aside + begin, aside + end, to + begin);
      }
    });
  }

  const Workspace& workspace_;
  ThreadPool& pool_;
  Block block_, aside_;
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
  std::unique_ptr<Transformer> model;
  std::unique_ptr<Ema> ema;
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
  double epochs() const {
    return static_cast<double>(state.position.epoch) +
           static_cast<double>(state.epoch_sentences) /
               static_cast<double>(std::max<int64_t>(1, batcher->counts().used()));
  }
  TrainingPosition here() const { return {state.updates, epochs(), state.target_tokens}; }
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
  void plan();
  bool do_update(Prefetcher& prefetcher);
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
  read_blob(checkpoint, "parameters", bytes_of(w.parameters()));
  for (const auto& [name, block] : {std::pair{"master", w.master()},
                                    {"residual", w.residual()},
                                    {"moment1", w.moment1()},
                                    {"moment2", w.moment2()}})
    if (block.defined()) read_blob(checkpoint, name, bytes_of(block));
  if (ema) read_blob(checkpoint, "ema", std::as_writable_bytes(ema->values()));
  early->restore(state.early_stopping);
  batcher->seek(state.position);
  saved_attempts = state.attempts;
}

void Trainer::Impl::save(bool interrupted, std::optional<double> metric) {
  const Workspace& w = model->workspace();
  for (const Tensor& block : {w.parameters(), w.master()})
    if (block.defined() && !std::isfinite(step->sum_of_squares(block)))
      fail(
          "[train] the weights are not finite after update {}: no checkpoint is written; lower training.learning_rate "
          "and go on from the last one",
          state.updates);
  state.seconds = seconds();
  state.early_stopping = early->save();
  const std::string json = state.to_json(), toml = dump_config(config, false);
  std::vector<CheckpointBlob> blobs = {CheckpointBlob::text("state.json", json),
                                       CheckpointBlob::text("config.toml", toml),
                                       {"parameters", {bytes_of(w.parameters())}}};
  for (const auto& [name, block] : {std::pair{"master", w.master()},
                                    {"residual", w.residual()},
                                    {"moment1", w.moment1()},
                                    {"moment2", w.moment2()}})
    if (block.defined()) blobs.push_back({name, {bytes_of(block)}});
  if (ema) blobs.push_back(CheckpointBlob::array("ema", ema->values()));
  metrics->sync();
  (interrupted ? *aside : *store).save(state.updates, blobs, metric);
  saved_attempts = state.attempts;
}

// Plans every key of the first epoch and of validation, and reserves the arena.
void Trainer::Impl::plan() {
  const Clock::time_point begin = Clock::now();
  // Sampling changes lengths from epoch to epoch, and takes as long as reading an epoch: the largest key will do.
  if (config.data.subword_alpha == 0)
    for (const BatchSize& size : batcher->sizes(0))
      step->plan(TrainingStep::Kind::kTrain, size.source_tokens, size.target_tokens);
  else
    step->plan(TrainingStep::Kind::kTrain, config.training.batch_tokens, config.training.batch_tokens);
  if (has_valid()) validation->plan(*step);
  if (!step->planned()) {
    say(fmt::format("Memory: {} parameters, gradients and optimizer; temporaries from the heap (run.attention {})",
                    mib(static_cast<size_t>(model->workspace().bytes())), config.run.attention));
    return;
  }
  step->reserve();
  step->on_grow = [this](size_t before, size_t after) {
    event(fmt::format("Memory: a batch of a new size made the arena grow from {} to {}", mib(before), mib(after)));
  };
  say(
      fmt::format("Memory: {} parameters, gradients and optimizer; {} arena for {} batch sizes (without sharing {}), "
                  "planned in {:.1f} s",
                  mib(static_cast<size_t>(model->workspace().bytes())), mib(step->arena_bytes()), step->plans(),
                  mib(step->total()), seconds_between(begin, Clock::now())));
}

// Trains on the next batches and updates. False if stopping was asked for in between: the step is then to be done
// again from its first batch, which the saved position still names.
bool Trainer::Impl::do_update(Prefetcher& prefetcher) {
  const int64_t count = config.training.accumulate;
  int64_t target_tokens = 0, source_tokens = 0;
  BatchPosition position = state.position;
  int64_t epoch_sentences = state.epoch_sentences;
  const Batch* first = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const Batch* batch = prefetcher.next();
    target_tokens += batch->target_tokens(), source_tokens += batch->source_tokens();
    epoch_sentences = prefetcher.position().epoch == position.epoch ? epoch_sentences + batch->sentences() : 0;
    position = prefetcher.position();
    if (count == 1)
      first = batch;
    else
      micro[static_cast<size_t>(i)] = *batch;  // within its reserved capacity
  }
  double loss = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0 && stop_requested()) return false;
    loss +=
        step->forward_backward(first ? *first : micro[static_cast<size_t>(i)], target_tokens, state.attempts, i).loss;
  }
  if (hooks.before_update) hooks.before_update(state.attempts, model->workspace());
  const double rate = learning_rate(schedule, state.updates + 1);
  UpdateResult update;
  if (std::isfinite(loss)) {
    update = step->update(rate, state.updates + 1);
  } else {
    update.finite = false;
    update.grad_norm = loss;
  }
  ++state.attempts;
  state.position = position, state.epoch_sentences = epoch_sentences;
  if (update.finite) {
    ++state.updates;
    state.skipped_in_a_row = 0;
    state.target_tokens += target_tokens, state.source_tokens += source_tokens;
    state.window_loss += loss, state.window_tokens += target_tokens;
    last_norm = update.grad_norm;
    if (ema) ema->update(ema_decay(config.training.ema_decay, state.updates));
    if (hooks.after_update) hooks.after_update(state.updates);
    return true;
  }
  ++state.skipped, ++state.skipped_in_a_row;
  event(fmt::format("Update {} skipped: {} is not finite ({} skipped so far)", state.updates + 1,
                    std::isfinite(loss) ? "the gradient" : "the loss", state.skipped));
  if (state.skipped_in_a_row >= config.training.max_not_finite)
    fail(
        "[train] {} updates in a row were not finite (training.max_not_finite): training stops; no checkpoint holds "
        "them. Lower training.learning_rate, or set training.clip_norm if it is 0",
        state.skipped_in_a_row);
  return true;
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
}

// Loss, perplexity and translations of the validation text, with the averaged weights if there are any. False if
// stopping was asked for before it was done.
bool Trainer::Impl::validate() {
  const Clock::time_point begin = Clock::now();
  std::optional<Ema::InModel> averaged;
  if (ema) averaged.emplace(*ema);
  const auto result = validation->run(*step, *model, [this] { return stop_requested(); });
  if (!result) return false;
  averaged.reset();
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
  const Workspace& trained = model->workspace();
  const int64_t elements = trained.layout().elements();
  const auto count = static_cast<size_t>(elements);
  const auto read = [&](const CheckpointInfo& checkpoint) {
    std::vector<float> values(count);
    const auto into = std::as_writable_bytes(std::span(values));
    if (ema) {
      read_blob(checkpoint, "ema", into);
    } else if (trained.precision() == Precision::kF32) {
      read_blob(checkpoint, "parameters", into);
    } else if (trained.precision() == Precision::kBF16Master) {
      read_blob(checkpoint, "master", into);
    } else {
      std::vector<uint16_t> high(count), low(count);
      read_blob(checkpoint, "parameters", std::as_writable_bytes(std::span(high)));
      if (trained.precision() == Precision::kBF16Residual)
        read_blob(checkpoint, "residual", std::as_writable_bytes(std::span(low)));
      for (size_t i = 0; i < count; ++i)
        values[i] = trained.precision() == Precision::kBF16Residual ? join_float({high[i], low[i]})
                                                                    : static_cast<float>(bfloat16::from_bits(high[i]));
    }
    return values;
  };
  std::vector<float> values;
  if (sources.size() == 1) {
    values = read(sources[0]);
  } else {
    WeightAverage average;
    for (const CheckpointInfo& source : sources) average.add(read(source));
    values.resize(count);
    average.mean(values);
  }
  std::copy(values.begin(), values.end(), final_model.workspace().parameters().data<float>());

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
  batcher.emplace(train_file, train_batches(config, train_file, *tokenizer), &*tokenizer);
  say("Batches: " + batcher->counts().to_string(batcher->options()));
  sizes = model_config(config, *tokenizer);
  if (!config.data.valid_source.empty())
    validation = std::make_unique<Validation>(config, sizes, *tokenizer, std::move(valid_file), pool, sink);
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
  model = std::make_unique<Transformer>(sizes, training_options(config));
  say(fmt::format("Model: {} parameters, {}; {}, {} threads", format_count(model->workspace().layout().parameters()),
                  config.model.init_from.empty() ? config.model.preset : config.model.init_from, t.precision,
                  pool.threads()));
  if (t.ema_decay > 0) ema = std::make_unique<Ema>(model->workspace(), pool);
  step = std::make_unique<TrainingStep>(*model, pool, step_settings(config, model->workspace()));
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
      model->initialise(static_cast<uint32_t>(t.seed));
    else
      model->load_weights(config.model.init_from);
    metrics.emplace(MetricsWriter::resume(run / "metrics.jsonl", -1));
  }
  write_file_atomically(run / "config.toml", dump_config(config, true));
  if (config.run.tensorboard)
    tensorboard = std::make_unique<TensorBoardWriter>(run / "tensorboard", wall_time(), state.updates + 1);
  plan();
  if (t.accumulate > 1) {
    micro.resize(static_cast<size_t>(t.accumulate));
    for (Batch& batch : micro) batcher->reserve(&batch);
  }

  resumed_at = Clock::now();
  seconds_before = state.seconds;
  show();
  const auto stopped = [&] {
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
    const TrainingPosition before = here();
    if (!do_update(prefetcher)) return stopped();
    const TrainingPosition now = here();
    show();
    if (period_passed(log_every, before, now)) log_metrics();
    if (has_valid() && period_passed(valid_every, before, now)) {
      due = state.validation_pending = true;
      if (!validate()) return stopped();
      due = false;
    }
    if (period_passed(save_every, before, now) && saved_attempts != state.attempts) save(false);
  }
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
