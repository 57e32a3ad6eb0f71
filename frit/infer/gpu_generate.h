// Generator on a GPU: the whole search runs there, a recorded graph a step; the host queues steps and reads results.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "frit/infer/generate.h"
#include "frit/memory/planner.h"
#include "frit/ops/search_step/search_step.h"

namespace frit {

// The numbers of sentences for which a step is made: the first of 1, 2, 3, 4, 6, 8, 12, ... that is no less. What lies
// between is computed, and ignored.
int64_t sentence_bucket(int64_t sentences);

// Tensors of their own on a device.
class DeviceTensors {
 public:
  explicit DeviceTensors(Gpu& gpu) : gpu_(gpu) {}
  ~DeviceTensors() { clear(); }
  DeviceTensors(const DeviceTensors&) = delete;
  DeviceTensors& operator=(const DeviceTensors&) = delete;
  Tensor make(DType dtype, Shape shape);
  void release(const Tensor& tensor);
  void clear();
  int64_t bytes() const { return bytes_; }

 private:
  struct Piece {
    Block block;
    int64_t bytes = 0;
  };
  Gpu& gpu_;
  std::vector<Piece> pieces_;
  int64_t bytes_ = 0;
};

class GpuGenerator {
 public:
  GpuGenerator(Context& context, const Transformer& model, const GeneratorOptions& how);
  ~GpuGenerator();
  void refresh();
  // Room for calls with each of these batches, which generate() would make one by one. Arguments as there.
  struct Batch {
    std::span<const GenerateInput> inputs;
    std::vector<int64_t> longest;
  };
  void prepare(std::span<const Batch> batches, const GenerateOptions& options);
  // Arguments are checked already. longest[i]: ids of a hypothesis of inputs[i] at most.
  std::vector<std::vector<Hypothesis>> generate(std::span<const GenerateInput> inputs, std::span<const int64_t> longest,
                                                const GenerateOptions& options);
  int64_t tune(Tuning& tuning);
  std::map<std::string, double> time_parts(std::span<const GenerateInput> inputs, std::span<const int64_t> longest,
                                           const GenerateOptions& options, int64_t position, int replays);
  const GenerateReport& report() const { return report_; }

 private:
  // What all buffers are made for. Grows only, but for the width. A call with few long sentences and one with many
  // short ones share them: each lays its tables out for its own number of sentences (lay_out).
  struct Extent {
    int64_t width = 0, sentences = 0, source_tokens = 0, prompt_tokens = 0, settings = 0;
    int64_t cache_rows = 0;  // positions * slots of the largest call
    bool token_scores = false;
    bool operator==(const Extent&) const = default;
    int64_t slots() const { return sentences * width; }
    // Also has room for all of `other`, whose width is the same.
    void include(const Extent& other);
  };
  struct EncoderKey {
    int64_t tokens = 0, longest = 0;
    int64_t sentences = 0;  // for which tables are laid out
    auto operator<=>(const EncoderKey&) const = default;
  };
  struct StepKey {
    int64_t capacity = 0;  // sentences for which tables are laid out
    int64_t sentences = 0, count = 0, keep = 0;
    bool beam = false, sampling = false, token_scores = false, boosts = false;
    auto operator<=>(const StepKey&) const = default;
  };
  // One call of generate(): what its steps have in common.
  struct Call {
    const GenerateOptions* options = nullptr;
    int64_t keep = 1;
    int64_t longest = 0;    // ids of a hypothesis
    int64_t sentences = 0;  // for which there is room
    EncoderKey encoder;
    Extent wanted;
  };
  struct Recorded {
    Plan plan;
    int64_t plain_runs = 0;  // without a graph, up to kPlainRuns
    std::unique_ptr<GpuGraph> graph;
    int64_t kernels = 0, products = 0;  // of a run
  };

  // Buffers, plans, and what comes before the first step.
  Call describe(std::span<const GenerateInput> inputs, std::span<const int64_t> longest,
                const GenerateOptions& options) const;
  void plan(const Call& call);
  Call begin(std::span<const GenerateInput> inputs, std::span<const int64_t> longest, const GenerateOptions& options);
  void reserve(const Extent& wanted);
  void lay_out(int64_t sentences);
  void grow_positions(int64_t positions);
  void upload(std::span<const GenerateInput> inputs, std::span<const int64_t> longest, const Call& call);
  void encode(const EncoderKey& key);
  void step(const StepKey& key);
  StepKey step_key(const Call& call, int64_t sentences, int64_t length) const;
  void run(Recorded& recorded, const std::function<void()>& work);
  Recorded& ready(Recorded& recorded, const std::function<void()>& work);
  void queue_step(const Call& call, int64_t live, int64_t position);
  // What search_step wrote last: steps done * 2^32 + live sentences.
  std::atomic_ref<int64_t> progress() const {
    return std::atomic_ref<int64_t>(*reinterpret_cast<int64_t*>(progress_.get()));
  }
  std::vector<std::vector<Hypothesis>> collect(const Call& call, std::span<const GenerateInput> inputs, int64_t steps);

  // What goes from sublayer to sublayer: the sum x, and its LayerNorm once something has computed it. Where nobody
  // reads x again (post-LN) it may be undefined then.
  struct Stream {
    Buffer x, normed;
    const Tensor& any() const { return x.defined() ? x.tensor() : normed.tensor(); }
  };
  // y = act(norm(x) weight^T + bias), or of x itself where there is no norm.
  Buffer project(Stream& stream, const LayerNorm& norm, const Linear& linear, std::optional<Activation> activation,
                 DType dtype);
  void project_to(Stream& stream, const LayerNorm& norm, const Linear& linear, std::optional<Activation> activation,
                  const Tensor& y);
  // The end of a sublayer: x = y weight^T + bias + what the stream has for a residual. `next` is the norm behind it.
  void close(Stream& stream, const Tensor& y, const Linear& linear, const LayerNorm& next);
  // Whether y = x w^T, w[n, k], of so many rows is linear_rows'.
  bool by_rows(int64_t rows, const Tensor& w) const;
  void round_bias();
  void feed_forward(Stream& stream, const FeedForward& w, const LayerNorm& next);

  const Transformer& model_;
  GeneratorOptions how_;
  Gpu& gpu_;
  Memory memory_;
  Context context_;
  Extent extent_;
  GenerateReport report_;
  int64_t H_, V_, layers_, places_;

  DeviceTensors tensors_, constants_;
  Tensor rounded_bias_;  // the logits' bias in the model's dtype, which linear_rows takes; undefined if there is none
  SearchState whole_, state_;                          // all there is room for, and what this call uses of it
  int64_t sentences_ = 0, slots_ = 0, positions_ = 0;  // of state_ and the cache
  Tensor survivors_;                                   // i32 [steps, rows], if they are counted
  int64_t step_number_ = 0, products_ = 0;
  Tensor cache_;  // [layers, cache_rows * 2 * H], of which a call uses [layers][positions, slots, 2, H]
  Tensor cross_;  // [source tokens, layers * 2 * H]
  Tensor count_, settings_, numbers_, prompt_ids_, source_ids_;
  Tensor source_offsets_, prompt_offsets_, draw_, whole_source_offsets_, whole_prompt_offsets_, whole_draw_;
  Tensor inputs_;  // what these, and state_.prompt and max_length, are parts of
  PinnedBlock staging_, results_, progress_;
  std::map<EncoderKey, Recorded> encoders_;
  std::map<StepKey, Recorded> steps_;
  std::unique_ptr<GpuEvent> began_, encoded_, searched_, downloaded_, queued_;
};

}  // namespace frit
