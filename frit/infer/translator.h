// Text in, text out: a model directory with its tokenizer and its decoding settings.
#pragma once
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "frit/data/text.h"
#include "frit/data/token_file.h"
#include "frit/data/tokenizer.h"
#include "frit/infer/generate.h"

namespace frit {

// Translates many sentences: batches of at most batch_tokens source tokens, sentences of like length together, longest
// first. Results are in the order of inputs.
using HypothesisLists = std::vector<std::vector<Hypothesis>>;
HypothesisLists generate_all(Generator& generator, std::span<const GenerateInput> inputs,
                             const GenerateOptions& options, int64_t batch_tokens);

// Sources of a token file's first `limit` sentences (0: all), for validation during training.
std::vector<std::vector<int32_t>> read_sources(const TokenFile& file, int64_t limit = 0);
// References as text.
std::vector<std::string> read_references(const TokenFile& file, const Tokenizer& tokenizer, int64_t limit = 0);
// Best translation of each source as text. A source longer than the model's positions is cut, EOS kept.
std::vector<std::string> translate_ids(Generator& generator, const Tokenizer& tokenizer,
                                       std::span<const std::vector<int32_t>> sources, const GenerateOptions& options,
                                       int64_t batch_tokens = 2048);

// Where a Translator's model lies and runs, and in which numbers.
struct TranslatorDevice {
  std::string device = "cpu";       // "cpu"; "cuda"; in a build without CUDA "simulator", which is slow and for tests
  std::string dtype = "fp32";       // of weights and activations: fp32, on a GPU also fp16 and bf16
  GeneratorOptions generator = {};  // on a GPU
  // Batches that are translated side by side on a GPU, each by a Generator on a queue of its own: weights are shared,
  // keys, values and temporaries are not. Results do not depend on it, but by the batches they come in (see Generator).
  // 0: kUsualWorkers on a GPU. On the CPU all threads work at one batch.
  int workers = 0;
};
constexpr int kUsualWorkers = 3;
// The GPU of that name; none for "cpu". Errors: frit::Error if this build or machine has none such, or for another
// name.
std::unique_ptr<Gpu> open_gpu(std::string_view device);
// "fp32", "fp16" or "bf16" as a model that is not trained has it. Errors: frit::Error for another name, or for 16 bits
// without a GPU.
Precision decoding_precision(std::string_view dtype, bool on_gpu);

struct TranslateOptions {
  GenerateOptions generate;
  int64_t batch_tokens = 2048;  // source tokens of a batch
  int64_t batch_sentences = 0;  // sentences of a batch at most; 0: any number
  int64_t window_lines = 2048;  // lines read before they are sorted into batches; bounds the delay and the memory
  int64_t first_line = 0;       // number of the first line: Result, notices, errors and draws count from it
  InvalidUtf8 invalid_utf8 = InvalidUtf8::kError;  // kSkip: a notice, and an empty line in the output
  std::string prefix;                              // text that every translation begins with
};

struct Translation {
  std::string text;
  float score = 0;
  std::vector<int32_t> tokens;
};

class Translator {
 public:
  // Reads config.json, generation_config.json, model.safetensors and the tokenizer. The pool must outlive this.
  // Errors: frit::Error naming the file, or for the device.
  Translator(const std::string& directory, ThreadPool& pool, const TranslatorDevice& where = {});
  ~Translator();
  Translator(const Translator&) = delete;
  Translator& operator=(const Translator&) = delete;

  // The directory's decoding settings; on a GPU with larger batches, the larger the fewer workers there are.
  TranslateOptions default_options() const;

  // n-best translations of each text. An empty text has one empty translation. Errors: std::invalid_argument for
  // options, frit::Error for invalid UTF-8 (see TranslateOptions).
  std::vector<std::vector<Translation>> translate(std::span<const std::string> texts, const TranslateOptions& options);
  // The best one alone.
  std::string translate(std::string_view text, const TranslateOptions& options);
  std::string translate(std::string_view text) { return translate(text, default_options()); }

  // Pulls lines until next returns none, and hands each line's translations on in the order of the lines, as soon as
  // all before it are done. Lines are read, tokenised, translated and made text of at the same time: behind the first
  // window next is called from another thread, at most two windows ahead of the newest that is translated, of which
  // there are one more than workers at most; result is called here. An error, whose ever it is, ends everything in the
  // order of the lines: what lies in windows before it is handed on. If result throws, this returns when next does.
  using NextLine = std::function<std::optional<std::string>()>;
  using Result = std::function<void(int64_t line, const std::vector<Translation>&)>;  // counts from first_line
  void translate(const NextLine& next, const Result& result, const TranslateOptions& options);
  // Lines of `in` to the best translations, a line each, written as they come. Returns the number of lines.
  int64_t translate(std::istream& in, std::ostream& out, const TranslateOptions& options);

  // Receives a line of text for everything a user should hear of: a sentence that was cut, a line that is no UTF-8.
  std::function<void(std::string_view)> on_notice;

  int workers() const;
  Generator& generator(int worker = 0);  // a call of less than two batches uses the first
  int64_t weight_bytes() const;          // of the model, where it lies
  int64_t library_bytes() const;         // scratch of the GPU's libraries, of all workers
  const Tokenizer& tokenizer() const;
  const TransformerConfig& config() const;

 private:
  struct Impl;
  struct Window;
  class Outlet;
  std::shared_ptr<const Window> read_window(const NextLine& next, int64_t first, std::span<const int32_t> prefix,
                                            const TranslateOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace frit
