#include "frit/models/transformer/fairseq.h"

#include <algorithm>

#include "frit/models/transformer/config_json.h"

namespace frit {
namespace {

using config_json::json;
using config_json::parse_object;
using config_json::Reader;

constexpr int64_t kPad = 1, kEos = 2;  // of every fairseq dictionary; <s> is 0, <unk> 3

Activation parse_fairseq_activation(const Reader& in) {
  std::string name = "relu";
  in.read("activation_fn", name);
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_accurate" || name == "gelu_fast") return Activation::kGeluTanh;
  if (name == "swish" || name == "silu") return Activation::kSilu;
  fail("[config] {}: activation_fn is {}, expected relu, gelu, gelu_accurate (gelu_fast) or swish", in.file, name);
}

// Whether an option is in use: null, false, 0 and "" are off.
bool is_on(const json* value) {
  if (!value) return false;
  if (value->is_boolean()) return value->get<bool>();
  if (value->is_number()) return value->get<double>() != 0;
  return !value->empty() && *value != "";
}

// Everything but the vocabularies. Absent arguments have fairseq's defaults.
TransformerConfig read_arguments(const Reader& in) {
  std::string arch = "transformer";
  in.read("arch", arch);
  if (arch.find("transformer") == std::string::npos)
    fail("[config] {}: arch is {}, expected one of fairseq's Transformers", in.file, arch);
  for (const char* option :
       {"no_token_positional_embeddings", "adaptive_input", "adaptive_softmax_cutoff", "layernorm_embedding",
        "no_cross_attention", "cross_self_attention", "no_decoder_final_norm", "base_layers", "char_inputs"})
    if (is_on(in.find(option)))
      fail("[config] {}: {} is {}, which Frit's Transformer does not have", in.file, option, in.find(option)->dump());

  TransformerConfig c;
  in.read("encoder_embed_dim", c.d_model);
  for (const char* width : {"decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"}) {
    int64_t other = c.d_model;
    in.read(width, other);
    if (other != c.d_model)
      fail("[config] {}: {} is {} and encoder_embed_dim {}, expected one width", in.file, width, other, c.d_model);
  }
  in.read("encoder_layers", c.encoder_layers), in.read("decoder_layers", c.decoder_layers);
  in.read("encoder_attention_heads", c.encoder_heads), in.read("decoder_attention_heads", c.decoder_heads);
  in.read("encoder_ffn_embed_dim", c.encoder_ffn_dim);
  c.decoder_ffn_dim = c.encoder_ffn_dim;
  in.read("decoder_ffn_embed_dim", c.decoder_ffn_dim);
  // A sentence must fit both sides' positions: Frit has one limit.
  int64_t source_positions = 1024, target_positions = 1024;
  in.read("max_source_positions", source_positions), in.read("max_target_positions", target_positions);
  c.max_positions = std::min(source_positions, target_positions);
  c.activation = parse_fairseq_activation(in);
  const auto both = [&](const char* encoder, const char* decoder) {
    bool values[2] = {false, false};
    in.read(encoder, values[0]), in.read(decoder, values[1]);
    if (values[0] != values[1])
      fail("[config] {}: {} is {} and {} {}, expected the same", in.file, encoder, values[0], decoder, values[1]);
    return values[0];
  };
  c.pre_norm = both("encoder_normalize_before", "decoder_normalize_before");
  if (both("encoder_learned_pos", "decoder_learned_pos")) {
    c.positions = Positions::kLearned;
  } else {
    c.positions = Positions::kFairseq, c.first_position = kPad + 1;
  }
  c.share_embeddings = c.tie_output = false;
  in.read("share_all_embeddings", c.share_embeddings);
  in.read("share_decoder_input_output_embed", c.tie_output);
  c.tie_output |= c.share_embeddings;
  bool unscaled = false;
  in.read("no_scale_embedding", unscaled);
  c.scale_embedding = !unscaled;
  in.read("dropout", c.dropout), in.read("attention_dropout", c.attention_dropout);
  in.read("relu_dropout", c.activation_dropout), in.read("activation_dropout", c.activation_dropout);  // old, new
  in.read("encoder_layerdrop", c.encoder_layerdrop), in.read("decoder_layerdrop", c.decoder_layerdrop);
  c.pad_id = kPad, c.eos_id = c.start_id = kEos;
  return c;
}

// "model.encoder..." and "encoder..." alike as the latter.
std::string_view bare(std::string_view name) {
  if (name.starts_with("model.")) name.remove_prefix(6);
  return name;
}

bool is_fairseq_name(std::string_view name) {
  return name.starts_with("encoder.") || name.starts_with("decoder.") ||
         name == "model.decoder.output_projection.weight";
}

// Rows begin to end of a matrix or vector, as a tensor of its own.
SafetensorsFile::Entry rows_of(const SafetensorsFile::Entry& entry, int64_t begin, int64_t end) {
  SafetensorsFile::Entry part = entry;
  const int64_t row = entry.bytes / entry.shape[0];
  part.shape = entry.shape.rank() == 1 ? Shape{end - begin} : Shape{end - begin, entry.shape[1]};
  part.data = static_cast<const char*>(entry.data) + begin * row;
  part.bytes = (end - begin) * row;
  return part;
}

}  // namespace

bool holds_fairseq_arguments(std::string_view text, std::string_view file) {
  const json object = parse_object(text, file);
  return !object.contains("model_type") && (object.contains("arch") || object.contains("encoder_embed_dim"));
}

TransformerConfig fairseq_config(std::string_view text, std::string_view file, const ModelTensors& tensors) {
  const json object = parse_object(text, file);
  TransformerConfig c = read_arguments({object, file});
  const auto rows = [&](const char* side) {
    const std::string name = std::string(side) + ".embed_tokens.weight";
    const SafetensorsFile::Entry* entry = tensors.find(name);
    if (!entry) entry = tensors.find("model." + name);
    if (entry && entry->shape.rank() != 2)
      fail("[config] {}: {} is {}, expected a matrix", file, entry->name, entry->shape.to_string());
    return entry ? entry->shape[0] : int64_t{0};
  };
  c.source_vocab = rows("encoder"), c.target_vocab = rows("decoder");
  if (c.share_embeddings) {  // either may be left out
    if (c.source_vocab == 0) c.source_vocab = c.target_vocab;
    if (c.target_vocab == 0) c.target_vocab = c.source_vocab;
  }
  if (c.source_vocab == 0 || c.target_vocab == 0)
    fail("[config] {} holds fairseq's arguments, but the tensors beside it no {}.embed_tokens.weight", file,
         c.source_vocab == 0 ? "encoder" : "decoder");
  c.validate();
  return c;
}

GenerationConfig fairseq_generation(std::string_view text, std::string_view file) {
  const json object = parse_object(text, file);
  const TransformerConfig c = read_arguments({object, file});
  GenerationConfig g = GenerationConfig::for_model(c);
  g.num_beams = 5;
  g.early_stopping = "true";
  g.max_length = std::min<int64_t>(1 + 200 + 1, c.max_positions + 1);  // the start token and EOS counted
  return g;
}

CheckpointTensors::CheckpointTensors(const std::string& directory, const TransformerConfig& config)
    : directory_(directory), tensors_(directory) {
  const std::vector<std::string> names = tensors_.names();
  const bool fairseq = std::any_of(names.begin(), names.end(), is_fairseq_name);
  for (const std::string& name : names) {
    const SafetensorsFile::Entry& entry = *tensors_.find(name);
    if (fairseq) {
      bare_names_ |= !name.starts_with("model.");
      add_fairseq(bare(name), entry, config);
    } else {
      add(name, entry);
    }
  }
}

const SafetensorsFile::Entry* CheckpointTensors::find(std::string_view name) const {
  const auto it = entries_.find(name);
  return it == entries_.end() ? nullptr : &it->second;
}

std::string CheckpointTensors::file_name(const std::string& name) const {
  if (!bare_names_) return name;
  return name == "lm_head.weight" ? "decoder.output_projection.weight" : std::string(bare(name));
}

void CheckpointTensors::add(const std::string& name, const SafetensorsFile::Entry& entry) {
  const auto [it, added] = entries_.emplace(name, entry);
  if (!added) fail("[transformer] {}: {} and {} are the same tensor", directory_, it->second.name, entry.name);
}

void CheckpointTensors::add_fairseq(std::string_view name, const SafetensorsFile::Entry& entry,
                                    const TransformerConfig& config) {
  const auto ends = [&](std::string_view with) { return name.ends_with(with); };
  const auto stem = [&](std::string_view without) {
    return "model." + std::string(name.substr(0, name.size() - without.size()));
  };
  // Marks of the program's version and of the place of sinusoids, which are computed.
  if (name == "encoder.version" || name == "decoder.version" || ends(".embed_positions._float_tensor")) return;
  if (name == "decoder.output_projection.weight" || name == "decoder.embed_out") return add("lm_head.weight", entry);

  for (const char* kind : {"weight", "bias"}) {
    const std::string joined = std::string("in_proj_") + kind;
    const int64_t rows = entry.shape.rank() > 0 ? entry.shape[0] : 0;
    if (ends("." + joined) && rows > 0 && rows % 3 == 0) {
      int64_t part = 0;
      for (const char* projection : {"q_proj.", "k_proj.", "v_proj."}) {
        add(stem(joined) + projection + kind, rows_of(entry, part * rows / 3, (part + 1) * rows / 3));
        ++part;
      }
      return;
    }
    // Names from before 2018's end.
    const bool decoder = name.starts_with("decoder.");
    const std::pair<const char*, const char*> norms[] = {
        {"0", "self_attn_layer_norm"},
        {"1", decoder ? "encoder_attn_layer_norm" : "final_layer_norm"},
        {"2", "final_layer_norm"},
    };
    for (const auto& [number, norm] : norms) {
      const std::string old = std::string("layer_norms.") + number + "." + kind;
      if (ends("." + old) && (decoder || *number != '2')) return add(stem(old) + norm + "." + kind, entry);
    }
  }
  if (ends(".embed_positions.weight") && config.positions == Positions::kLearned && entry.shape.rank() == 2 &&
      entry.shape[0] >= config.pad_id + 1 + config.max_positions)
    return add("model." + std::string(name),
               rows_of(entry, config.pad_id + 1, config.pad_id + 1 + config.max_positions));
  add("model." + std::string(name), entry);
}

}  // namespace frit
