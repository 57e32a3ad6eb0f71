#include "frit/infer/options.h"

#include <algorithm>
#include <cmath>

#include "frit/core/error.h"

namespace frit {

const char* name_of(LengthPenalty penalty) {
  switch (penalty) {
    case LengthPenalty::kNone:
      return "none";
    case LengthPenalty::kLength:
      return "length";
    case LengthPenalty::kGnmt:
      return "gnmt";
  }
  return "";
}

LengthPenalty parse_length_penalty(std::string_view name) {
  for (const LengthPenalty p : {LengthPenalty::kNone, LengthPenalty::kLength, LengthPenalty::kGnmt})
    if (name == name_of(p)) return p;
  fail("[generate] no length penalty is called {}, expected none, length or gnmt", name);
}

const char* name_of(EarlyStopping stopping) {
  switch (stopping) {
    case EarlyStopping::kFalse:
      return "false";
    case EarlyStopping::kTrue:
      return "true";
    case EarlyStopping::kNever:
      return "never";
  }
  return "";
}

EarlyStopping parse_early_stopping(std::string_view name) {
  for (const EarlyStopping s : {EarlyStopping::kFalse, EarlyStopping::kTrue, EarlyStopping::kNever})
    if (name == name_of(s)) return s;
  fail("[generate] early stopping is {}, expected false, true or never", name);
}

GenerateOptions GenerateOptions::from(const GenerationConfig& config) {
  GenerateOptions o;
  o.beam = config.num_beams;
  o.max_length = config.max_length;
  o.min_length = config.min_length;
  o.alpha = config.length_penalty;
  o.early_stopping = parse_early_stopping(config.early_stopping);
  o.no_repeat_ngram = config.no_repeat_ngram_size;
  o.repetition_penalty = config.repetition_penalty;
  o.start_id = static_cast<int32_t>(config.start_id);
  o.eos_ids.assign(config.eos_ids.begin(), config.eos_ids.end());
  o.forced_eos_id = static_cast<int32_t>(config.forced_eos_id);
  o.forced_bos_id = static_cast<int32_t>(config.forced_bos_id);
  for (const std::vector<int64_t>& word : config.bad_words) {
    // transformers drops a ban of EOS alone: outputs could not end.
    const bool eos_alone = word.size() == 1 && std::count(config.eos_ids.begin(), config.eos_ids.end(), word[0]);
    if (!eos_alone) o.bad_words.emplace_back(word.begin(), word.end());
  }
  return o;
}

void GenerateOptions::validate(const TransformerConfig& model) const {
  const auto id = [&](const char* field, int64_t value) {
    FRIT_CHECK(value >= 0 && value < model.target_vocab, "[generate] {} is {}, expected an id below {}", field, value,
               model.target_vocab);
  };
  FRIT_CHECK(beam >= 1 && beam <= model.target_vocab, "[generate] beam is {}, expected 1 to {} (the vocabulary)", beam,
             model.target_vocab);
  FRIT_CHECK(nbest >= 1, "[generate] nbest is {}, expected 1 or more", nbest);
  FRIT_CHECK(!sampling || beam == 1, "[generate] sampling with beam {}, expected beam 1", beam);
  FRIT_CHECK(sampling || nbest <= beam, "[generate] nbest is {}, expected at most beam, which is {}", nbest, beam);
  FRIT_CHECK(max_length == 0 || max_length >= 2,
             "[generate] max_length is {}, expected 2 (start and one token) or more", max_length);
  FRIT_CHECK(max_length <= model.max_positions + 1,
             "[generate] max_length is {}, but the model has {} positions: expected at most {}", max_length,
             model.max_positions, model.max_positions + 1);
  FRIT_CHECK(max_new_tokens >= 0, "[generate] max_new_tokens is {}, expected 0 (not given) or more", max_new_tokens);
  FRIT_CHECK(min_length >= 0 && min_new_tokens >= 0,
             "[generate] min_length is {} and min_new_tokens {}, expected 0 or more", min_length, min_new_tokens);
  FRIT_CHECK(max_length == 0 || min_length <= max_length, "[generate] min_length is {}, above max_length, which is {}",
             min_length, max_length);
  FRIT_CHECK(max_new_tokens == 0 || min_new_tokens <= max_new_tokens,
             "[generate] min_new_tokens is {}, above max_new_tokens, which is {}", min_new_tokens, max_new_tokens);
  FRIT_CHECK(std::isfinite(alpha), "[generate] the length penalty's alpha is {}, expected a number", alpha);
  FRIT_CHECK(repetition_penalty > 0 && std::isfinite(repetition_penalty),
             "[generate] repetition_penalty is {}, expected a number above 0", repetition_penalty);
  FRIT_CHECK(diversity >= 0 && std::isfinite(diversity),
             "[generate] diversity is {}, expected 0 (off) or a number above 0", diversity);
  FRIT_CHECK(diversity == 0 || beam > 1, "[generate] diversity is {} with beam {}, expected 2 beams or more", diversity,
             beam);
  FRIT_CHECK(no_repeat_ngram >= 0, "[generate] no_repeat_ngram is {}, expected 0 (off) or more", no_repeat_ngram);
  FRIT_CHECK(temperature > 0 && std::isfinite(temperature), "[generate] temperature is {}, expected a number above 0",
             temperature);
  FRIT_CHECK(top_k >= 0, "[generate] top_k is {}, expected 0 (off) or more", top_k);
  FRIT_CHECK(top_p > 0 && top_p <= 1, "[generate] top_p is {}, expected above 0 and at most 1", top_p);
  FRIT_CHECK(!eos_ids.empty(), "[generate] no EOS id is given");
  id("start_id", start_id);
  for (const int32_t eos : eos_ids) id("an EOS id", eos);
  if (forced_eos_id != -1) id("forced_eos_id", forced_eos_id);
  if (forced_bos_id != -1) id("forced_bos_id", forced_bos_id);
  for (const std::vector<int32_t>& word : bad_words) {
    FRIT_CHECK(!word.empty(), "[generate] a bad word has no tokens");
    for (const int32_t token : word) id("a bad word's token", token);
  }
}

double GenerateOptions::normaliser(int64_t length) const {
  switch (penalty) {
    case LengthPenalty::kNone:
      return 1;
    case LengthPenalty::kLength:
      return std::pow(static_cast<double>(length), alpha);
    case LengthPenalty::kGnmt:
      return std::pow((5.0 + static_cast<double>(length)) / 6.0, alpha);
  }
  return 1;
}

}  // namespace frit
