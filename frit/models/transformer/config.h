// Configuration of the encoder-decoder Transformer, as Hugging Face's config.json and generation_config.json hold it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"

namespace frit {

enum class Positions : uint8_t {
  kSinusoidal,  // frequencies 10000^(-2i / H), as transformers' Marian has them
  kLearned,
  kFairseq,  // sinusoids with the frequencies exp(-i ln(10000) / (H/2 - 1)) of fairseq and tensor2tensor
};
const char* name_of(Positions positions);          // "sinusoidal", "learned", "fairseq"
Positions parse_positions(std::string_view name);  // Errors: frit::Error with the known names

// Sizes and choices of one model. In comments: the key in config.json.
struct TransformerConfig {
  int64_t encoder_layers = 6, decoder_layers = 6;          // the same
  int64_t d_model = 512;                                   // d_model: H
  int64_t encoder_heads = 8, decoder_heads = 8;            // encoder_attention_heads, decoder_attention_heads
  int64_t encoder_ffn_dim = 2048, decoder_ffn_dim = 2048;  // the same
  int64_t source_vocab = 32000;                            // vocab_size
  int64_t target_vocab = 32000;                            // decoder_vocab_size
  int64_t max_positions = 512;                             // max_position_embeddings
  Activation activation = Activation::kRelu;               // activation_function
  bool pre_norm = false;                                   // normalize_before (ours; transformers' Marian is post-LN)
  Positions positions = Positions::kSinusoidal;            // position_embedding_type (ours)
  int64_t first_position = 0;     // first_position (ours): the number that sinusoids give a sentence's first token
  bool share_embeddings = true;   // share_encoder_decoder_embeddings: source and target read one table
  bool tie_output = true;         // tie_word_embeddings: the output projection is the target's table
  bool scale_embedding = true;    // scale_embedding: embeddings times sqrt(H)
  double dropout = 0.1;           // dropout: embeddings and every sublayer's output
  double attention_dropout = 0;   // attention_dropout: attention probabilities
  double activation_dropout = 0;  // activation_dropout: after the activation
  int64_t pad_id = 0;             // pad_token_id
  int64_t eos_id = 1;             // eos_token_id
  int64_t start_id = 0;           // decoder_start_token_id: Marian starts with the pad token
  double encoder_layerdrop = 0, decoder_layerdrop = 0;  // kept as read; Frit does not train with it

  // Throws frit::Error naming the field unless every size is positive, heads divide d_model, ids lie in their
  // vocabularies, probabilities in [0, 1), and shared embeddings have one vocabulary size.
  void validate() const;

  // True if transformers.MarianMTModel computes exactly this model; else `reason` (optional) says why not.
  bool marian_compatible(std::string* reason = nullptr) const;
  // "marian", or "frit-transformer" for what transformers cannot load.
  const char* model_type() const { return marian_compatible() ? "marian" : "frit-transformer"; }

  // The text of config.json; dtype is what model.safetensors holds ("float32", "bfloat16").
  std::string to_json(std::string_view dtype = "float32") const;
  // Takes model_type marian, fsmt (transformers' port of fairseq's Transformer) and frit-transformer. Keys of other use
  // are ignored, absent ones have the defaults of transformers' MarianConfig or FSMTConfig. Errors: frit::Error naming
  // the key.
  static TransformerConfig from_json(std::string_view text, std::string_view file = "config.json");
  // config.json of a model directory; it may also hold the arguments of a fairseq training, whose vocabularies' sizes
  // model.safetensors tells (see fairseq.h). Errors: frit::Error naming file and key.
  static TransformerConfig read(const std::string& directory);

  // transformer-tiny (the demo), -small, -base, -big; sizes alone, vocabulary and ids are the caller's.
  // Errors: frit::Error with the known names.
  static TransformerConfig preset(std::string_view name);
  static std::vector<std::string> preset_names();
};

// How generation_config.json says a model is decoded, unless the user says otherwise.
struct GenerationConfig {
  int64_t num_beams = 1;
  int64_t max_length = 512;    // start token, prefix and EOS counted, as transformers counts; 0: not given
  int64_t max_new_tokens = 0;  // EOS counted, start token and prefix not; 0: not given. One of the two always is
  int64_t min_length = 0;
  double length_penalty = 1;
  std::string early_stopping = "false";  // "false", "true" or "never"
  int64_t no_repeat_ngram_size = 0;
  double repetition_penalty = 1;
  int64_t pad_id = 0, start_id = 0;
  std::vector<int64_t> eos_ids = {1};
  int64_t forced_eos_id = -1;                   // the token forced at max_length; -1: none
  int64_t forced_bos_id = -1;                   // the token forced after the start token; -1: none
  std::vector<std::vector<int64_t>> bad_words;  // token sequences that are never produced

  // What Frit writes for a model it trained: bad_words [[pad]], forced EOS, max_length as the positions allow.
  static GenerationConfig for_model(const TransformerConfig& config);
  std::string to_json() const;
  // Missing keys have transformers' defaults (20 new tokens). Unknown keys are ignored. Errors: frit::Error naming the
  // key.
  static GenerationConfig from_json(std::string_view text, std::string_view file = "generation_config.json");
  // generation_config.json of a model directory; if there is none, config.json, where older releases kept these keys;
  // for a fairseq training's arguments what fairseq-generate does.
  static GenerationConfig read(const std::string& directory);
};

// Sizes of one batch that decide a step's cost.
struct BatchShape {
  int64_t source_tokens = 0, target_tokens = 0;
  int64_t source_squares = 0;  // sum of Ls^2 over sentences
  int64_t target_squares = 0;  // sum of Lt^2
  int64_t cross_products = 0;  // sum of Ls * Lt
};
// Floating-point operations (2 a multiply-add) of the products of one training step: forward once, backward twice.
// Nothing is counted for scores computed again, element-wise work and the optimizer; causal attention counts the
// visible half.
double flops_per_step(const TransformerConfig& config, const BatchShape& shape);
// The same without backward.
double flops_forward(const TransformerConfig& config, const BatchShape& shape);

}  // namespace frit
