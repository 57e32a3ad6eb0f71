#include "frit/infer/sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "frit/core/error.h"

namespace frit {
namespace {

// Likelier first; the smaller id first among equals.
bool likelier(const std::pair<double, int32_t>& a, const std::pair<double, int32_t>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

}  // namespace

std::span<const std::pair<double, int32_t>> Sampler::support(std::span<const float> logits,
                                                             const SampleOptions& options) {
  float lowest = -std::numeric_limits<float>::infinity();
  const float top = *std::max_element(logits.begin(), logits.end());
  if (top == lowest) fail("[generate] no token may be drawn: all are banned");
  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(logits.size())) {
    sorted_.assign(logits.begin(), logits.end());
    std::nth_element(sorted_.begin(), sorted_.begin() + (options.top_k - 1), sorted_.end(), std::greater<float>());
    lowest = sorted_[static_cast<size_t>(options.top_k - 1)];
  }
  kept_.clear();
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] < lowest || std::isinf(logits[i])) continue;
    const double weight = std::exp((static_cast<double>(logits[i]) - top) / options.temperature);
    if (weight == 0) continue;
    kept_.emplace_back(weight, static_cast<int32_t>(i));
    total += weight;
  }
  if (options.top_p < 1) {
    // Sorts only as many of the likeliest as it takes to reach top_p.
    const double enough = options.top_p * total;
    size_t count = std::min<size_t>(kept_.size(), 256);
    for (;; count = std::min(kept_.size(), 4 * count)) {
      std::partial_sort(kept_.begin(), kept_.begin() + static_cast<int64_t>(count), kept_.end(), likelier);
      double before = 0;  // of likelier tokens
      size_t n = 0;
      while (n < count && (n == 0 || before < enough)) before += kept_[n++].first;
      if (before >= enough || count == kept_.size()) {
        kept_.resize(n);
        break;
      }
    }
  }
  return kept_;
}

int32_t Sampler::draw(std::span<const float> logits, const SampleOptions& options, double u) {
  const auto tokens = support(logits, options);
  double total = 0;
  for (const auto& [weight, token] : tokens) total += weight;
  double left = u * total;
  for (const auto& [weight, token] : tokens) {
    if (left < weight) return token;
    left -= weight;
  }
  return tokens.back().second;  // rounding at the very end
}

}  // namespace frit
