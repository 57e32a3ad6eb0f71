// Flags that say how translations are searched; unset ones leave the model directory's settings.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "frit/infer/translator.h"

namespace CLI {
class App;
}

namespace frit::cli {

struct GenerateFlags {
  std::optional<int64_t> beam, nbest, max_length, max_new_tokens, min_length, min_new_tokens, no_repeat_ngram, top_k;
  std::optional<double> alpha, diversity, repetition_penalty, top_p, temperature;
  std::optional<uint64_t> seed;
  std::optional<std::string> length_penalty, early_stopping;
  std::optional<int64_t> batch_tokens, batch_sentences, window_lines;
  bool sample = false;
  std::string prefix;
  int threads = 0, workers = 0;
  std::string device = "cpu", dtype = "fp32", products = "auto";

  void add_to(CLI::App& app);
  // Where the model runs. Errors: UsageError for what this build has not.
  TranslatorDevice place() const;
  // The translator's settings with the flags on top. Errors: UsageError for flags that contradict each other or that
  // the model cannot follow.
  TranslateOptions apply(const Translator& translator) const;
};

}  // namespace frit::cli
