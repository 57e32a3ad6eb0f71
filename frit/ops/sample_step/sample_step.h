// Draws a token for each row of a decoding step on the device.
#pragma once
#include "frit/backend/context.h"
#include "frit/ops/sample_step/uniform.h"
#include "frit/ops/search_step/search_step.h"

namespace frit {

// How tokens are drawn, as numbers of a tensor: i64 [kDrawSentences + sentences].
enum DrawSetting : int {
  kDrawSeed,
  kDrawTopK,         // 0: all
  kDrawTemperature,  // the bits of a double
  kDrawTopP,         // the bits of a double
  kDrawSentences,    // behind it: each sentence's number, which its random numbers depend on
};

struct SampleStepArgs {
  Tensor logits;             // f32 [rows, V], any row stride; overwritten with what settings make of them
  Tensor lse;                // f32 [rows], of the logits as they come
  Tensor draw;               // i64, see DrawSetting
  Tensor settings, numbers;  // as search_step has them
  SearchState state;         // is read
  Tensor drawn;              // i32 [rows]: the tokens
  Tensor drawn_scores;       // f32 [rows]: their log-probabilities by the logits as they come; 0 for a forced token
};

// Math: softmax(logits / temperature) after penalties and bans, cut to the top_k largest logits (ties of the k-th are
// kept), then to the fewest likeliest tokens whose probabilities together reach top_p (ties: the smaller id first), at
// least one; of what remains the token at share sampling_uniform(seed, sentence's number, beam, ids so far): in the
// order of ids, with top_p below 1 in that of likelihood. As Sampler on the CPU, with probabilities rounded to
// multiples of about 2^-44 of the likeliest, so that their sums are exact whatever the order. A NaN counts as -inf.
// Rows of sentences and samples that have ended, and of those that still read their prefix, get token 0. A row of which
// every token is banned gets token 0 and -inf for a score.
// Cost: 1 launch; each row is read 4 to 14 times.
// Errors: std::invalid_argument if shapes or dtypes do not fit, or without a GPU.
void sample_step(Context& context, const SampleStepArgs& args);

}  // namespace frit
