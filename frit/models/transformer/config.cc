#include "frit/models/transformer/config.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/models/format/safetensors.h"
#include "frit/models/transformer/config_json.h"
#include "frit/models/transformer/fairseq.h"

namespace frit {
namespace {

using config_json::parse_object;
using config_json::Reader;
using nlohmann::json;
using nlohmann::ordered_json;

void check_positive(const char* key, int64_t value) {
  if (value < 1) fail("[config] {} is {}, expected 1 or more", key, value);
}
void check_probability(const char* key, double value) {
  if (!(value >= 0 && value < 1))
    fail("[config] {} is {}, expected a probability from 0 up to, not including, 1", key, value);
}

}  // namespace

const char* name_of(Positions positions) {
  switch (positions) {
    case Positions::kLearned:
      return "learned";
    case Positions::kFairseq:
      return "fairseq";
    case Positions::kSinusoidal:
      break;
  }
  return "sinusoidal";
}

Positions parse_positions(std::string_view name) {
  if (name == "sinusoidal") return Positions::kSinusoidal;
  if (name == "learned") return Positions::kLearned;
  if (name == "fairseq") return Positions::kFairseq;
  fail("[config] positions are {}, expected sinusoidal, learned or fairseq", name);
}

void TransformerConfig::validate() const {
  check_positive("encoder_layers", encoder_layers);
  check_positive("decoder_layers", decoder_layers);
  check_positive("d_model", d_model);
  check_positive("encoder_attention_heads", encoder_heads);
  check_positive("decoder_attention_heads", decoder_heads);
  check_positive("encoder_ffn_dim", encoder_ffn_dim);
  check_positive("decoder_ffn_dim", decoder_ffn_dim);
  check_positive("vocab_size", source_vocab);
  check_positive("decoder_vocab_size", target_vocab);
  check_positive("max_position_embeddings", max_positions);
  constexpr int64_t kMostLayers = 10000;  // a number with some zeros too many would take minutes and all memory
  if (encoder_layers > kMostLayers || decoder_layers > kMostLayers)
    fail("[config] encoder_layers is {} and decoder_layers {}, expected at most {}", encoder_layers, decoder_layers,
         kMostLayers);
  if (d_model % encoder_heads != 0 || d_model % decoder_heads != 0)
    fail("[config] d_model is {}, which {} encoder heads and {} decoder heads do not both divide", d_model,
         encoder_heads, decoder_heads);
  if (first_position < 0 || first_position > INT32_MAX)
    fail("[config] first_position is {}, expected 0 or more", first_position);
  if (positions == Positions::kFairseq && d_model < 4)
    fail("[config] d_model is {}, but fairseq's sinusoids need 4 or more", d_model);
  if (share_embeddings && source_vocab != target_vocab)
    fail("[config] shared embeddings need one vocabulary: vocab_size is {}, decoder_vocab_size {}", source_vocab,
         target_vocab);
  const struct {
    const char* key;
    int64_t id;
  } ids[] = {{"pad_token_id", pad_id}, {"eos_token_id", eos_id}, {"decoder_start_token_id", start_id}};
  for (const auto& [key, id] : ids)
    if (id < 0 || id >= target_vocab) fail("[config] {} is {}, expected 0 to {}", key, id, target_vocab - 1);
  check_probability("dropout", dropout);
  check_probability("attention_dropout", attention_dropout);
  check_probability("activation_dropout", activation_dropout);
}

bool TransformerConfig::marian_compatible(std::string* reason) const {
  const char* why = nullptr;
  if (pre_norm) {
    why = "it normalises before each sublayer (pre-LN), transformers' Marian after it";
  } else if (positions == Positions::kLearned) {
    why = "it learns its positions, transformers' Marian has sinusoidal ones";
  } else if (positions == Positions::kFairseq || first_position != 0) {
    why = "its positions are fairseq's, transformers' Marian has sinusoids of other frequencies that begin at 0";
  } else if (share_embeddings && !tie_output) {
    why =
        "source and target share embeddings while the output has its own matrix: transformers' Marian ties all three "
        "or none";
  } else if (pad_id >= source_vocab) {
    why = "the pad id lies outside the source vocabulary";
  }
  if (reason) *reason = why ? why : "";
  return why == nullptr;
}

std::string TransformerConfig::to_json(std::string_view dtype) const {
  const bool marian = marian_compatible();
  ordered_json j;
  j["architectures"] = {marian ? "MarianMTModel" : "FritTransformer"};
  j["model_type"] = model_type();
  j["activation_dropout"] = activation_dropout;
  j["activation_function"] = name_of(activation);
  j["attention_dropout"] = attention_dropout;
  j["bos_token_id"] = nullptr;
  j["d_model"] = d_model;
  j["decoder_attention_heads"] = decoder_heads;
  j["decoder_ffn_dim"] = decoder_ffn_dim;
  j["decoder_layerdrop"] = decoder_layerdrop;
  j["decoder_layers"] = decoder_layers;
  j["decoder_start_token_id"] = start_id;
  j["decoder_vocab_size"] = target_vocab;
  j["dropout"] = dropout;
  j["dtype"] = dtype;
  j["encoder_attention_heads"] = encoder_heads;
  j["encoder_ffn_dim"] = encoder_ffn_dim;
  j["encoder_layerdrop"] = encoder_layerdrop;
  j["encoder_layers"] = encoder_layers;
  j["eos_token_id"] = eos_id;
  j["forced_eos_token_id"] = nullptr;  // its default is 0; what generation forces stands in generation_config.json
  j["init_std"] = 0.02;
  j["is_encoder_decoder"] = true;
  j["max_position_embeddings"] = max_positions;
  j["normalize_before"] = pre_norm;
  if (!marian && positions != Positions::kLearned) j["first_position"] = first_position;
  if (!marian) j["position_embedding_type"] = name_of(positions);
  j["num_hidden_layers"] = encoder_layers;
  j["pad_token_id"] = pad_id;
  j["scale_embedding"] = scale_embedding;
  j["share_encoder_decoder_embeddings"] = share_embeddings;
  j["static_position_embeddings"] = positions != Positions::kLearned;
  j["tie_word_embeddings"] = tie_output;
  j["use_cache"] = true;
  j["vocab_size"] = source_vocab;
  return j.dump(2) + "\n";
}

TransformerConfig TransformerConfig::from_json(std::string_view text, std::string_view file) {
  const json object = parse_object(text, file);
  const Reader in{object, file};
  std::string model_type;
  in.read("model_type", model_type);
  if (holds_fairseq_arguments(text, file))
    fail(
        "[config] {} holds fairseq's arguments, which leave the vocabularies' sizes to the tensors: read the directory",
        file);
  const bool marian = model_type == "marian", fsmt = model_type == "fsmt";
  if (!marian && !fsmt && model_type != "frit-transformer")
    fail(
        "[config] {}: model_type is \"{}\", expected marian, fsmt or frit-transformer, or fairseq's arguments "
        "(encoder_embed_dim ...)",
        file, model_type);

  TransformerConfig c;  // transformers' defaults of MarianConfig and FSMTConfig
  c.encoder_layers = c.decoder_layers = 12;
  c.d_model = 1024;
  c.encoder_heads = c.decoder_heads = 16;
  c.encoder_ffn_dim = c.decoder_ffn_dim = 4096;
  c.max_positions = 1024;
  if (fsmt) {
    c.source_vocab = 42024;
    c.activation = Activation::kRelu;
    c.tie_output = false;
    c.pad_id = 1, c.eos_id = c.start_id = 2;
  } else {
    c.source_vocab = 58101;
    c.activation = Activation::kGelu;
    c.scale_embedding = false;
    c.pad_id = c.start_id = 58100, c.eos_id = 0;
  }
  c.target_vocab = c.source_vocab;

  in.read("encoder_layers", c.encoder_layers), in.read("decoder_layers", c.decoder_layers);
  in.read("d_model", c.d_model);
  in.read("encoder_attention_heads", c.encoder_heads), in.read("decoder_attention_heads", c.decoder_heads);
  in.read("encoder_ffn_dim", c.encoder_ffn_dim), in.read("decoder_ffn_dim", c.decoder_ffn_dim);
  if (fsmt) {
    in.read("src_vocab_size", c.source_vocab), in.read("tgt_vocab_size", c.target_vocab);
  } else {
    in.read("vocab_size", c.source_vocab);
    c.target_vocab = c.source_vocab;
    in.read("decoder_vocab_size", c.target_vocab);
  }
  in.read("max_position_embeddings", c.max_positions);
  std::string activation = name_of(c.activation);
  in.read("activation_function", activation);
  c.activation = parse_activation(activation == "gelu_pytorch_tanh" ? "gelu_new" : activation);
  in.read("share_encoder_decoder_embeddings", c.share_embeddings);
  in.read("tie_word_embeddings", c.tie_output);
  in.read("scale_embedding", c.scale_embedding);
  in.read("dropout", c.dropout), in.read("attention_dropout", c.attention_dropout);
  in.read("activation_dropout", c.activation_dropout);
  in.read("encoder_layerdrop", c.encoder_layerdrop), in.read("decoder_layerdrop", c.decoder_layerdrop);
  in.read("pad_token_id", c.pad_id);
  in.read("decoder_start_token_id", c.start_id);
  std::vector<int64_t> eos = {c.eos_id};
  in.read("eos_token_id", eos);
  if (eos.empty()) fail("[config] {}: eos_token_id is an empty list", file);
  c.eos_id = eos.front();
  if (marian) {
    // transformers' MarianMTModel is post-LN with sinusoidal positions whatever other keys say, and unties everything
    // at once.
    if (!c.tie_output) c.share_embeddings = false;
    if (c.share_embeddings) c.target_vocab = c.source_vocab;
  } else if (fsmt) {
    // Post-LN with fairseq's sinusoids, which count from the pad id on; one table for all three uses, or three.
    c.share_embeddings = c.tie_output;
    c.positions = Positions::kFairseq, c.first_position = c.pad_id + 1;
  } else {
    in.read("normalize_before", c.pre_norm);
    in.read("first_position", c.first_position);
    std::string positions = name_of(c.positions);
    in.read("position_embedding_type", positions);
    c.positions = parse_positions(positions);
  }
  c.validate();
  return c;
}

TransformerConfig TransformerConfig::read(const std::string& directory) {
  const std::string path = (std::filesystem::path(directory) / "config.json").string();
  const std::string text = read_file(path);
  if (holds_fairseq_arguments(text, path)) return fairseq_config(text, path, ModelTensors(directory));
  return from_json(text, path);
}

std::vector<std::string> TransformerConfig::preset_names() {
  return {"transformer-tiny", "transformer-small", "transformer-base", "transformer-big"};
}

TransformerConfig TransformerConfig::preset(std::string_view name) {
  TransformerConfig c;
  const auto sizes = [&](int64_t encoder, int64_t decoder, int64_t width, int64_t ffn, int64_t heads) {
    c.encoder_layers = encoder, c.decoder_layers = decoder;
    c.d_model = width;
    c.encoder_ffn_dim = c.decoder_ffn_dim = ffn;
    c.encoder_heads = c.decoder_heads = heads;
  };
  if (name == "transformer-tiny") {
    sizes(2, 1, 128, 512, 4);
  } else if (name == "transformer-small") {
    sizes(3, 3, 256, 1024, 8);
  } else if (name == "transformer-base") {
    sizes(6, 6, 512, 2048, 8);
  } else if (name == "transformer-big") {
    sizes(6, 6, 1024, 4096, 16);
    c.dropout = 0.3;
  } else {
    fail(
        "[config] preset {} is not known, expected transformer-tiny, transformer-small, transformer-base or "
        "transformer-big",
        name);
  }
  return c;
}

GenerationConfig GenerationConfig::for_model(const TransformerConfig& config) {
  GenerationConfig g;
  g.num_beams = 4;
  g.max_length = config.max_positions;
  g.pad_id = config.pad_id, g.start_id = config.start_id;
  g.eos_ids = {config.eos_id};
  g.forced_eos_id = config.eos_id;
  g.bad_words = {{config.pad_id}};
  return g;
}

std::string GenerationConfig::to_json() const {
  ordered_json j;
  if (!bad_words.empty()) j["bad_words_ids"] = bad_words;
  j["decoder_start_token_id"] = start_id;
  if (early_stopping == "never") {
    j["early_stopping"] = "never";
  } else {
    j["early_stopping"] = early_stopping == "true";
  }
  if (eos_ids.size() == 1) {
    j["eos_token_id"] = eos_ids.front();
  } else {
    j["eos_token_id"] = eos_ids;
  }
  if (forced_bos_id >= 0) j["forced_bos_token_id"] = forced_bos_id;
  if (forced_eos_id >= 0) j["forced_eos_token_id"] = forced_eos_id;
  j["length_penalty"] = length_penalty;
  if (max_length > 0) j["max_length"] = max_length;
  if (max_new_tokens > 0) j["max_new_tokens"] = max_new_tokens;
  if (min_length > 0) j["min_length"] = min_length;
  if (no_repeat_ngram_size > 0) j["no_repeat_ngram_size"] = no_repeat_ngram_size;
  j["num_beams"] = num_beams;
  j["pad_token_id"] = pad_id;
  if (repetition_penalty != 1) j["repetition_penalty"] = repetition_penalty;
  j["use_cache"] = true;
  return j.dump(2) + "\n";
}

GenerationConfig GenerationConfig::from_json(std::string_view text, std::string_view file) {
  const json object = parse_object(text, file);
  const Reader in{object, file};
  GenerationConfig g;
  g.max_length = g.max_new_tokens = 0;
  g.eos_ids.clear();
  in.read("num_beams", g.num_beams), in.read("max_length", g.max_length), in.read("min_length", g.min_length);
  in.read("max_new_tokens", g.max_new_tokens);
  if (g.max_length == 0 && g.max_new_tokens == 0) g.max_new_tokens = 20;  // transformers' default
  in.read("length_penalty", g.length_penalty), in.read("repetition_penalty", g.repetition_penalty);
  in.read("no_repeat_ngram_size", g.no_repeat_ngram_size);
  in.read("pad_token_id", g.pad_id), in.read("decoder_start_token_id", g.start_id);
  in.read("eos_token_id", g.eos_ids);
  std::vector<int64_t> forced;
  in.read("forced_eos_token_id", forced);
  if (forced.size() > 1)
    fail("[config] {}: forced_eos_token_id is a list of {}, one is supported", file, forced.size());
  if (!forced.empty()) g.forced_eos_id = forced.front();
  in.read("forced_bos_token_id", g.forced_bos_id);
  if (const json* stopping = in.find("early_stopping")) {
    if (stopping->is_boolean()) {
      g.early_stopping = stopping->get<bool>() ? "true" : "false";
    } else if (*stopping == "never") {
      g.early_stopping = "never";
    } else {
      in.wrong("early_stopping", *stopping, "true, false or \"never\"");
    }
  }
  if (const json* words = in.find("bad_words_ids")) {
    if (!words->is_array()) in.wrong("bad_words_ids", *words, "a list of lists of ids");
    for (const json& word : *words) {
      if (!word.is_array() || word.empty()) in.wrong("bad_words_ids", *words, "a list of lists of ids");
      g.bad_words.emplace_back();
      for (const json& id : word) {
        if (!id.is_number_integer()) in.wrong("bad_words_ids", *words, "a list of lists of ids");
        g.bad_words.back().push_back(id.get<int64_t>());
      }
    }
  }
  return g;
}

GenerationConfig GenerationConfig::read(const std::string& directory) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::string path = (std::filesystem::path(directory) / name).string();
    if (!std::filesystem::exists(path)) continue;
    const std::string text = read_file(path);
    return holds_fairseq_arguments(text, path) ? fairseq_generation(text, path) : from_json(text, path);
  }
  fail("[config] {} holds neither generation_config.json nor config.json", directory);
}

double flops_forward(const TransformerConfig& c, const BatchShape& s) {
  const double H = static_cast<double>(c.d_model), S = static_cast<double>(s.source_tokens),
               T = static_cast<double>(s.target_tokens);
  const double visible = (static_cast<double>(s.target_squares) + T) / 2;  // pairs a causal query sees
  // Scores and their product with the values: 2 multiply-adds a pair and column.
  const double encoder_layer = 2 * S * (4 * H * H + 2 * H * static_cast<double>(c.encoder_ffn_dim)) +
                               4 * H * static_cast<double>(s.source_squares);
  const double decoder_layer = 2 * T * (6 * H * H + 2 * H * static_cast<double>(c.decoder_ffn_dim)) +
                               2 * S * 2 * H * H + 4 * H * (visible + static_cast<double>(s.cross_products));
  return static_cast<double>(c.encoder_layers) * encoder_layer + static_cast<double>(c.decoder_layers) * decoder_layer +
         2 * T * H * static_cast<double>(c.target_vocab);
}

double flops_per_step(const TransformerConfig& config, const BatchShape& shape) {
  return 3 * flops_forward(config, shape);
}

}  // namespace frit
