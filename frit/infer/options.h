// How a model's output is searched: beam search, greedy, or sampling, and what is allowed.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "frit/models/transformer/config.h"

namespace frit {

// What a hypothesis' summed log-probability is divided by; n counts generated tokens, EOS included, prefix not.
enum class LengthPenalty : uint8_t {
  kNone,    // 1
  kLength,  // n^alpha: Hugging Face, fairseq
  kGnmt,    // ((5 + n) / 6)^alpha: Wu et al. 2016 (arXiv:1609.08144), section 7
};
const char* name_of(LengthPenalty penalty);                 // "none", "length", "gnmt"
LengthPenalty parse_length_penalty(std::string_view name);  // Errors: frit::Error with the known names

// When a sentence's beam search ends, as transformers has it.
enum class EarlyStopping : uint8_t {
  kFalse,  // when the best running beam, ended now, could not beat the worst finished hypothesis
  kTrue,   // as soon as `beam` hypotheses have finished
  kNever,  // when not even the longest output could beat it
};
const char* name_of(EarlyStopping stopping);                // "false", "true", "never"
EarlyStopping parse_early_stopping(std::string_view name);  // Errors: frit::Error with the known names

struct GenerateOptions {
  int64_t beam = 1;   // 1: greedy
  int64_t nbest = 1;  // hypotheses returned: at most beam; with sampling any number of independent samples

  // Lengths count as in transformers: max_length and min_length with the start token, the prefix and EOS; the others
  // the generated tokens alone (EOS included). 0: not given. Where both are given the stricter holds.
  int64_t max_length = 0;  // neither given: what the positions allow
  int64_t max_new_tokens = 0;
  int64_t min_length = 0, min_new_tokens = 0;

  LengthPenalty penalty = LengthPenalty::kLength;
  double alpha = 1;  // of the length penalty
  EarlyStopping early_stopping = EarlyStopping::kFalse;
  // Diverse beam search (Li et al. 2016, arXiv:1611.08562): the j-th best continuation of a beam, j from 0, loses
  // diversity * j before all are compared. What it lost stays in its running sum and score; token_scores are without.
  double diversity = 0;  // >= 0; 0: off

  double repetition_penalty = 1;                // > 1: tokens that are there already become less likely
  int64_t no_repeat_ngram = 0;                  // n: no n tokens occur twice; 0: off
  std::vector<std::vector<int32_t>> bad_words;  // token sequences that are never produced
  int32_t start_id = 0;
  std::vector<int32_t> eos_ids = {1};
  int32_t forced_eos_id = -1;  // ends every output at its maximum length; -1: it is cut there
  int32_t forced_bos_id = -1;  // the first token behind the start token; -1: free

  bool sampling = false;   // draws tokens instead of taking the best; beam must be 1
  double temperature = 1;  // > 0
  int64_t top_k = 0;       // only the k likeliest tokens (ties of the k-th included); 0: all
  double top_p = 1;        // only the likeliest tokens that together reach this probability
  uint64_t seed = 1;

  bool token_scores = false;  // fill Hypothesis::token_scores

  // Settings of a model directory.
  static GenerateOptions from(const GenerationConfig& config);
  // Errors: std::invalid_argument naming the field, its value and what is allowed.
  void validate(const TransformerConfig& model) const;
  // Math: the divisor of a score.
  double normaliser(int64_t length) const;
};

}  // namespace frit
