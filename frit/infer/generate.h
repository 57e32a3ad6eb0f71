// Translates token ids with an encoder-decoder Transformer, on the CPU or a GPU: greedy, beam search, sampling.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "frit/backend/context.h"
#include "frit/infer/options.h"
#include "frit/models/transformer/transformer.h"

namespace frit {

// One sentence to translate.
struct GenerateInput {
  std::span<const int32_t> source;  // ids, EOS at the end
  std::span<const int32_t> prefix;  // tokens that every output begins with
  // Which sentence it is: with sampling, the random numbers depend on (seed, index, sample, position) alone.
  uint64_t index = 0;
};

struct Hypothesis {
  std::vector<int32_t> tokens;      // behind the start token; prefix and EOS included
  float score = 0;                  // sum of the generated tokens' log-probabilities / GenerateOptions::normaliser
  std::vector<float> token_scores;  // one a generated token, if asked for; processors included
};

// How a Generator on a GPU works; without one nothing of it counts.
struct GeneratorOptions {
  enum class Products : uint8_t {
    kAuto,     // by their sizes
    kRows,     // all by linear_rows: what a sentence gets has the same bits in every batch
    kLibrary,  // all by the GPU's library
  };
  Products products = Products::kAuto;
  int64_t few_rows = 64;  // kAuto: up to so many rows are linear_rows'
  // kAuto, 16-bit types: so are products of up to so many multiplications. An H200 takes 2.5 us for 128 rows of 512 x
  // 512 with bias and residual by linear_rows, and 8.4 us for 128 rows of 512 x 2048 with a norm in front; cuBLASLt's
  // products take 4.5 us each in such a step, and a sublayer's end behind them 2.6 us more (docs/benchmarks.md,
  // bench/results/gpu-ops.json).
  int64_t small_product = int64_t{1} << 27;
  bool graphs = true;       // work that comes often is recorded and replayed
  int64_t steps_ahead = 2;  // steps that are queued before it is known who has finished
  bool survivors = false;   // report how many logits HARS collects; steps then run without graphs
};
const char* name_of(GeneratorOptions::Products products);          // "auto", "rows", "library"
GeneratorOptions::Products parse_products(std::string_view name);  // Errors: frit::Error with the known names

// What the last call of a Generator on a GPU did.
struct GenerateReport {
  int64_t steps = 0;                     // queued, the ones behind the last sentence's end included
  int64_t kernels = 0, products = 0;     // of a step: launched kernels, and products of the library
  int64_t recorded = 0;                  // graphs, by all calls so far
  double encoder_ms = 0, search_ms = 0;  // by the device's clock
  int64_t cache_bytes = 0, state_bytes = 0, arena_bytes = 0;  // keys and values; all else that is kept; temporaries
  // If GeneratorOptions::survivors: logits that HARS collected of a row, and of how many rows.
  double survivors_mean = 0, survivors_most = 0;
  int64_t survivors_rows = 0;
};

// Decodes with one model, where the context's tensors lie.
//
// On the CPU it computes in fp32 from the model's parameters in their dtype; weights are laid out once. What a sentence
// gets has the same bits whatever other sentences are in the call, and for any number of threads.
// On a GPU it computes in the model's dtype, with logits and scores in fp32, and nothing but the queueing of steps is
// left to the host: buffers are planned, a step is one graph for each number of sentences that are left, recorded when
// it comes often, and the host waits once, for the results. The host's thread spins meanwhile. In fp32 a sentence gets
// the same tokens, and its score within 1e-5, in every batch; in 16 bits that takes Products::kRows. Equal to
// transformers' generate() of the same settings but for rounding. One call at a time. Cost: beside the weights, keys
// and values of the tokens decoded so far, kept for the next call; a decoding step copies none of them.
class Generator {
 public:
  // context's pool, and on a GPU its gpu, runs the work; its memory and random key are not used. All, and the model,
  // must outlive this. Several generators may share a model, each used from a thread of its own: on a GPU with a queue
  // (frit/backend/queue.h) each. Errors: std::invalid_argument if the model lies on another device.
  Generator(Context& context, const Transformer& model, const GeneratorOptions& how = {});
  ~Generator();
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // Reads the model's parameters again after they changed.
  void refresh();

  // Hypotheses of each input, best first: nbest of them, or fewer where fewer could finish. All inputs are one batch.
  // Errors: std::invalid_argument for options that make no sense, ids outside the vocabulary, an empty source, a source
  // longer than the model's positions, a prefix that leaves no room.
  std::vector<std::vector<Hypothesis>> generate(std::span<const GenerateInput> inputs, const GenerateOptions& options);

  // On a GPU: makes room now for the batch with most tokens and the one with most sentences, so that generate() seldom
  // need stop for that between these batches. Each is what a call would get. Errors: as generate()'s for arguments;
  // frit::Error if there is no memory.
  void prepare(std::span<const std::vector<GenerateInput>> batches, const GenerateOptions& options);

  const TransformerConfig& config() const { return model_.config(); }
  // On a GPU: times the library's proposals for the products that calls so far needed (Gpu::tune_products); later calls
  // use what is found. tuning must outlive this. Returns how many shapes were timed. Without a GPU: 0.
  int64_t tune(Tuning& tuning);
  // On a GPU; empty without one.
  const GenerateReport& report() const;
  // On a GPU: microseconds that each kind of work (kernels by name, "product", ...) of step number `position` of such a
  // call takes when it runs alone, and "all" of it: graphs replayed, the median. Outputs must be longer than position +
  // replays + 1 tokens. Errors: frit::Error without a GPU, or in the simulator, which has no clock.
  std::map<std::string, double> time_parts(std::span<const GenerateInput> inputs, const GenerateOptions& options,
                                           int64_t position, int replays);

 private:
  struct Impl;
  const Transformer& model_;
  std::unique_ptr<Impl> impl_;               // on the CPU
  std::unique_ptr<class GpuGenerator> gpu_;  // on a GPU
  GenerateReport no_report_;
  // Ids of each input's hypotheses at most. Errors: as generate().
  std::vector<int64_t> check(std::span<const GenerateInput> inputs, const GenerateOptions& options) const;
};

}  // namespace frit
