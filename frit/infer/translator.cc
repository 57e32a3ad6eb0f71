#include "frit/infer/translator.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <future>
#include <istream>
#include <limits>
#include <mutex>
#include <ostream>
#include <set>
#include <thread>
#include <utility>

#include "frit/backend/queue.h"
#include "frit/data/batcher.h"
#include "frit/infer/bounded_queue.h"
#include "frit/infer/gpu_generate.h"

namespace frit {
namespace {

// The part of ids that fits the positions, EOS kept.
void cut_to(std::vector<int32_t>& ids, int64_t most) {
  if (static_cast<int64_t>(ids.size()) <= most) return;
  const int32_t eos = ids.back();
  ids.resize(static_cast<size_t>(most));
  ids.back() = eos;
}

std::vector<std::vector<Translation>> detokenise(std::vector<std::vector<Hypothesis>>& lists,
                                                 const Tokenizer& tokenizer, ThreadPool& pool) {
  std::vector<std::vector<Translation>> results(lists.size());
  pool.parallel_for(static_cast<int64_t>(lists.size()), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      for (Hypothesis& h : lists[static_cast<size_t>(i)]) {
        std::string text = tokenizer.decode(h.tokens, Side::kTarget);
        results[static_cast<size_t>(i)].push_back({std::move(text), h.score, std::move(h.tokens)});
      }
  });
  return results;
}

// A GPU takes about as long for fewer sentences than these.
constexpr int64_t kFewSentences = 32;

// Batches of the sizes allowed, and so many that all workers have about one, or two where they are large enough: the
// longest sentences come first, so that the last and shortest batches even out.
std::vector<std::vector<int64_t>> plan_batches(std::span<const int64_t> lengths, const TranslateOptions& options,
                                               int64_t workers) {
  int64_t most = options.batch_sentences;
  if (workers > 1) {
    const auto count = static_cast<int64_t>(lengths.size());
    const int64_t wanted =
        std::min(count >= 4 * kFewSentences * workers ? 2 * workers : workers, count / kFewSentences);
    if (wanted > 1) {
      const int64_t share = sentence_bucket((count + wanted - 1) / wanted);
      most = most > 0 ? std::min(most, share) : share;
    }
  }
  return plan_inference_batches(lengths, options.batch_tokens, most);
}

int worker_count(const TranslatorDevice& where, bool on_gpu) {
  constexpr int kMost = 64;
  if (where.workers < 0 || where.workers > kMost)
    fail("[translate] there are {} workers, expected 0 (the usual number) to {}", where.workers, kMost);
  if (where.workers > 1 && !on_gpu)
    fail("[translate] {} workers need a GPU: on the CPU all threads work at one batch", where.workers);
  return where.workers > 0 ? where.workers : on_gpu ? kUsualWorkers : 1;
}

}  // namespace

HypothesisLists generate_all(Generator& generator, std::span<const GenerateInput> inputs,
                             const GenerateOptions& options, int64_t batch_tokens) {
  options.validate(generator.config());
  std::vector<int64_t> lengths;
  for (const GenerateInput& input : inputs) lengths.push_back(static_cast<int64_t>(input.source.size()));
  HypothesisLists results(inputs.size());
  std::vector<GenerateInput> batch;
  for (const std::vector<int64_t>& group : plan_inference_batches(lengths, batch_tokens)) {
    batch.clear();
    for (const int64_t i : group) batch.push_back(inputs[static_cast<size_t>(i)]);
    HypothesisLists lists = generator.generate(batch, options);
    for (size_t i = 0; i < group.size(); ++i) results[static_cast<size_t>(group[i])] = std::move(lists[i]);
  }
  return results;
}

std::vector<std::vector<int32_t>> read_sources(const TokenFile& file, int64_t limit) {
  const int64_t count = limit > 0 ? std::min(limit, file.sentences()) : file.sentences();
  std::vector<std::vector<int32_t>> sources(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    sources[static_cast<size_t>(i)].resize(static_cast<size_t>(file.source_length(i)));
    file.read_source(i, sources[static_cast<size_t>(i)].data());
  }
  return sources;
}

std::vector<std::string> read_references(const TokenFile& file, const Tokenizer& tokenizer, int64_t limit) {
  const int64_t count = limit > 0 ? std::min(limit, file.sentences()) : file.sentences();
  std::vector<std::string> texts;
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.resize(static_cast<size_t>(file.target_length(i)));
    file.read_target(i, ids.data());
    texts.push_back(tokenizer.decode(ids, Side::kTarget));
  }
  return texts;
}

std::vector<std::string> translate_ids(Generator& generator, const Tokenizer& tokenizer,
                                       std::span<const std::vector<int32_t>> sources, const GenerateOptions& options,
                                       int64_t batch_tokens) {
  const int64_t most = generator.config().max_positions;
  std::vector<std::vector<int32_t>> shortened;  // of sources that are too long
  shortened.reserve(sources.size());
  std::vector<GenerateInput> inputs;
  for (size_t i = 0; i < sources.size(); ++i) {
    std::span<const int32_t> source = sources[i];
    if (static_cast<int64_t>(source.size()) > most) {
      shortened.push_back(sources[i]);
      cut_to(shortened.back(), most);
      source = shortened.back();
    }
    inputs.push_back({source, {}, i});
  }
  std::vector<std::string> texts;
  for (const auto& list : generate_all(generator, inputs, options, batch_tokens))
    texts.push_back(list.empty() ? std::string() : tokenizer.decode(list[0].tokens, Side::kTarget));
  return texts;
}

std::unique_ptr<Gpu> open_gpu(std::string_view device) {
  if (device == "cpu") return nullptr;
  if (device != "cuda" && device != "simulator")
    fail("[translate] no device is called {}, expected cpu, cuda or simulator", device);
  if ((device == "cuda") != built_with_cuda())
    fail("[translate] the device is {}, but this build of frit has {}", device,
         built_with_cuda() ? "CUDA, not the simulator" : "no CUDA (cmake --preset cuda makes one that has)");
  return make_gpu();
}

Precision decoding_precision(std::string_view dtype, bool on_gpu) {
  if (dtype == "fp32") return Precision::kF32;
  if (dtype != "fp16" && dtype != "bf16") fail("[translate] dtype is {}, expected fp32, fp16 or bf16", dtype);
  if (!on_gpu) fail("[translate] dtype {} needs a GPU: on the CPU decoding computes in fp32", dtype);
  return dtype == "fp16" ? Precision::kF16Stochastic : Precision::kBF16Stochastic;
}

struct Translator::Impl {
  // What translates a batch at a time.
  struct Worker {
    Worker(ThreadPool& pool, std::unique_ptr<Gpu> own_queue, Gpu* gpu)
        : queue(std::move(own_queue)), memory(gpu), context(pool, memory, gpu) {}
    const std::unique_ptr<Gpu> queue;  // none: the model's
    Memory memory;
    Context context;
    std::unique_ptr<Generator> generator;
  };
  Impl(const std::string& directory, ThreadPool& p, const TranslatorDevice& where)
      : pool(p), gpu(open_gpu(where.device)), generation(GenerationConfig::read(directory)) {
    const int count = worker_count(where, gpu != nullptr);
    std::future<Tokenizer> reading = std::async(std::launch::async, [&] { return Tokenizer::load(directory); });
    model = Transformer::load(directory,
                              {.precision = decoding_precision(where.dtype, gpu != nullptr), .device = gpu.get()});
    for (int i = 0; i < count; ++i) {
      std::unique_ptr<Gpu> queue = i > 0 ? make_queue(*gpu) : nullptr;
      Gpu* const its = queue ? queue.get() : gpu.get();
      workers.push_back(std::make_unique<Worker>(pool, std::move(queue), its));
      workers.back()->generator = std::make_unique<Generator>(workers.back()->context, *model, where.generator);
    }
    tokenizer.emplace(reading.get());
    const TransformerConfig& c = model->config();
    if (tokenizer->vocabulary_size(Side::kSource) > c.source_vocab ||
        tokenizer->vocabulary_size(Side::kTarget) > c.target_vocab)
      fail("[translate] {}: the tokenizer has {} source and {} target tokens, the model {} and {}", directory,
           tokenizer->vocabulary_size(Side::kSource), tokenizer->vocabulary_size(Side::kTarget), c.source_vocab,
           c.target_vocab);
  }

  ThreadPool& pool;
  std::unique_ptr<Gpu> gpu;
  GenerationConfig generation;
  std::unique_ptr<Transformer> model;
  std::vector<std::unique_ptr<Worker>> workers;
  std::optional<Tokenizer> tokenizer;
};

Translator::Translator(const std::string& directory, ThreadPool& pool, const TranslatorDevice& where)
    : impl_(std::make_unique<Impl>(directory, pool, where)) {}
Translator::~Translator() = default;

int Translator::workers() const {
  return static_cast<int>(impl_->workers.size());
}
Generator& Translator::generator(int worker) {
  FRIT_CHECK(worker >= 0 && worker < workers(), "[translate] worker {}, expected one below {}", worker, workers());
  return *impl_->workers[static_cast<size_t>(worker)]->generator;
}
int64_t Translator::library_bytes() const {
  size_t bytes = 0;
  for (const auto& worker : impl_->workers)
    if (worker->context.on_gpu()) bytes += worker->context.gpu().library_bytes();
  return static_cast<int64_t>(bytes);
}
int64_t Translator::weight_bytes() const {
  return static_cast<int64_t>(impl_->model->workspace().bytes());
}
const Tokenizer& Translator::tokenizer() const {
  return *impl_->tokenizer;
}
const TransformerConfig& Translator::config() const {
  return impl_->model->config();
}

TranslateOptions Translator::default_options() const {
  TranslateOptions o;
  o.generate = GenerateOptions::from(impl_->generation);
  o.generate.max_length = std::min(o.generate.max_length, config().max_positions + 1);
  // Half as much for each of several workers, who are as fast together: memory goes by what is translated at once.
  if (impl_->gpu) {
    const int64_t part = workers() > 1 ? 2 : 1;
    o.batch_tokens = 16384 / part, o.batch_sentences = 1024 / part, o.window_lines = 32768;
  }
  return o;
}

// Some lines that are sorted into batches together.
struct Translator::Window {
  int64_t first = 0;  // number of its first line
  int64_t lines = 0;
  bool full = false;                      // others may follow
  std::vector<std::vector<int32_t>> ids;  // of each line; none of an empty one
  std::vector<std::vector<GenerateInput>> batches;
  std::vector<std::vector<int64_t>> lines_of;  // of each batch's inputs
  std::vector<std::string> notices;
};

// Reads the lines from number `first` on and makes batches of them.
std::shared_ptr<const Translator::Window> Translator::read_window(const NextLine& next, int64_t first,
                                                                  std::span<const int32_t> prefix,
                                                                  const TranslateOptions& options) {
  const Tokenizer& tokenizer = *impl_->tokenizer;
  const int64_t most = config().max_positions;
  auto window = std::make_shared<Window>();
  Window& w = *window;
  w.first = first;
  std::vector<std::string> lines;
  while (static_cast<int64_t>(lines.size()) < options.window_lines) {
    std::optional<std::string> line = next();
    if (!line) break;
    const int64_t bad = first_invalid_utf8(*line);
    if (bad >= 0) {
      const int64_t number = first + static_cast<int64_t>(lines.size()) + 1;
      if (options.invalid_utf8 == InvalidUtf8::kError)
        fail("[translate] line {}: invalid UTF-8 at byte {} (0x{:02x})", number, bad + 1,
             static_cast<unsigned char>((*line)[static_cast<size_t>(bad)]));
      w.notices.push_back(
          fmt::format("line {}: invalid UTF-8 at byte {}, not translated: its line is empty", number, bad + 1));
      line->clear();
    }
    lines.push_back(std::move(*line));
  }
  w.lines = static_cast<int64_t>(lines.size());
  w.full = w.lines == options.window_lines;
  w.ids.resize(lines.size());
  impl_->pool.parallel_for(w.lines, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      tokenizer.encode(Side::kSource, lines[static_cast<size_t>(i)], &w.ids[static_cast<size_t>(i)]);
  });
  std::vector<int64_t> lengths, line_of;  // of the lines that are not empty
  for (int64_t i = 0; i < w.lines; ++i) {
    std::vector<int32_t>& sentence = w.ids[static_cast<size_t>(i)];
    if (sentence.empty()) continue;  // nothing but white space
    sentence.push_back(tokenizer.eos_id(Side::kSource));
    if (static_cast<int64_t>(sentence.size()) > most) {
      w.notices.push_back(fmt::format("line {}: {} tokens, but the model has {} positions: the rest was cut off",
                                      first + i + 1, sentence.size(), most));
      cut_to(sentence, most);
    }
    line_of.push_back(i);
    lengths.push_back(static_cast<int64_t>(sentence.size()));
  }
  for (std::vector<int64_t>& group : plan_batches(lengths, options, workers())) {
    std::vector<GenerateInput>& batch = w.batches.emplace_back();
    for (int64_t& i : group) {
      i = line_of[static_cast<size_t>(i)];
      batch.push_back({w.ids[static_cast<size_t>(i)], prefix, static_cast<uint64_t>(first + i)});
    }
    w.lines_of.push_back(std::move(group));
  }
  return window;
}

// Hands a window's translations on in the order of its lines, whatever the order in which they come.
class Translator::Outlet {
 public:
  Outlet(Translator& translator, const Result& result, std::shared_ptr<const Window> window)
      : translator_(translator),
        result_(result),
        window_(std::move(window)),
        ready_(static_cast<size_t>(window_->lines)),
        is_ready_(ready_.size()) {
    for (size_t i = 0; i < ready_.size(); ++i)
      if (window_->ids[i].empty()) ready_[i].push_back({}), is_ready_[i] = 1;
  }
  const Window* window() const { return window_.get(); }
  void take(size_t batch, HypothesisLists lists) {
    auto texts = detokenise(lists, *translator_.impl_->tokenizer, translator_.impl_->pool);
    const std::vector<int64_t>& lines = window_->lines_of[batch];
    for (size_t i = 0; i < lines.size(); ++i) {
      const auto line = static_cast<size_t>(lines[i]);
      ready_[line] = std::move(texts[i]);
      is_ready_[line] = 1;
    }
  }
  // Lines go out as soon as all before them are done. True after the last.
  bool hand_on() {
    if (translator_.on_notice && !std::exchange(told_, true))
      for (const std::string& notice : window_->notices) translator_.on_notice(notice);
    for (; emitted_ < ready_.size() && is_ready_[emitted_]; ++emitted_) {
      result_(window_->first + static_cast<int64_t>(emitted_), ready_[emitted_]);
      ready_[emitted_] = {};
    }
    return emitted_ == ready_.size();
  }

 private:
  Translator& translator_;
  const Result& result_;
  const std::shared_ptr<const Window> window_;
  std::vector<std::vector<Translation>> ready_;
  std::vector<uint8_t> is_ready_;
  bool told_ = false;
  size_t emitted_ = 0;
};

void Translator::translate(const NextLine& next, const Result& result, const TranslateOptions& options) {
  FRIT_CHECK(
      options.batch_tokens >= 1 && options.window_lines >= 1 && options.batch_sentences >= 0 && options.first_line >= 0,
      "[translate] batch_tokens is {}, window_lines {}, expected 1 or more; batch_sentences {}, expected 0 "
      "(any number) or more; first_line {}, expected 0 or more",
      options.batch_tokens, options.window_lines, options.batch_sentences, options.first_line);
  options.generate.validate(config());
  std::vector<int32_t> prefix;
  if (!options.prefix.empty()) {
    const int64_t bad = first_invalid_utf8(options.prefix);
    if (bad >= 0) fail("[translate] the prefix is not valid UTF-8 at byte {}", bad + 1);
    prefix = impl_->tokenizer->encode(Side::kTarget, options.prefix);
  }
  std::shared_ptr<const Window> first = read_window(next, options.first_line, prefix, options);
  if (first->lines == 0) return;
  if (!first->full && first->batches.size() <= 1) {  // nothing to overlap
    Outlet outlet(*this, result, first);
    if (!first->batches.empty()) outlet.take(0, generator().generate(first->batches[0], options.generate));
    outlet.hand_on();
    return;
  }
  // One thread reads and tokenises the next window, one a worker translates, and this one makes text of what was
  // translated. What stops a thread travels as the last element of its queue.
  struct Read {
    std::shared_ptr<const Window> window;
    std::exception_ptr error;
  };
  struct Done {
    std::shared_ptr<const Window> window = {};
    bool begins = false;  // the window's batches come from now on
    size_t batch = 0;     // or this one of them is done
    int64_t number = 0;   // of the batch, or of what failed, in the order of the input
    HypothesisLists lists = {};
    std::exception_ptr error = {};
  };
  int threads = workers();
  if (!first->full) threads = static_cast<int>(std::min<size_t>(static_cast<size_t>(threads), first->batches.size()));
  BoundedQueue<Read> windows(1);
  BoundedQueue<Done> done(static_cast<size_t>(3 + threads));
  BoundedQueue<char> begun(static_cast<size_t>(1 + threads));  // one for each window that is not handed on to its end
  const auto read = [&](bool more, int64_t lines) {
    try {
      while (more) {
        auto window = read_window(next, lines, prefix, options);
        lines += window->lines, more = window->full;
        if (!windows.push({std::move(window), {}})) return;
      }
    } catch (...) {
      windows.push({{}, std::current_exception()});
    }
    windows.finish();
  };
  // Batches are given out in their order. Whoever finds none left in a window begins the next, while the others wait.
  std::mutex giving;
  std::shared_ptr<const Window> current;
  size_t given = 0;  // batches of the current window
  int64_t numbers = 0;
  bool ended = false;
  const auto take_job = [&]() -> std::optional<Done> {
    const std::lock_guard lock(giving);
    while (!ended && (!current || given == current->batches.size())) {
      std::optional<Read> read = windows.pop();
      if (read && read->error) done.push({.number = numbers++, .error = read->error});
      if (!read || read->error || !begun.push(0) || !done.push({.window = read->window, .begins = true}))
        ended = true;
      else
        current = std::move(read->window), given = 0;
    }
    if (ended) return std::nullopt;
    return Done{.window = current, .batch = given++, .number = numbers++};
  };
  std::atomic<int> working = threads;
  const auto work = [&](Generator& generator) {
    std::shared_ptr<const Window> prepared;
    while (std::optional<Done> job = take_job()) {
      try {
        if (prepared != job->window) generator.prepare(job->window->batches, options.generate);
        prepared = job->window;
        job->lists = generator.generate(prepared->batches[job->batch], options.generate);
      } catch (...) {
        job->error = std::current_exception();
      }
      const bool failed = job->error != nullptr;
      if (!done.push(std::move(*job)) || failed) break;
    }
    if (--working == 0) done.finish();
  };
  const bool more = first->full;
  const int64_t lines = first->first + first->lines;
  windows.push({std::move(first), {}});
  std::vector<std::thread> running;
  struct Joining {  // whatever happens here
    std::function<void()> body;
    ~Joining() { body(); }
  } joining{[&] {
    windows.stop(), done.stop(), begun.stop();
    for (std::thread& thread : running) thread.join();
  }};
  running.reserve(static_cast<size_t>(threads) + 1);
  running.emplace_back(read, more, lines);
  for (int i = 0; i < threads; ++i) running.emplace_back(work, std::ref(generator(i)));

  std::deque<Outlet> outlets;  // of the windows that have begun, in their order
  std::set<int64_t> came;      // of the numbers from `before` on; all below it did
  int64_t before = 0, failed = std::numeric_limits<int64_t>::max();
  std::exception_ptr error;  // of the first in the order of the input that failed
  while (std::optional<Done> d = done.pop()) {
    if (d->begins) {
      outlets.emplace_back(*this, result, std::move(d->window));
    } else {
      came.insert(d->number);
      while (came.erase(before) > 0) ++before;
      if (d->error && d->number < failed) failed = d->number, error = d->error;
      if (d->number < failed)
        std::find_if(outlets.begin(), outlets.end(), [&](const Outlet& o) {
          return o.window() == d->window.get();
        })->take(d->batch, std::move(d->lists));
    }
    while (!outlets.empty() && outlets.front().hand_on()) {
      outlets.pop_front();
      begun.pop();
    }
    if (before > failed) std::rethrow_exception(error);
  }
}

std::vector<std::vector<Translation>> Translator::translate(std::span<const std::string> texts,
                                                            const TranslateOptions& options) {
  std::vector<std::vector<Translation>> results(texts.size());
  size_t at = 0;
  translate(
      [&]() -> std::optional<std::string> { return at < texts.size() ? std::optional(texts[at++]) : std::nullopt; },
      [&](int64_t line, const std::vector<Translation>& list) {
        results[static_cast<size_t>(line - options.first_line)] = list;
      },
      options);
  return results;
}

std::string Translator::translate(std::string_view text, const TranslateOptions& options) {
  const std::string one(text);
  const auto lists = translate(std::span(&one, 1), options);
  return lists[0].empty() ? std::string() : lists[0][0].text;
}

int64_t Translator::translate(std::istream& in, std::ostream& out, const TranslateOptions& options) {
  int64_t lines = 0;
  bool first = true;
  const NextLine next = [&]() -> std::optional<std::string> {
    std::string line;
    if (!std::getline(in, line)) {
      if (in.bad()) fail("[translate] reading the input failed");
      return std::nullopt;
    }
    if (std::exchange(first, false) && line.starts_with("\xEF\xBB\xBF")) line.erase(0, 3);
    if (line.ends_with('\r')) line.pop_back();
    return line;
  };
  translate(
      next,
      [&](int64_t, const std::vector<Translation>& list) {
        out << (list.empty() ? std::string_view() : std::string_view(list[0].text)) << '\n' << std::flush;
        if (!out) fail("[translate] writing the output failed");
        ++lines;
      },
      options);
  return lines;
}

}  // namespace frit
