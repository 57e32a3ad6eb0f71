// Drawing a token from a row of logits.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "frit/ops/sample_step/uniform.h"

namespace frit {

struct SampleOptions {
  double temperature = 1;
  int64_t top_k = 0;  // 0: all
  double top_p = 1;
};

// Draws from softmax(logits / temperature), cut to the top_k largest (ties of the k-th are kept), then to the fewest
// likeliest tokens whose probabilities together reach top_p (ties: the smaller id first), at least one.
class Sampler {
 public:
  // The tokens that remain, with their unnormalised probabilities. Valid until the next call.
  // Errors: frit::Error if every logit is -inf.
  std::span<const std::pair<double, int32_t>> support(std::span<const float> logits, const SampleOptions& options);
  // The token at share u in [0, 1) of the support's probability.
  int32_t draw(std::span<const float> logits, const SampleOptions& options, double u);

 private:
  std::vector<float> sorted_;
  std::vector<std::pair<double, int32_t>> kept_;
};

}  // namespace frit
