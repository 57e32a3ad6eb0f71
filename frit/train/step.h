// Training steps of a Transformer, on the CPU or a GPU: planned memory, forward and backward of micro-batches, and the
// update. On a GPU nothing here waits for it: steps are put on its stream, and what they did is read later.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frit/backend/context.h"
#include "frit/data/batcher.h"
#include "frit/memory/caching.h"
#include "frit/memory/planner.h"
#include "frit/models/transformer/transformer.h"
#include "frit/ops/attention/timing.h"
#include "frit/ops/optimizer/optimizer.h"

namespace frit {

struct StepSettings {
  CriterionOptions criterion;  // chunk_rows is rounded up to a multiple of kPlanTokens
  Recompute recompute = Recompute::kNone;
  OptimizerArgs optimizer;
  PrepareArgs prepare;           // clipping, and how the loss scale moves
  float loss_scale = 1;          // at first; f16 gradients need one
  double ema_decay = 0;          // of the weights' average; 0: there is none
  bool count_swallowed = false;  // count updates that 16 bits lose, see swallowed()
  uint32_t seed = 1;             // of dropout; OptimizerArgs::seed is that of stochastic rounding
  std::string attention;         // forced implementations; empty: chosen
  std::string gemm, bias_gradient;
  // On a GPU: how many batch sizes whose memory depends on lengths keep their plans and graphs; the one that was used
  // longest ago goes.
  int64_t most_lengths = 64;
  bool graphs = true;  // on a GPU: a batch size's steps are recorded as a graph when it comes the second time
  // What follows is there to be switched off, to see what it is worth.
  bool planned_memory = true;      // false: temporaries come from a CachingMemory (on the CPU from the heap); no graphs
  bool packed = true;              // false: batches are filled up, see pad_batch()
  bool per_tensor_update = false;  // optimizer_step_per_tensor in the place of optimizer_step
  bool fused_norm = true;          // false: a sublayer's end and the norm behind it are launches of their own
};

// Fills a batch up as programs without packing do: every sentence to the longest of its side, and all of it is
// computed. The padding of a sentence is a sequence of its own behind it (pads, labels -1), so that nothing of it
// enters a loss, a gradient or an attention of the sentence; attention over it costs less than over a square that is
// masked.
void pad_batch(const Batch& batch, int32_t pad, Batch* padded);
BatchSize padded_size(const BatchSize& size);

// Numbers of tokens are rounded up to a multiple of this for planning: one plan serves all batches of a key. On a GPU
// batches are filled up to it.
constexpr int64_t kPlanTokens = 256;

// What choosing an attention may take before the first step: see TrainingStep::tune_attention.
constexpr double kAttentionSeconds = 2;

// What one update did.
struct StepResult {
  int64_t attempt = 0;   // as given to begin()
  Loss loss;             // sums over its batches
  bool finite = true;    // false: the gradient was not, and nothing was changed
  double grad_norm = 0;  // before clipping
  int64_t updates = 0;   // made so far
  float loss_scale = 1;  // of the next step
  // Milliseconds from the end of the update before to the end of this one, by the device's clock; 0 for the first.
  double step_ms = 0;
  // With TrainingStep::set_timing: from begin() to the end of the last micro-batch's forward, of its backward, of the
  // update.
  double forward_ms = 0, backward_ms = 0, update_ms = 0;
};

// Runs steps from static plans. Each key (source tokens, target tokens, both rounded up; on a GPU also the longest
// sequences and how many there are, where attention's memory depends on them) is recorded once, in planning mode;
// afterwards its steps allocate nothing. The arena serves all plans; it grows only when a new key needs more,
// which on_grow hears of. One thread drives it:
//   begin(); forward_backward() for each micro-batch; update(); and result() some time later.
class TrainingStep {
 public:
  // kAccumulate: the second and later micro-batches of an update.
  enum class Kind : uint8_t { kTrain, kAccumulate, kEvaluate };
  // Updates that may be on the way at one time. Learning rates are given for one more.
  static constexpr int kAhead = 8;

  // model and pool must outlive this; with a gpu, model lies there, and gpu must outlive this, too.
  TrainingStep(Transformer& model, ThreadPool& pool, const StepSettings& settings, Gpu* gpu = nullptr);
  ~TrainingStep();

  // False without planned_memory, and when attention is forced to be materialised on the CPU: its temporaries depend on
  // the length of every sentence, so that no plan serves all batches of a key. Forward and backward then allocate.
  bool planned() const { return settings_.planned_memory && (gpu_ || settings_.attention != "materialised"); }
  static BatchSize batch_size(const Batch& batch);
  // Before the first plan(), on a GPU: for batches of these sizes, times the implementations of attention that take
  // them, and uses the fastest from now on: see choose_attention. `tuning` also keeps products (Gpu::tune_products),
  // and must outlive this. In the simulator, which has no clock, only with a timer. Nothing is timed if run.attention
  // forces one.
  std::vector<AttentionChoice> tune_attention(const std::vector<BatchSize>& sizes, Tuning& tuning, double seconds,
                                              bool again, AttentionTimer timer = {});
  // The plan for batches of this size, recorded if its key is new; nullptr if !planned(): on a GPU such a size's work
  // is recorded all the same, so that its products are known and can be timed.
  const Plan* plan(Kind kind, const BatchSize& size);
  // The lifetimes behind such a plan: names, sizes, births and deaths. Errors: std::invalid_argument if !planned().
  std::vector<Lifetime> record(Kind kind, const BatchSize& size);
  // Makes the arena large enough for every plan so far.
  void reserve();
  // The largest sum of sizes alive at one time, and the sum of all sizes, over the plans so far.
  size_t lower_bound() const { return lower_bound_; }
  size_t total() const { return total_; }
  size_t peak() const { return peak_; }
  // What temporaries take: the arena, or what is held without planned_memory on a GPU.
  size_t arena_bytes() const { return caching_ ? caching_->held_bytes() : memory_.arena_bytes(); }
  // On a GPU, beside arena and workspace: the batch.
  size_t input_bytes() const { return inputs_bytes_; }
  // Beside the workspace: the average of weights and what it sets aside, copies of gradients.
  size_t extra_bytes() const;
  int64_t plans() const { return static_cast<int64_t>(plans_.size()); }
  int64_t graphs() const { return static_cast<int64_t>(graphs_.size()); }

  // Begins update number `attempt` (counted from 0, skipped ones included) over step_tokens target tokens in all.
  // rates[i] is the learning rate of update first + i (the first update is number 1): which one this will be is known
  // where it runs, so that a skipped update shifts the rates without anybody waiting. Errors: std::invalid_argument for
  // no tokens or no rates.
  void begin(int64_t attempt, int64_t step_tokens, std::span<const double> rates, int64_t first);
  // Forward and backward of micro-batch `stream`, 0 for the first. The gradients are those of the mean loss over
  // step_tokens target tokens. (seed, attempt, stream) decide the dropout masks. The batch may go when this returns.
  void forward_backward(const Batch& batch, int64_t stream);
  // Updates the parameters, and the average of weights, from the gradients, unless one of these is not finite.
  void update();
  // What the oldest update that was not told of did; nothing if there is none, or it is still on the way and `wait` is
  // false. update() waits for the oldest one when kAhead are on the way.
  std::optional<StepResult> result(bool wait);
  // Updates that result() has not told of.
  int64_t on_the_way() const { return static_cast<int64_t>(attempts_done_ - results_told_); }

  // Loss without dropout and smoothing: sums over all batches since the last evaluated().
  void evaluate(const Batch& batch);
  Loss evaluated();  // waits
  // Sum of squares of a block of the workspace: not finite if one of its elements is not. Waits.
  double sum_of_squares(const Tensor& block);

  // The optimizer's numbers, to be kept in checkpoints. Waits.
  struct Numbers {
    int64_t updates = 0, finite = 0;  // finite: updates since the loss scale last changed
    float loss_scale = 1;
  };
  Numbers numbers();
  void set_numbers(const Numbers& numbers);

  // The average of weights, f32; undefined without ema_decay. It starts at zero: see set_ema.
  const Tensor& ema() const { return ema_; }
  // Copies the average to or from `values`, elements() of them. Waits.
  void get_ema(float* values);
  void set_ema(const float* values);
  // Puts the average in the place of the parameters (true), and the parameters back (false). No step in between.
  void exchange_ema(bool in);

  // Of one parameter, since the last swallowed(): updates that were not zero in fp32, and those of them that left the
  // stored value as it was (see optimizer_swallowed). Empty without count_swallowed. Waits.
  struct Swallowed {
    std::string name;
    int64_t updates = 0, lost = 0;
  };
  std::vector<Swallowed> swallowed();

  // Microseconds that each kind of work (kernels by name, "product", ...) of one step over `batch` takes when it runs
  // alone, and "all" of it: graphs replayed, the median. The weights are worth nothing afterwards. Errors: frit::Error
  // in the simulator, which has no clock.
  // only: times these parts alone, and not "all".
  std::map<std::string, double> time_parts(const Batch& batch, int replays, const std::vector<std::string>& only = {});
  // Bytes a second, read and written together, of a plain copy between blocks of the workspace, which are worth nothing
  // afterwards. Errors: as time_parts.
  double time_copy(int replays);

  // Fills in the milliseconds of results from now on. Steps then run without graphs.
  void set_timing(bool timing) { timing_ = timing; }

  // Called with the old and new size when the arena grows after reserve().
  std::function<void(size_t before, size_t after)> on_grow;
  Context& context() { return context_; }

 private:
  // What memory depends on, each rounded up. sequences and longest lengths are 0 where it does not depend on them.
  struct Extent {
    int64_t source_tokens = 0, target_tokens = 0, sequences = 0, longest_source = 0, longest_target = 0;
    auto operator<=>(const Extent&) const = default;
  };
  Extent extent_of(Kind kind, const BatchSize& size) const;
  // Does "short" take every attention of such a batch? Its memory then depends on no length.
  bool is_short(Kind kind, const BatchSize& size) const;
  using Key = std::pair<Kind, Extent>;
  struct Recorded {
    int64_t seen = 0;
    std::unique_ptr<GpuGraph> graph;
  };
  struct Slot;  // of one update on the way
  struct Staging;
  Tensor scalar(DType dtype, int64_t count);
  const Plan* ready(Kind kind, const Batch& batch);
  const Plan* update_plan() const { return settings_.planned_memory ? &update_plan_ : nullptr; }
  void note(const Plan& plan);
  void use(const Extent& extent);
  StepOptions step_options(bool accumulate);
  // Room on the GPU for any batch of as many tokens a side.
  void reserve_inputs(int64_t tokens);
  // The batch where the model lies, filled up on a GPU: there it waits in pinned memory until fetch() copies it.
  BatchView place(Kind kind, const Batch& given);
  void fetch();
  template <typename Work>
  void run(Recorded* recorded, Work&& work);
  void to_device(const Tensor& to, const void* from);
  void from_device(void* to, const Tensor& from);
  OptimizerBlocks blocks() const;
  void update_parameters();

  Transformer& model_;
  StepSettings settings_;
  Gpu* gpu_;
  std::unique_ptr<CachingMemory> caching_;  // without planned_memory, on a GPU
  Memory memory_;
  Context context_;
  std::map<Key, Plan> plans_;
  std::set<Key> unplanned_;  // recorded without a plan
  Plan update_plan_;
  std::map<DType, Plan> squares_plans_;  // of sum_of_squares, by a block's type
  size_t peak_ = 0, lower_bound_ = 0, total_ = 0;

  Block scalars_;  // the tensors below, where the model lies
  size_t scalars_used_ = 0;
  std::vector<void*> born_;
  Tensor rates_, first_, inverse_tokens_, scale_, evaluation_, squares_, not_finite_;
  Tensor told_;    // u8: what result() tells of, which are the totals and two tensors of state_
  Tensor totals_;  // f64 [3]
  OptimizerState state_;
  Block ema_block_, aside_block_, slice_ends_block_, swallowed_block_, gradient_copy_block_;
  Tensor ema_, aside_, slice_ends_, swallowed_, gradient_copy_;
  Batch padded_;  // the batch in hand, filled up

  int64_t attempt_ = 0;        // of the update that was begun
  int64_t attempts_done_ = 0;  // updates put on the way
  int64_t results_told_ = 0;
  int64_t updates_told_ = 0;  // updates made as of the last result
  bool evaluating_ = false;   // evaluation_ holds sums
  bool timing_ = false;
  bool short_attention_ = false;                   // "short" takes all heads while sequences are short enough
  bool attention_tuned_ = false;                   // context_.tuning() may say otherwise
  std::vector<std::unique_ptr<Slot>> slots_;       // kAhead + 1 of them
  std::vector<std::unique_ptr<Staging>> staging_;  // batches on their way to the GPU
  size_t next_staging_ = 0;
  Staging* placed_ = nullptr;  // where the batch in hand waits, and its bytes
  size_t placed_bytes_ = 0;
  Block inputs_;  // the batch on the GPU
  size_t inputs_bytes_ = 0;
  std::map<Extent, int64_t> last_used_;  // of those with lengths: the count below when it came last
  int64_t uses_ = 0;
  std::map<std::pair<Extent, bool>, Recorded> graphs_;  // bool: gradients are added to
  Recorded update_graph_;
};

}  // namespace frit
