#include "frit/infer/translator.h"

#include <algorithm>
#include <future>
#include <istream>
#include <ostream>
#include <thread>
#include <utility>

#include "frit/data/batcher.h"
#include "frit/infer/bounded_queue.h"

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
  Impl(const std::string& directory, ThreadPool& p, const TranslatorDevice& where)
      : pool(p),
        gpu(open_gpu(where.device)),
        memory(gpu.get()),
        context(p, memory, gpu.get()),
        generation(GenerationConfig::read(directory)) {
    std::future<Tokenizer> reading = std::async(std::launch::async, [&] { return Tokenizer::load(directory); });
    model = Transformer::load(directory,
                              {.precision = decoding_precision(where.dtype, gpu != nullptr), .device = gpu.get()});
    generator = std::make_unique<Generator>(context, *model, where.generator);
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
  Memory memory;
  Context context;
  GenerationConfig generation;
  std::unique_ptr<Transformer> model;
  std::unique_ptr<Generator> generator;
  std::optional<Tokenizer> tokenizer;
};

Translator::Translator(const std::string& directory, ThreadPool& pool, const TranslatorDevice& where)
    : impl_(std::make_unique<Impl>(directory, pool, where)) {}
Translator::~Translator() = default;

Generator& Translator::generator() {
  return *impl_->generator;
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
  if (impl_->gpu) o.batch_tokens = 16384, o.batch_sentences = 1024, o.window_lines = 32768;
  return o;
}

// Some lines that are sorted into batches together.
struct Translator::Window {
  int64_t first = 0;  // number of its first line
  int64_t lines = 0;
  bool full = false;                         // others may follow
  std::vector<std::vector<int32_t>> ids;     // of each line; none of an empty one
  std::vector<GenerateInput> inputs;         // of the others
  std::vector<int64_t> line_of;              // of an input
  std::vector<std::vector<int64_t>> groups;  // inputs of each batch
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
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < w.lines; ++i) {
    std::vector<int32_t>& sentence = w.ids[static_cast<size_t>(i)];
    if (sentence.empty()) continue;  // nothing but white space
    sentence.push_back(tokenizer.eos_id(Side::kSource));
    if (static_cast<int64_t>(sentence.size()) > most) {
      w.notices.push_back(fmt::format("line {}: {} tokens, but the model has {} positions: the rest was cut off",
                                      first + i + 1, sentence.size(), most));
      cut_to(sentence, most);
    }
    w.inputs.push_back({sentence, prefix, static_cast<uint64_t>(first + i)});
    w.line_of.push_back(i);
    lengths.push_back(static_cast<int64_t>(sentence.size()));
  }
  w.groups = plan_inference_batches(lengths, options.batch_tokens, options.batch_sentences);
  return window;
}

HypothesisLists Translator::translate_group(const Window& window, size_t group, const TranslateOptions& options) {
  std::vector<GenerateInput> batch;
  for (const int64_t i : window.groups[group]) batch.push_back(window.inputs[static_cast<size_t>(i)]);
  return impl_->generator->generate(batch, options.generate);
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
    if (translator.on_notice)
      for (const std::string& notice : window_->notices) translator.on_notice(notice);
    for (size_t i = 0; i < ready_.size(); ++i)
      if (window_->ids[i].empty()) ready_[i].push_back({}), is_ready_[i] = 1;
    emit();
  }
  const Window& window() const { return *window_; }
  void take(size_t group, HypothesisLists lists) {
    auto texts = detokenise(lists, *translator_.impl_->tokenizer, translator_.impl_->pool);
    const std::vector<int64_t>& inputs = window_->groups[group];
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto line = static_cast<size_t>(window_->line_of[static_cast<size_t>(inputs[i])]);
      ready_[line] = std::move(texts[i]);
      is_ready_[line] = 1;
    }
    emit();
  }

 private:
  // Lines go out as soon as all before them are done.
  void emit() {
    for (; emitted_ < ready_.size() && is_ready_[emitted_]; ++emitted_) {
      result_(window_->first + static_cast<int64_t>(emitted_), ready_[emitted_]);
      ready_[emitted_] = {};
    }
  }
  Translator& translator_;
  const Result& result_;
  const std::shared_ptr<const Window> window_;
  std::vector<std::vector<Translation>> ready_;
  std::vector<uint8_t> is_ready_;
  size_t emitted_ = 0;
};

void Translator::translate(const NextLine& next, const Result& result, const TranslateOptions& options) {
  FRIT_CHECK(options.batch_tokens >= 1 && options.window_lines >= 1 && options.batch_sentences >= 0,
             "[translate] batch_tokens is {}, window_lines {}, expected 1 or more; batch_sentences {}, expected 0 "
             "(any number) or more",
             options.batch_tokens, options.window_lines, options.batch_sentences);
  options.generate.validate(config());
  std::vector<int32_t> prefix;
  if (!options.prefix.empty()) {
    const int64_t bad = first_invalid_utf8(options.prefix);
    if (bad >= 0) fail("[translate] the prefix is not valid UTF-8 at byte {}", bad);
    prefix = impl_->tokenizer->encode(Side::kTarget, options.prefix);
  }
  std::shared_ptr<const Window> first = read_window(next, 0, prefix, options);
  if (first->lines == 0) return;
  if (!first->full && first->groups.size() <= 1) {  // nothing to overlap
    Outlet outlet(*this, result, first);
    for (size_t g = 0; g < first->groups.size(); ++g) outlet.take(g, translate_group(*first, g, options));
    return;
  }
  // One thread reads and tokenises the next window, one translates, and this one makes text of what was translated.
  // What stops a thread travels as the last element of its queue.
  struct Read {
    std::shared_ptr<const Window> window;
    std::exception_ptr error;
  };
  struct Translated {
    std::shared_ptr<const Window> window;  // whose batches begin
    size_t group = 0;
    HypothesisLists lists;  // of a batch of the window that came last
    std::exception_ptr error;
  };
  BoundedQueue<Read> windows(1);
  BoundedQueue<Translated> batches(4);
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
  const auto run = [&] {
    try {
      while (std::optional<Read> read = windows.pop()) {
        if (read->error) std::rethrow_exception(read->error);
        if (!batches.push({read->window, 0, {}, {}})) return;
        for (size_t g = 0; g < read->window->groups.size(); ++g)
          if (!batches.push({{}, g, translate_group(*read->window, g, options), {}})) return;
      }
    } catch (...) {
      batches.push({{}, 0, {}, std::current_exception()});
    }
    batches.finish();
  };
  const bool more = first->full;
  const int64_t lines = first->lines;
  windows.push({std::move(first), {}});
  std::thread reader(read, more, lines), runner;
  struct Joining {  // whatever happens here
    std::function<void()> body;
    ~Joining() { body(); }
  } joining{[&] {
    windows.stop(), batches.stop();
    reader.join();
    if (runner.joinable()) runner.join();
  }};
  runner = std::thread(run);
  std::optional<Outlet> outlet;
  while (std::optional<Translated> t = batches.pop()) {
    if (t->error) std::rethrow_exception(t->error);
    if (t->window)
      outlet.emplace(*this, result, std::move(t->window));
    else
      outlet->take(t->group, std::move(t->lists));
  }
}

std::vector<std::vector<Translation>> Translator::translate(std::span<const std::string> texts,
                                                            const TranslateOptions& options) {
  std::vector<std::vector<Translation>> results(texts.size());
  size_t at = 0;
  translate(
      [&]() -> std::optional<std::string> { return at < texts.size() ? std::optional(texts[at++]) : std::nullopt; },
      [&](int64_t line, const std::vector<Translation>& list) { results[static_cast<size_t>(line)] = list; }, options);
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
