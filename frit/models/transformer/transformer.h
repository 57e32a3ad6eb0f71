// The encoder-decoder Transformer: parameters by name, one training step, evaluation, and its directory on disk.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "frit/backend/context.h"
#include "frit/layers/decoder_layer.h"
#include "frit/layers/embedding.h"
#include "frit/layers/encoder_layer.h"
#include "frit/layers/output.h"
#include "frit/memory/workspace.h"
#include "frit/models/transformer/config.h"

namespace frit {

// A packed batch as Tensors: ids and labels i32 [tokens], offsets i32 [sentences + 1].
struct BatchView {
  Tensor source_ids, source_offsets;
  Tensor target_ids, labels, target_offsets;
  int64_t max_source = 0, max_target = 0;  // at least the longest sentence's tokens; 0: not known (a GPU wants them)

  int64_t source_tokens() const { return source_ids.dim(0); }
  int64_t target_tokens() const { return labels.dim(0); }
  Sequences source() const { return {source_offsets, max_source}; }
  Sequences target() const { return {target_offsets, max_target}; }

  // A view of anything with frit::Batch's five vectors, which must outlive it.
  template <typename Batch>
  static BatchView of(const Batch& batch) {
    return {view(batch.source_ids),     view(batch.source_offsets),    view(batch.target_ids),       view(batch.labels),
            view(batch.target_offsets), longest(batch.source_offsets), longest(batch.target_offsets)};
  }
  // The longest sequence between offsets.
  static int64_t longest(const std::vector<int32_t>& offsets) {
    int64_t most = 0;
    for (size_t i = 1; i < offsets.size(); ++i) most = std::max<int64_t>(most, offsets[i] - offsets[i - 1]);
    return most;
  }
  // Shapes without data, for planning.
  static BatchView planned(int64_t sentences, int64_t source_tokens, int64_t target_tokens);

 private:
  static Tensor view(const std::vector<int32_t>& values) {
    return Tensor(const_cast<int32_t*>(values.data()), DType::kI32, {static_cast<int64_t>(values.size())});
  }
};

// Sums over a batch's target tokens (labels >= 0), in double. Averages are the caller's: it knows the whole step's
// tokens.
struct Loss {
  double loss = 0;  // label-smoothed cross entropy
  double nll = 0;   // -log p(label): perplexity is exp(nll / tokens)
  int64_t tokens = 0;
};

// Where a step on the host adds its sums up: what loss_total writes.
struct LossTotals {
  double values[3] = {0, 0, 0};
  Tensor tensor() { return Tensor(values, DType::kF64, {3}); }
  Loss loss() const { return {values[0], values[1], static_cast<int64_t>(values[2])}; }
};

// What backward computes again instead of keeping: the same bits, less memory.
enum class Recompute : uint8_t {
  kNone,
  kActivations,  // norm outputs and activations; no product
  kLayer,        // everything of a layer but its input
};

struct StepOptions {
  CriterionOptions criterion;  // label smoothing; rows of logits held at a time
  bool accumulate = false;  // add to gradients and totals (second and later micro-batches) instead of overwriting them
  Recompute recompute = Recompute::kNone;
  std::function<void()> backward_begins;  // called between forward and backward (benchmarks)
};

struct InitOptions {
  enum class Kind : uint8_t { kXavierUniform, kNormal };
  Kind kind = Kind::kXavierUniform;  // of matrices; biases are 0, gammas 1, betas 0
  double normal_std = 0.02;          // kNormal
  // Embeddings and learned positions are N(0, 1/H); the pad token's row is 0.
};

// Weights as the chain of sublayers reads them (see frit/layers/layer.h: each sublayer has its norm in front, whatever
// the names on disk count it to). The same struct holds views of the parameters and of the gradients.
struct TransformerWeights {
  Embedding source, target;
  std::vector<EncoderLayer> encoder;
  LayerNorm encoder_norm;  // behind the encoder's last layer
  Linear cross;            // keys and values of all decoder layers: [layers * 2H, H], rows [k_0; v_0; k_1; v_1; ...]
  std::vector<DecoderLayer> decoder;
  LayerNorm decoder_norm;  // behind the decoder's last layer
  Output output;
};

class Transformer {
 public:
  struct Options {
    Precision precision = Precision::kF32;
    bool training = false;  // gradients and optimizer state are allocated too
    int moments = 2;        // Adam 2, SGD with momentum 1
    DType gradient_dtype = DType::kF32;
    bool planning = false;           // steps are recorded alone: memory for weights is reserved but never touched
    DeviceMemory* device = nullptr;  // where weights lie and steps run, must outlive the model; null: the host
  };

  // All parameters are 0: initialise() or load_weights() next. Errors: frit::Error if the configuration is not valid,
  // or if it is to be trained with layerdrop.
  Transformer(const TransformerConfig& config, const Options& options);
  ~Transformer();
  Transformer(const Transformer&) = delete;
  Transformer& operator=(const Transformer&) = delete;

  const TransformerConfig& config() const { return config_; }
  Workspace& workspace() { return *workspace_; }
  const Workspace& workspace() const { return *workspace_; }
  // The parameters' names, shapes and groups; what the constructor makes its workspace from.
  static ParameterLayout layout(const TransformerConfig& config);

  // Each value depends on (seed, parameter's name, position in it) alone, whatever threads of the pool drew it (null:
  // this one alone).
  void initialise(uint32_t seed, const InitOptions& options = {}, ThreadPool* pool = nullptr);

  // Forward and backward: gradients of scale[0] * (sum of the tokens' losses). scale is 1 / (target tokens of the whole
  // step) times the loss scale. Dropout as the configuration says; the context's random key and stream decide the
  // masks. Shapes: scale f32 [1]; totals f64 [3], the sums as loss_total writes them. Everything lies where the model
  // does. Errors: std::invalid_argument if the model was not built for training, or the batch's shapes, ids or lengths
  // do not fit.
  void train_step(Context& context, const BatchView& batch, const Tensor& scale, const Tensor& totals,
                  const StepOptions& options = {});
  // Zeroes the gradient that a tied output projection gives the pad token's row, so that training leaves the row at
  // zero: transformers and CTranslate2 start the decoder from the pad token and may take its embedding for zero. Call
  // it behind the step's last train_step; does nothing while planning.
  void hold_pad_row(Context& context) const;
  // Loss without dropout and without gradients, written to totals f64 [3], or added to it.
  void evaluate(Context& context, const BatchView& batch, const Tensor& totals, const CriterionOptions& options = {},
                bool accumulate = false);
  // The encoder's output [source tokens, H].
  Buffer encode(Context& context, const Tensor& source_ids, const Sequences& source);
  // Keys and values of all decoder layers [source tokens, layers * 2H] from the encoder's output.
  Buffer cross_keys_values(Context& context, const Tensor& memory);
  // Layer l's part of them. Shapes: k, v [source tokens, H], strided.
  CrossKeysValues cross_of_layer(const Tensor& keys_values, int64_t layer, const Sequences& queries,
                                 const Sequences& keys) const;
  // Logits [target tokens, V] of the batch, bias added; labels are not read.
  Buffer logits(Context& context, const BatchView& batch);

  // What decoding reads.
  const TransformerWeights& weights() const { return weights_; }
  float embedding_scale() const;
  LayerOptions encoder_options() const { return layer_options(config_.encoder_heads, false, false); }  // of inference
  LayerOptions decoder_options() const { return layer_options(config_.decoder_heads, false, false); }
  // final_logits_bias, f32 [V]; undefined if it is all zeros.
  Tensor logits_bias() const { return weights_.output.bias; }
  // Its values on the host; empty if it is all zeros.
  const std::vector<float>& logits_bias_values() const { return logits_bias_; }
  // Errors: std::invalid_argument unless there is one value a target token.
  void set_logits_bias(const std::vector<float>& values);

  // Reads a directory as Frit or transformers' save_pretrained writes it: config.json and model.safetensors (or
  // shards), in f32, bf16 or f16; or one with a fairseq checkpoint's tensors and arguments (see fairseq.h). Errors:
  // frit::Error naming each tensor that is missing, unexpected or of another shape.
  static std::unique_ptr<Transformer> load(const std::string& directory, const Options& options);
  void load_weights(const std::string& directory);
  // Writes config.json, generation_config.json and model.safetensors (temporary names, flushed, renamed); creates the
  // directory. Parameters are written as f32 (with the master or the residual) or rounded to bf16.
  void save(const std::string& directory, const GenerationConfig& generation, DType dtype = DType::kF32) const;
  void save(const std::string& directory) const { save(directory, GenerationConfig::for_model(config_)); }
  // model.safetensors alone.
  void save_weights(const std::string& path, DType dtype = DType::kF32) const;

 private:
  struct Tape;
  void make_positions();
  TransformerWeights bind(bool gradients) const;
  LayerOptions layer_options(int64_t heads, bool training, bool recompute) const;
  void check(const BatchView& batch) const;
  // Encoder and decoder up to the output projection's input; what backward needs goes to the tape.
  Buffer forward(Context& context, const BatchView& batch, const LayerOptions& encoder, const LayerOptions& decoder,
                 Tape& tape);
  void backward(Context& context, const BatchView& batch, const LayerOptions& encoder, const LayerOptions& decoder,
                Buffer dx, bool accumulate, Tape& tape);
  void criterion(Context& context, const BatchView& batch, const CriterionOptions& options, const Tensor& x,
                 const Tensor& scale, const Tensor& totals, bool accumulate);
  // A copy of host bytes where the model lies.
  Block place(const void* bytes, size_t count, DType dtype) const;

  TransformerConfig config_;
  std::unique_ptr<Workspace> workspace_;
  Block positions_;                 // sinusoidal table, in the compute dtype
  std::vector<float> logits_bias_;  // on the host; empty: zeros
  Block logits_bias_block_;         // where the model lies
  TransformerWeights weights_, gradients_;
  Place encoder_place_{"encoder"}, decoder_place_{"decoder"};
  std::unique_ptr<Tape> tape_;
};

}  // namespace frit
