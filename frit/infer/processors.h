// What transformers calls logits processors: penalties and bans on the next token of one hypothesis.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "frit/infer/options.h"

namespace frit {

// Where a hypothesis stands. Lengths count the start token.
struct HypothesisState {
  std::span<const int32_t> ids;  // start token, prefix, generated
  int64_t prompt = 1;            // start token and prefix
  int64_t max_length = 0;
};

// Looks at one hypothesis at a time. Values are logits (greedy, sampling) or log-probabilities (beam search); nothing
// is normalised again. Order as transformers': repetition penalty, bans, forced tokens.
class Processors {
 public:
  Processors(const GenerateOptions& options, int64_t vocabulary);

  // No more than this many tokens of a hypothesis with `length` ids can have their value lowered: the best n of the
  // processed values are among the best n + touched(length) of the raw ones and boosted().
  int64_t touched(int64_t length) const { return touched(options_, length); }
  static int64_t touched(const GenerateOptions& options, int64_t length);

  void look_at(const HypothesisState& state);
  // The only token allowed (its value is then 0), or -1.
  int32_t forced() const { return forced_; }
  float apply(float value, int32_t token) const;
  // Tokens whose value may rise (repetition penalty below 1).
  std::span<const int32_t> boosted() const {
    return options_.repetition_penalty < 1 ? std::span<const int32_t>(used_) : std::span<const int32_t>();
  }
  // All values of a row, in place. Shapes: row [V].
  void apply_to_row(float* row) const;

 private:
  void ban(int32_t token);
  const GenerateOptions& options_;
  int64_t vocabulary_;
  std::vector<std::vector<int32_t>> sequences_;  // bad words of several tokens
  std::vector<int32_t> single_;                  // and of one
  float penalty_;
  // Marks of this look: a token is used or banned if its mark is look_.
  uint32_t look_ = 0;
  std::vector<uint32_t> used_mark_, ban_mark_;
  std::vector<int32_t> used_, banned_;
  int32_t forced_ = -1;
};

}  // namespace frit
