// Which implementation of attention is fastest on a GPU, found by timing before training starts.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "frit/ops/attention/attention.h"

namespace frit {

// Self-attention of training over sequences that are alike: what is timed.
struct AttentionShape {
  DType dtype = DType::kBF16;
  int64_t heads = 0, width = 0;
  int64_t tokens = 0, sequences = 1, longest = 0;  // longest: of a sequence, at most `tokens`
  bool causal = false;
  float p_drop = 0;
};

// Such a call without data, as planning has it: queries, keys and values are columns of one [tokens, 3, heads, width].
AttentionArgs attention_args(const AttentionShape& shape);

// Microseconds of forward and backward by one implementation: graphs replayed, the median. Sequences share the tokens
// evenly. Takes memory for the call from the gpu while it runs. Errors: std::invalid_argument if it refuses;
// frit::Error in the simulator, which has no clock.
double time_attention(Gpu& gpu, ThreadPool& pool, const AttentionShape& shape, std::string_view implementation);
using AttentionTimer = std::function<double(const AttentionShape& shape, std::string_view implementation)>;

struct AttentionChoice {
  std::string key;                   // attention_key
  std::string chosen;                // an implementation, or kAttentionByOrder: there was no time left
  std::map<std::string, double> us;  // of each implementation that takes it
  std::string failures;              // of implementations that take it but could not be timed; "" if there are none
};

// Chooses for every shape whose key `tuning` does not know, and writes that there. The first implementation in the
// order stays unless another one is more than kAttentionGain faster. To ask cuDNN whether it takes a shape means to let
// it build what it needs, about 0.6 s a direction: after `seconds` the rest is left to the order, so begin with what
// matters most. again: keys that an earlier run left to the order count as not known.
// Returns what was chosen here.
constexpr double kAttentionGain = 0.05;
std::vector<AttentionChoice> choose_attention(Context& context, const std::vector<AttentionShape>& shapes,
                                              Tuning& tuning, double seconds, bool again, const AttentionTimer& timer);

}  // namespace frit
