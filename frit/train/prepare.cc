#include "frit/train/prepare.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/train/period.h"
#include "frit/train/trainer.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// While it lives, says once that stopping has to wait, as soon as it is asked for.
class WaitNotice {
 public:
  WaitNotice(const StopRequested& stop_requested, const Say& say)
      : watcher_([&, this] {
          std::unique_lock lock(mutex_);
          do {
            if (!stop_requested()) continue;
            say("Stopping once the tokenizer is trained: SentencePiece cannot be interrupted");
            return;
          } while (!over_.wait_for(lock, std::chrono::milliseconds(100), [this] { return ended_; }));
        }) {}
  ~WaitNotice() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    over_.notify_one();
    watcher_.join();
  }
  WaitNotice(const WaitNotice&) = delete;
  WaitNotice& operator=(const WaitNotice&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  bool ended_ = false;
  std::thread watcher_;  // last: it uses the others
};

TextOptions text_options(const TrainConfig& config) {
  TextOptions text;
  text.invalid_utf8 = config.data.invalid_utf8 == "skip" ? InvalidUtf8::kSkip : InvalidUtf8::kError;
  return text;
}

// What a tokenizer was made from, by settings, sizes and times: a text file beside it.
std::string tokenizer_origin(const TrainConfig& config) {
  const auto& d = config.data;
  std::string text = fmt::format("tokenizer {}\ninit_from {}\n", d.tokenizer, config.model.init_from);
  if (!d.tokenizer.empty()) return text;
  text += fmt::format("vocabulary {}\nkind {}\njoint {}\nbyte_fallback {}\ninvalid_utf8 {}\nseed {}\n", d.vocabulary,
                      d.tokenizer_kind, d.joint_vocabulary, d.byte_fallback, d.invalid_utf8, config.training.seed);
  for (const std::string& path : {d.train_source, d.train_target}) {
    std::error_code error;
    const auto size = fs::file_size(path, error);
    if (error) fail("[train] cannot read {}: {}", path, error.message());
    text += fmt::format("text {} {}\n", size, fs::last_write_time(path).time_since_epoch().count());
  }
  return text;
}

bool has_tokenizer(const std::string& directory) {
  return !directory.empty() && fs::exists(fs::path(directory) / "source.spm");
}

struct Vocabularies {
  int64_t source, target;
};

// Without vocabularies: those of model.init_from, or the configured size.
TransformerConfig config_of(const TrainConfig& config, std::optional<Vocabularies> vocabularies, bool one_vocabulary) {
  const auto& m = config.model;
  TransformerConfig c;
  if (m.init_from.empty()) {
    c = TransformerConfig::preset(m.preset);
  } else {
    c = TransformerConfig::read(m.init_from);
    if (c.start_id != c.pad_id)  // as fairseq's do, with </s>
      fail("[train] the model {} starts its decoder with token {}, training does with the pad token, {}", m.init_from,
           c.start_id, c.pad_id);
  }
  const auto size = [](int64_t from, int64_t* to) {
    if (from > 0) *to = from;
  };
  size(m.encoder_layers, &c.encoder_layers), size(m.decoder_layers, &c.decoder_layers);
  size(m.d_model, &c.d_model), size(m.max_positions, &c.max_positions);
  size(m.heads, &c.encoder_heads), size(m.heads, &c.decoder_heads);
  size(m.ffn, &c.encoder_ffn_dim), size(m.ffn, &c.decoder_ffn_dim);
  if (!m.activation.empty()) c.activation = parse_activation(m.activation);
  if (!m.norm.empty()) c.pre_norm = m.norm == "pre";
  if (!m.positions.empty()) c.positions = parse_positions(m.positions);
  if (!m.scale_embedding.empty()) c.scale_embedding = m.scale_embedding == "true";
  if (!m.embeddings.empty()) c.share_embeddings = m.embeddings == "shared";
  if (m.dropout >= 0) c.dropout = m.dropout;
  if (m.attention_dropout >= 0) c.attention_dropout = m.attention_dropout;
  if (m.activation_dropout >= 0) c.activation_dropout = m.activation_dropout;
  if (!one_vocabulary) {
    if (m.embeddings == "shared")
      fail(
          "[config] model.embeddings is shared, but source and target have vocabularies of their own: set "
          "data.joint_vocabulary = true or model.embeddings = \"separate\"");
    c.share_embeddings = false;
  }
  if (!vocabularies && m.init_from.empty()) vocabularies = {config.data.vocabulary, config.data.vocabulary};
  if (vocabularies) {
    const auto [source, target] = *vocabularies;
    if (!m.init_from.empty() && (c.source_vocab != source || c.target_vocab != target))
      fail("[train] the model {} has vocabularies of {} and {} tokens, the tokenizer {} and {}", m.init_from,
           c.source_vocab, c.target_vocab, source, target);
    c.source_vocab = source, c.target_vocab = target;
  }
  if (config.data.max_length > c.max_positions)
    fail("[config] data.max_length is {}, but the model has {} positions (model.max_positions)", config.data.max_length,
         c.max_positions);
  return c;
}

}  // namespace

RunLock::RunLock(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) fail("[train] cannot make folder {}: {}", directory.string(), error.message());
  const fs::path path = directory / "lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("[train] cannot open {}: {}", path.string(), std::strerror(errno));
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
  const int reason = errno;
  ::close(fd_);
  if (reason == EWOULDBLOCK) fail("[train] another training uses {}", directory.string());
  fail("[train] cannot lock {}: {}", path.string(), std::strerror(reason));
}
RunLock::~RunLock() {
  ::close(fd_);
}

namespace {
void check_device(const std::string& device) {
  if (device != "cpu" && (device == "cuda") != built_with_cuda())
    fail("[config] run.device is {}, but this build of frit has {}", device,
         built_with_cuda()
             ? "CUDA, not the simulator"
             : "no CUDA (cmake --preset cuda makes one that has; run.device simulator plans as cuda does)");
}
}  // namespace

void check_settings(const TrainConfig& config) {
  // The sizes, with vocabularies that fit: which ones there are the tokenizer will tell.
  const bool trained = config.data.tokenizer.empty() && config.model.init_from.empty();
  config_of(config, std::nullopt, trained ? config.data.joint_vocabulary : true).validate();
  const Period warmup = parse_period(config.training.warmup), stop = parse_period(config.training.stop_after);
  if (config.training.schedule == "linear" || config.training.schedule == "cosine") {
    if (stop.never())
      fail("[config] training.schedule {} needs training.stop_after: it ends there", config.training.schedule);
    if (warmup.unit == stop.unit && warmup.count >= stop.count)
      fail("[config] training.warmup is {}, expected less than training.stop_after, which is {}",
           config.training.warmup, config.training.stop_after);
  }
}

void check_before_preparing(const TrainConfig& config) {
  check_device(config.run.device);
  if (config.training.batch_tokens == 0 && config.run.device != "cuda")
    fail(
        "[config] training.batch_tokens 0 takes the largest batches that fit on a GPU: give a number for run.device {}",
        config.run.device);
  const auto& d = config.data;
  const auto& m = config.model;
  for (const auto& [key, path] : {std::pair{"data.train_source", &d.train_source},
                                  {"data.train_target", &d.train_target},
                                  {"data.valid_source", &d.valid_source},
                                  {"data.valid_target", &d.valid_target}}) {
    if (path->empty()) continue;
    std::error_code error;
    if (!fs::exists(*path, error)) fail("[config] {} is {}, which does not exist", key, *path);
    if (fs::is_directory(*path, error)) fail("[config] {} is {}, which is a folder, expected a file", key, *path);
    if (::access(path->c_str(), R_OK) != 0) fail("[config] {} is {}: {}", key, *path, std::strerror(errno));
  }
  for (const auto& [key, path] : {std::pair{"data.tokenizer", &d.tokenizer}, {"model.init_from", &m.init_from}})
    if (!path->empty() && !fs::is_directory(*path)) fail("[config] {} is {}, which is no folder", key, *path);
  check_settings(config);
}

Tokenizer prepare_tokenizer(const TrainConfig& config, const fs::path& run, bool resuming, const Say& say,
                            const StopRequested& stop_requested) {
  const fs::path place = run / "tokenizer", origin_path = run / "tokenizer-origin.txt";
  const std::string origin = resuming ? "" : tokenizer_origin(config);
  if (resuming && !has_tokenizer(place.string()))
    fail("[train] {} has checkpoints, but no tokenizer in {}: put it back, or train into another run.directory",
         run.string(), place.string());
  if (resuming || (has_tokenizer(place.string()) && fs::exists(origin_path) && read_file(origin_path) == origin)) {
    Tokenizer tokenizer = Tokenizer::load(place.string());
    say(fmt::format("Tokenizer: {} (made before)", place.string()));
    return tokenizer;
  }
  const Stopwatch watch;
  std::optional<Tokenizer> tokenizer;
  std::string how;
  if (!config.data.tokenizer.empty() || has_tokenizer(config.model.init_from)) {
    const std::string& from = config.data.tokenizer.empty() ? config.model.init_from : config.data.tokenizer;
    tokenizer = Tokenizer::load(from);
    how = "taken from " + from;
  } else {
    TokenizerTraining options;
    options.model = config.data.tokenizer_kind == "bpe" ? SubwordModel::kBpe : SubwordModel::kUnigram;
    options.vocabulary = static_cast<int32_t>(config.data.vocabulary);
    options.joint = config.data.joint_vocabulary;
    options.byte_fallback = config.data.byte_fallback;
    options.seed = static_cast<uint64_t>(config.training.seed);
    say(fmt::format("Tokenizer: training {} with {} tokens on {} and {} ...", config.data.tokenizer_kind,
                    config.data.vocabulary, config.data.train_source, config.data.train_target));
    TextCounts counts;
    const WaitNotice notice(stop_requested, say);
    tokenizer =
        Tokenizer::train(config.data.train_source, config.data.train_target, options, text_options(config), &counts);
    how = "trained on " + counts.to_string();
  }
  std::error_code error;
  fs::remove(origin_path, error);  // while the files change, they are of unknown origin
  fs::create_directories(place, error);
  tokenizer->save(place.string());
  write_file_atomically(origin_path, origin);
  say(fmt::format("Tokenizer: {} source and {} target tokens, {} ({:.1f} s)", tokenizer->vocabulary_size(Side::kSource),
                  tokenizer->vocabulary_size(Side::kTarget), how, watch.seconds()));
  return *tokenizer;
}

TokenFile prepare_tokens(const TrainConfig& config, const fs::path& run, const char* name, const std::string& source,
                         const std::string& target, const Tokenizer& tokenizer, ThreadPool& pool, const Say& say,
                         const StopRequested& stop_requested) {
  const Stopwatch watch;
  std::error_code error;
  fs::create_directories(run / "data", error);
  // What a killed run left half-written; the lock of the run directory keeps others out.
  const std::string begun = fmt::format("{}.tokens", name);
  for (const fs::directory_entry& entry : fs::directory_iterator(run / "data", error)) {
    const std::string file = entry.path().filename().string();
    std::error_code ignored;
    if (file.starts_with(begun) && file.find(".tmp-") != std::string::npos) fs::remove(entry.path(), ignored);
  }
  TokenFileOptions options;
  options.text = text_options(config);
  options.stop_requested = stop_requested;
  bool built = false;
  TokenFile file = TokenFile::open_or_build((run / "data" / fmt::format("{}.tokens", name)).string(), source, target,
                                            tokenizer, pool, options, &built);
  say(fmt::format("Text ({}): {}; {} source and {} target tokens ({} in {:.1f} s)", name, file.counts().to_string(),
                  with_commas(file.source_tokens()), with_commas(file.target_tokens()),
                  built ? "tokenised" : "made before, opened", watch.seconds()));
  return file;
}

TransformerConfig model_config(const TrainConfig& config, const Tokenizer& tokenizer) {
  TransformerConfig c = config_of(
      config, Vocabularies{tokenizer.vocabulary_size(Side::kSource), tokenizer.vocabulary_size(Side::kTarget)},
      !tokenizer.separate_vocabularies());
  c.pad_id = c.start_id = tokenizer.pad_id();
  c.eos_id = tokenizer.eos_id();
  c.validate();
  return c;
}

TransformerConfig model_config(const TrainConfig& config) {
  TransformerConfig c =
      config_of(config, Vocabularies{config.data.vocabulary, config.data.vocabulary}, config.data.joint_vocabulary);
  c.validate();
  return c;
}

BatcherOptions train_batches(const TrainConfig& config, const TokenFile& file, const Tokenizer& tokenizer) {
  BatcherOptions options;
  options.max_tokens = config.training.batch_tokens;
  options.max_length = config.data.max_length;
  // Pairs that fill as many batches as the window has.
  const double mean = static_cast<double>(std::max(file.source_tokens(), file.target_tokens())) /
                      static_cast<double>(std::max<int64_t>(1, file.sentences()));
  options.window = std::max<int64_t>(
      1, std::llround(static_cast<double>(config.data.window) * static_cast<double>(options.max_tokens) / mean));
  options.seed = static_cast<uint64_t>(config.training.seed);
  options.decoder_start_id = tokenizer.pad_id();
  options.sampling = {static_cast<float>(config.data.subword_alpha), static_cast<int>(config.data.subword_nbest),
                      static_cast<uint64_t>(config.training.seed)};
  return options;
}

BatcherOptions valid_batches(const TrainConfig& config, const TransformerConfig& model, const TokenFile& file) {
  BatcherOptions options;
  options.max_tokens = std::max(config.training.batch_tokens, std::min(model.max_positions, config.data.max_length));
  options.max_length = model.max_positions;
  int64_t longest = 0;
  for (int64_t i = 0; i < file.sentences(); ++i) {
    const int64_t length = std::max(file.source_length(i), file.target_length(i));
    if (length <= model.max_positions) longest = std::max(longest, length);
  }
  options.max_tokens = std::max(options.max_tokens, longest);
  options.shuffle = false;
  options.decoder_start_id = static_cast<int32_t>(model.start_id);
  return options;
}

std::unique_ptr<Gpu> training_gpu(const TrainConfig& config) {
  const std::string& device = config.run.device;
  if (device == "cpu") return nullptr;
  check_device(device);
  return make_gpu();
}

Transformer::Options training_options(const TrainConfig& config, Gpu* gpu) {
  const auto& t = config.training;
  Transformer::Options options;
  options.device = gpu;
  options.precision = parse_precision(precision_of(config));
  options.training = true;
  options.moments = t.optimizer != "sgd" ? 2 : t.momentum != 0 ? 1 : 0;
  options.gradient_dtype = t.accumulate > 1 ? DType::kF32 : compute_dtype(options.precision);
  return options;
}

BatchSize full_batch(const TrainConfig& config, int64_t tokens) {
  if (tokens == 0) tokens = config.training.batch_tokens;
  const int64_t longest = std::min(config.data.max_length, tokens);
  return {tokens, tokens, tokens / longest, longest, longest};
}

namespace {
// Logits of all of a usual batch are a fifth of its temporaries; in two pieces they cost half of that, and the weight's
// gradient one more addition. Large batches can do with smaller shares.
int64_t criterion_rows(const TrainConfig& config) {
  const auto& t = config.training;
  if (t.criterion_rows >= 0) return t.criterion_rows;
  if (config.run.device == "cpu") return 512;
  constexpr int64_t kFewest = 2048, kMost = 4096;
  return t.batch_tokens == 0 ? kMost : std::clamp<int64_t>((t.batch_tokens + 1) / 2, kFewest, kMost);
}
}  // namespace

StepSettings step_settings(const TrainConfig& config, const Workspace& workspace) {
  const auto& t = config.training;
  StepSettings s;
  s.criterion.smoothing = static_cast<float>(t.label_smoothing);
  s.criterion.chunk_rows = criterion_rows(config);
  s.recompute = t.recompute == "layer"         ? Recompute::kLayer
                : t.recompute == "activations" ? Recompute::kActivations
                                               : Recompute::kNone;
  s.optimizer.kind = parse_optimizer(t.optimizer);
  s.optimizer.beta1 = t.beta1, s.optimizer.beta2 = t.beta2, s.optimizer.eps = t.eps;
  s.optimizer.momentum = t.momentum;
  s.optimizer.weight_decay = t.weight_decay;
  s.optimizer.decay_end = workspace.layout().decay_end();
  s.optimizer.nearest = t.rounding == "nearest";
  s.optimizer.seed = static_cast<uint32_t>(t.seed);
  s.prepare.max_norm = t.clip_norm;
  const bool half = workspace.parameters().dtype() == DType::kF16;
  // Of the optimizer's interval 0 says that the scale stays; ours that it only falls.
  constexpr int64_t kNever = int64_t{1} << 60;
  s.prepare.growth_interval = !half ? 0 : t.loss_scale_growth == 0 ? kNever : t.loss_scale_growth;
  s.loss_scale = half ? static_cast<float>(t.loss_scale) : 1.0f;
  s.ema_decay = s.prepare.ema_decay = t.ema_decay;
  s.graphs = config.run.graphs, s.planned_memory = config.run.planned_memory, s.packed = config.run.packed;
  s.per_tensor_update = t.trainer == "per_tensor";
  s.count_swallowed = t.count_swallowed;
  s.seed = static_cast<uint32_t>(t.seed);
  s.attention = config.run.attention, s.gemm = config.run.gemm, s.bias_gradient = config.run.bias_gradient;
  s.fused_norm = config.run.fused_norm;
  return s;
}

Schedule make_schedule(const TrainConfig& config, const Batcher& batcher) {
  const auto& t = config.training;
  const Period warmup = parse_period(t.warmup), stop = parse_period(t.stop_after);
  Schedule s;
  s.kind = parse_schedule(t.schedule);
  s.peak = t.learning_rate;
  double updates_an_epoch = 0, tokens_an_epoch = 0;
  const auto updates_of = [&](const Period& period) -> int64_t {
    if (period.unit == PeriodUnit::kUpdates) return std::llround(period.count);
    if (updates_an_epoch == 0) {
      const std::vector<BatchSize> sizes = batcher.sizes(0);
      updates_an_epoch = static_cast<double>(sizes.size()) / static_cast<double>(t.accumulate);
      for (const BatchSize& size : sizes) tokens_an_epoch += static_cast<double>(size.target_tokens);
    }
    const double epochs = period.unit == PeriodUnit::kEpochs ? period.count : period.count / tokens_an_epoch;
    return std::max<int64_t>(period.never() ? 0 : 1, std::llround(epochs * updates_an_epoch));
  };
  s.warmup_steps = updates_of(warmup);
  if (s.kind == ScheduleKind::kLinear || s.kind == ScheduleKind::kCosine) {
    if (stop.never()) fail("[config] training.schedule {} needs training.stop_after: it ends there", t.schedule);
    s.total_steps = updates_of(stop);
    if (s.total_steps <= s.warmup_steps)
      fail("[config] training.warmup {} is {} updates, not less than the {} of training.stop_after {}", t.warmup,
           s.warmup_steps, s.total_steps, t.stop_after);
  }
  check_schedule(s);
  return s;
}

}  // namespace frit
