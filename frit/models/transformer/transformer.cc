#include "frit/models/transformer/transformer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "frit/core/file.h"
#include "frit/models/format/safetensors.h"
#include "frit/models/transformer/fairseq.h"
#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/cross_keys_values/cross_keys_values.h"
#include "frit/ops/gemm/gemm.h"
#include "frit/ops/loss_total/loss_total.h"

namespace frit {
namespace {

std::string layer_name(const char* side, int64_t layer, const char* rest) {
  return fmt::format("model.{}.layers.{}.{}", side, layer, rest);
}

// Names of the tables that the model reads; tied uses have one name.
std::string source_table_name(const TransformerConfig& c) {
  return c.share_embeddings ? "model.shared.weight" : "model.encoder.embed_tokens.weight";
}
std::string target_table_name(const TransformerConfig& c) {
  return c.share_embeddings ? "model.shared.weight" : "model.decoder.embed_tokens.weight";
}
std::string output_table_name(const TransformerConfig& c) {
  return c.tie_output ? target_table_name(c) : "lm_head.weight";
}

using Members = std::vector<std::pair<std::string, Shape>>;

// Weights of parts (q_proj, ...) that one product computes, as a group called `group`.weight, and their biases.
void add_joined(ParameterLayout& layout, const std::string& group, const std::vector<std::string>& parts, int64_t H) {
  Members weights, biases;
  for (const std::string& part : parts) {
    weights.emplace_back(part + ".weight", Shape{H, H});
    biases.emplace_back(part + ".bias", Shape{H});
  }
  layout.add_group(group + ".weight", weights);
  layout.add_group(group + ".bias", biases);
}

void add_linear(ParameterLayout& layout, const std::string& name, int64_t out, int64_t in) {
  layout.add(name + ".weight", {out, in});
  layout.add(name + ".bias", {out});
}

void add_norm(ParameterLayout& layout, const std::string& name, int64_t H) {
  layout.add(name + ".weight", {H});
  layout.add(name + ".bias", {H});
}

// What feed-forward and self-attention of either side have.
void add_common(ParameterLayout& layout, const char* side, int64_t l, int64_t H, int64_t F) {
  std::vector<std::string> parts;
  for (const char* part : {"q_proj", "k_proj", "v_proj"}) parts.push_back(layer_name(side, l, "self_attn.") + part);
  add_joined(layout, layer_name(side, l, "self_attn.qkv"), parts, H);
  add_linear(layout, layer_name(side, l, "self_attn.out_proj"), H, H);
  add_norm(layout, layer_name(side, l, "self_attn_layer_norm"), H);
  add_linear(layout, layer_name(side, l, "fc1"), F, H);
  add_linear(layout, layer_name(side, l, "fc2"), H, F);
  add_norm(layout, layer_name(side, l, "final_layer_norm"), H);
}

// Views of the parameters, or of the gradients, by name.
struct Views {
  const Workspace& workspace;
  bool gradients;
  Tensor tensor(const std::string& name) const {
    return gradients ? workspace.gradient(name) : workspace.parameter(name);
  }
  Tensor group(const std::string& name) const {
    return gradients ? workspace.group_gradient(name) : workspace.group_parameter(name);
  }
  Linear linear(const std::string& name) const { return {tensor(name + ".weight"), tensor(name + ".bias")}; }
  Linear joined(const std::string& name) const { return {group(name + ".weight"), group(name + ".bias")}; }
  LayerNorm norm(const std::string& name) const { return {tensor(name + ".weight"), tensor(name + ".bias")}; }
};

// What lies above layer l of a stack: the next one's norm, or the one behind the stack.
template <typename Layer, typename Saved>
NormAbove norm_above(const std::vector<Layer>& layers, std::vector<Saved>& saved, size_t l, const LayerNorm& behind,
                     const Place& place, NormSaved& top) {
  if (l + 1 == layers.size()) return {&behind, &place, &top};
  return {&layers[l + 1].attention.norm, &layers[l + 1].attention.place, &saved[l + 1].attention.norm};
}
// What lies below layer l's first norm, or, with l their number, below the norm behind the stack.
template <typename Layer>
EndBelow end_below(const std::vector<Layer>& layers, const std::vector<Layer>& gradients, size_t l) {
  if (l == 0) return {};
  return {&layers[l - 1].feed_forward.place, gradients[l - 1].feed_forward.out.bias};
}

// Uniform in (0, 1): 24 bits and a half.
double uniform(uint32_t bits) {
  return (static_cast<double>(bits >> 8) + 0.5) * 0x1p-24;
}

bool is_embedding(const std::string& name) {
  return name.find("embed_") != std::string::npos || name == "model.shared.weight" || name == "lm_head.weight";
}

}  // namespace

BatchView BatchView::planned(int64_t sentences, int64_t source_tokens, int64_t target_tokens) {
  const auto shape = [](int64_t n) { return Tensor(nullptr, DType::kI32, {n}); };
  return {shape(source_tokens),
          shape(sentences + 1),
          shape(target_tokens),
          shape(target_tokens),
          shape(sentences + 1),
          0,
          0};
}

// What forward leaves for backward.
struct Transformer::Tape {
  std::vector<EncoderLayerSaved> encoder;
  NormSaved memory;  // the norm behind the encoder; its output is the decoder's memory
  Buffer keys_values;
  std::vector<DecoderLayerSaved> decoder;
  NormSaved top;              // the norm behind the decoder
  bool layers_again = false;  // of each layer the input alone is kept

  // After a layer's forward.
  template <typename Saved>
  void keep(Saved& saved) const {
    if (!layers_again) return;
    Buffer input = std::move(saved.attention.norm.x);
    saved = {};
    saved.attention.norm.x = std::move(input);
  }

  void clear() {
    for (EncoderLayerSaved& saved : encoder) saved = {};
    for (DecoderLayerSaved& saved : decoder) saved = {};
    memory = {}, keys_values = {}, top = {};
  }
};

ParameterLayout Transformer::layout(const TransformerConfig& c) {
  c.validate();
  ParameterLayout layout;
  const int64_t H = c.d_model;
  if (c.share_embeddings) {
    layout.add("model.shared.weight", {c.source_vocab, H});
  } else {
    layout.add("model.encoder.embed_tokens.weight", {c.source_vocab, H});
    layout.add("model.decoder.embed_tokens.weight", {c.target_vocab, H});
  }
  if (!c.tie_output) layout.add("lm_head.weight", {c.target_vocab, H});
  if (c.positions == Positions::kLearned) {
    layout.add("model.encoder.embed_positions.weight", {c.max_positions, H});
    layout.add("model.decoder.embed_positions.weight", {c.max_positions, H});
  }
  for (int64_t l = 0; l < c.encoder_layers; ++l) add_common(layout, "encoder", l, H, c.encoder_ffn_dim);
  if (c.pre_norm) add_norm(layout, "model.encoder.layer_norm", H);
  std::vector<std::string> cross;
  for (int64_t l = 0; l < c.decoder_layers; ++l)
    for (const char* part : {"encoder_attn.k_proj", "encoder_attn.v_proj"})
      cross.push_back(layer_name("decoder", l, part));
  add_joined(layout, "model.decoder.cross_keys_values", cross, H);
  for (int64_t l = 0; l < c.decoder_layers; ++l) {
    add_common(layout, "decoder", l, H, c.decoder_ffn_dim);
    add_linear(layout, layer_name("decoder", l, "encoder_attn.q_proj"), H, H);
    add_linear(layout, layer_name("decoder", l, "encoder_attn.out_proj"), H, H);
    add_norm(layout, layer_name("decoder", l, "encoder_attn_layer_norm"), H);
  }
  if (c.pre_norm) add_norm(layout, "model.decoder.layer_norm", H);
  layout.finish();
  return layout;
}

Transformer::Transformer(const TransformerConfig& config, const Options& options) : config_(config), tape_(new Tape) {
  config_.validate();
  if (options.training && (config_.encoder_layerdrop > 0 || config_.decoder_layerdrop > 0))
    fail(
        "[transformer] the configuration asks for layerdrop (encoder {}, decoder {}), which Frit does not train with: "
        "set both to 0",
        config_.encoder_layerdrop, config_.decoder_layerdrop);
  workspace_ = std::make_unique<Workspace>(layout(config_), options.precision, options.training, options.moments,
                                           options.gradient_dtype, !options.planning, options.device);
  make_positions();
  weights_ = bind(false);
  if (options.training) gradients_ = bind(true);
  tape_->encoder.resize(static_cast<size_t>(config_.encoder_layers));
  tape_->decoder.resize(static_cast<size_t>(config_.decoder_layers));
}

Transformer::~Transformer() {
  if (DeviceMemory* device = workspace_->device())
    for (const Block* block : {&positions_, &logits_bias_block_})
      if (*block) device->died(block->get());
}

Block Transformer::place(const void* bytes, size_t count, DType dtype) const {
  DeviceMemory* device = workspace_->device();
  Block block = allocate_block(count, device);
  if (device) {
    device->born(block.get(), count, dtype);
    device->upload(block.get(), bytes, count);
  } else {
    std::memcpy(block.get(), bytes, count);
  }
  return block;
}

void Transformer::make_positions() {
  if (config_.positions == Positions::kLearned) return;
  // All sines, then all cosines.
  const int64_t P = config_.max_positions, H = config_.d_model;
  const bool fairseq = config_.positions == Positions::kFairseq;
  const int64_t half = fairseq ? H / 2 : (H + 1) / 2;
  const DType dtype = compute_dtype(workspace_->precision());
  std::vector<uint8_t> table(static_cast<size_t>(P * H * size_of(dtype)));
  for (int64_t column = 0; column < H; ++column) {
    const int64_t i = column < half ? column : column - half;
    // Marian's angles are in double. fairseq's are rounded to fp32, as those that its models were trained with; an odd
    // width leaves its last column 0.
    const double divisor = std::pow(10000.0, 2.0 * static_cast<double>(i) / static_cast<double>(H));
    const auto step = static_cast<float>(-std::log(10000.0) / static_cast<double>(half - 1));
    const auto frequency = static_cast<float>(std::exp(static_cast<double>(static_cast<float>(i) * step)));
    for (int64_t p = 0; p < P; ++p) {
      const int64_t place = p + config_.first_position;
      const double angle =
          fairseq ? static_cast<double>(static_cast<float>(place) * frequency) : static_cast<double>(place) / divisor;
      float value = static_cast<float>(column < half ? std::sin(angle) : std::cos(angle));
      if (fairseq && column >= 2 * half) value = 0;
      uint8_t* to = table.data() + (p * H + column) * size_of(dtype);
      if (dtype == DType::kF32) {
        std::memcpy(to, &value, sizeof(value));
      } else {
        const uint16_t rounded = dtype == DType::kBF16 ? bfloat16(value).bits : float16(value).bits;
        std::memcpy(to, &rounded, sizeof(rounded));
      }
    }
  }
  positions_ = place(table.data(), table.size(), dtype);
}

TransformerWeights Transformer::bind(bool gradients) const {
  const Views views{*workspace_, gradients};
  const TransformerConfig& c = config_;
  TransformerWeights w;
  w.source.table = views.tensor(source_table_name(c));
  w.target.table = views.tensor(target_table_name(c));
  w.output.weight = views.tensor(output_table_name(c));
  if (c.positions == Positions::kLearned) {
    w.source.positions = views.tensor("model.encoder.embed_positions.weight");
    w.target.positions = views.tensor("model.decoder.embed_positions.weight");
  } else if (!gradients) {
    w.source.positions = w.target.positions = Tensor(positions_.get(), compute_dtype(workspace_->precision()),
                                                     {c.max_positions, c.d_model}, workspace_->parameters().device());
  }
  w.source.place = Place("encoder.embedding"), w.target.place = Place("decoder.embedding");
  w.output.place = Place("output");

  // Post-LN: the norm that a layer's names count to one sublayer stands in front of the next one; the last goes behind
  // the stack.
  LayerNorm carried;
  const auto norm_of = [&](const std::string& name) {
    LayerNorm own = views.norm(name);
    if (!c.pre_norm) std::swap(own, carried);
    return own;
  };
  for (int64_t l = 0; l < c.encoder_layers; ++l) {
    EncoderLayer layer;
    layer.attention.norm = norm_of(layer_name("encoder", l, "self_attn_layer_norm"));
    layer.attention.qkv = views.joined(layer_name("encoder", l, "self_attn.qkv"));
    layer.attention.out = views.linear(layer_name("encoder", l, "self_attn.out_proj"));
    layer.attention.place = Place(fmt::format("encoder.{}.self_attention", l));
    layer.feed_forward.norm = norm_of(layer_name("encoder", l, "final_layer_norm"));
    layer.feed_forward.in = views.linear(layer_name("encoder", l, "fc1"));
    layer.feed_forward.out = views.linear(layer_name("encoder", l, "fc2"));
    layer.feed_forward.place = Place(fmt::format("encoder.{}.feed_forward", l));
    w.encoder.push_back(std::move(layer));
  }
  w.encoder_norm = c.pre_norm ? views.norm("model.encoder.layer_norm") : carried;
  carried = {};
  w.cross = views.joined("model.decoder.cross_keys_values");
  for (int64_t l = 0; l < c.decoder_layers; ++l) {
    DecoderLayer layer;
    layer.attention.norm = norm_of(layer_name("decoder", l, "self_attn_layer_norm"));
    layer.attention.qkv = views.joined(layer_name("decoder", l, "self_attn.qkv"));
    layer.attention.out = views.linear(layer_name("decoder", l, "self_attn.out_proj"));
    layer.attention.place = Place(fmt::format("decoder.{}.self_attention", l));
    layer.cross.norm = norm_of(layer_name("decoder", l, "encoder_attn_layer_norm"));
    layer.cross.q = views.linear(layer_name("decoder", l, "encoder_attn.q_proj"));
    layer.cross.out = views.linear(layer_name("decoder", l, "encoder_attn.out_proj"));
    layer.cross.place = Place(fmt::format("decoder.{}.cross_attention", l));
    layer.feed_forward.norm = norm_of(layer_name("decoder", l, "final_layer_norm"));
    layer.feed_forward.in = views.linear(layer_name("decoder", l, "fc1"));
    layer.feed_forward.out = views.linear(layer_name("decoder", l, "fc2"));
    layer.feed_forward.place = Place(fmt::format("decoder.{}.feed_forward", l));
    w.decoder.push_back(std::move(layer));
  }
  w.decoder_norm = c.pre_norm ? views.norm("model.decoder.layer_norm") : carried;
  return w;
}

void Transformer::initialise(uint32_t seed, const InitOptions& options, ThreadPool* pool) {
  const double H = static_cast<double>(config_.d_model);
  std::vector<float> values;
  for (const ParameterLayout::Slice& slice : workspace_->layout().slices()) {
    values.assign(static_cast<size_t>(slice.shape.numel()), 0.0f);
    if (slice.shape.rank() == 1) {
      const bool gamma = slice.name.ends_with("norm.weight");
      std::fill(values.begin(), values.end(), gamma ? 1.0f : 0.0f);
      workspace_->set(slice.name, values.data(), slice.shape.numel());
      continue;
    }
    const bool embedding = is_embedding(slice.name);
    const bool normal = embedding || options.kind == InitOptions::Kind::kNormal;
    const double deviation = embedding ? 1 / std::sqrt(H) : options.normal_std;
    const double bound = std::sqrt(6.0 / static_cast<double>(slice.shape[0] + slice.shape[1]));
    const PhiloxKey key{seed, 0x696e6974u};  // "init": apart from every training step's key
    const uint32_t site = dropout_site(slice.name);
    const auto draw = [&](int64_t begin, int64_t end) {  // two values of a Philox block: a Box-Muller pair
      for (auto block = static_cast<uint64_t>(begin); block < static_cast<uint64_t>(end); ++block) {
        const PhiloxBlock random =
            philox(key, static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, site);
        const double u = uniform(random.v[0]), v = uniform(random.v[1]);
        double pair[2] = {bound * (2 * u - 1), bound * (2 * v - 1)};
        if (normal) {
          const double radius = deviation * std::sqrt(-2 * std::log(u)), angle = 2 * 3.14159265358979323846 * v;
          pair[0] = radius * std::cos(angle), pair[1] = radius * std::sin(angle);
        }
        for (size_t i = 0; i < 2 && block * 2 + i < values.size(); ++i)
          values[block * 2 + i] = static_cast<float>(pair[i]);
      }
    };
    const auto blocks = static_cast<int64_t>((values.size() + 1) / 2);
    if (pool)
      pool->parallel_for(blocks, 4096, [&](int64_t begin, int64_t end, int) { draw(begin, end); });
    else
      draw(0, blocks);
    const bool tokens =
        embedding && slice.name.find("embed_positions") == std::string::npos && slice.name != "lm_head.weight";
    if (tokens && config_.pad_id < slice.shape[0])
      std::fill_n(values.begin() + config_.pad_id * config_.d_model, config_.d_model, 0.0f);
    workspace_->set(slice.name, values.data(), slice.shape.numel());
  }
}

float Transformer::embedding_scale() const {
  return config_.scale_embedding ? static_cast<float>(std::sqrt(static_cast<double>(config_.d_model))) : 1.0f;
}

LayerOptions Transformer::layer_options(int64_t heads, bool training, bool recompute) const {
  LayerOptions o;
  o.heads = heads;
  o.activation = config_.activation;
  o.pre_norm = config_.pre_norm;
  o.training = training, o.recompute = training && recompute;
  if (training) {
    o.p_hidden = static_cast<float>(config_.dropout);
    o.p_attention = static_cast<float>(config_.attention_dropout);
    o.p_activation = static_cast<float>(config_.activation_dropout);
  }
  return o;
}

void Transformer::check(const BatchView& b) const {
  FRIT_CHECK(b.source_offsets.numel() == b.target_offsets.numel() && b.source_offsets.numel() >= 1,
             "[transformer] a batch with {} source and {} target offsets, expected the same number, 1 or more",
             b.source_offsets.numel(), b.target_offsets.numel());
  FRIT_CHECK(b.target_ids.numel() == b.labels.numel(), "[transformer] a batch with {} target ids and {} labels",
             b.target_ids.numel(), b.labels.numel());
}

Buffer Transformer::encode(Context& context, const Tensor& source_ids, const Sequences& source) {
  const LayerOptions options = encoder_options();
  const std::vector<EncoderLayer>& layers = weights_.encoder;
  std::vector<EncoderLayerSaved> saved(layers.size());
  NormSaved top;
  norm_forward(context, options, layers[0].attention.norm, layers[0].attention.place,
               embed_forward(context, options, weights_.source, embedding_scale(), source_ids, source.offsets),
               saved[0].attention.norm);
  for (size_t l = 0; l < layers.size(); ++l)
    encoder_layer_forward(context, options, layers[l], source, saved[l],
                          norm_above(layers, saved, l, weights_.encoder_norm, encoder_place_, top));
  return top.y.defined() ? std::move(top.y) : std::move(top.x);
}

Buffer Transformer::cross_keys_values(Context& context, const Tensor& memory) {
  Buffer y = allocate(context, decoder_place_, {memory.dim(0), weights_.cross.weight.dim(0)}, memory.dtype(),
                      "cross_keys_values");
  cross_keys_values_forward(context, memory, weights_.cross.weight, weights_.cross.bias, y);
  return y;
}

CrossKeysValues Transformer::cross_of_layer(const Tensor& keys_values, int64_t layer, const Sequences& queries,
                                            const Sequences& keys) const {
  const int64_t H = config_.d_model, begin = layer * 2 * H;
  return {keys_values.columns(begin, begin + H), keys_values.columns(begin + H, begin + 2 * H), queries, keys};
}

Buffer Transformer::forward(Context& context, const BatchView& b, const LayerOptions& encoder,
                            const LayerOptions& decoder, Tape& tape) {
  const TransformerWeights& w = weights_;
  norm_forward(context, encoder, w.encoder[0].attention.norm, w.encoder[0].attention.place,
               embed_forward(context, encoder, w.source, embedding_scale(), b.source_ids, b.source_offsets),
               tape.encoder[0].attention.norm);
  for (size_t l = 0; l < w.encoder.size(); ++l) {
    encoder_layer_forward(context, encoder, w.encoder[l], b.source(), tape.encoder[l],
                          norm_above(w.encoder, tape.encoder, l, w.encoder_norm, encoder_place_, tape.memory));
    if (encoder.training) tape.keep(tape.encoder[l]);
  }
  const Tensor memory = tape.memory.output();
  tape.keys_values = cross_keys_values(context, memory);
  if (encoder.training) {
    norm_drop_output(encoder, tape.memory);
  } else {
    tape.memory = {};
  }
  norm_forward(context, decoder, w.decoder[0].attention.norm, w.decoder[0].attention.place,
               embed_forward(context, decoder, w.target, embedding_scale(), b.target_ids, b.target_offsets),
               tape.decoder[0].attention.norm);
  for (size_t l = 0; l < w.decoder.size(); ++l) {
    const CrossKeysValues kv = cross_of_layer(tape.keys_values, static_cast<int64_t>(l), b.target(), b.source());
    decoder_layer_forward(context, decoder, w.decoder[l], kv, tape.decoder[l],
                          norm_above(w.decoder, tape.decoder, l, w.decoder_norm, decoder_place_, tape.top));
    if (decoder.training) tape.keep(tape.decoder[l]);
  }
  if (!decoder.training) tape.keys_values.release();
  // The norm's backward does not read its output: the caller may write over it.
  return tape.top.y.defined() ? std::move(tape.top.y) : std::move(tape.top.x);
}

void Transformer::criterion(Context& context, const BatchView& b, const CriterionOptions& options, const Tensor& x,
                            const Tensor& scale, const Tensor& totals, bool accumulate) {
  const int64_t tokens = b.target_tokens();
  Buffer loss = context.allocate({tokens}, DType::kF32, "loss"), nll = context.allocate({tokens}, DType::kF32, "nll");
  output_criterion(context, weights_.output, options, x, b.labels, scale, loss, nll, accumulate,
                   gradients_.output.weight);
  loss_total(context, loss, nll, b.labels, accumulate, totals);
}

void Transformer::backward(Context& context, const BatchView& b, const LayerOptions& encoder,
                           const LayerOptions& decoder, Buffer dx, bool accumulate, Tape& tape) {
  const TransformerWeights &w = weights_, &dw = gradients_;
  const bool shared = config_.share_embeddings, tied = config_.tie_output;
  LaterSums later(context);
  OutputGradient d = norm_backward(context, decoder, w.decoder_norm, std::move(dx), {}, tape.top, accumulate,
                                   dw.decoder_norm, end_below(w.decoder, dw.decoder, w.decoder.size()));
  // All layers' keys and values get their gradients before the one product back.
  Buffer dkv =
      allocate(context, decoder_place_, tape.keys_values->shape(), tape.keys_values->dtype(), "dcross_keys_values");
  for (size_t l = w.decoder.size(); l-- > 0;) {
    const CrossKeysValues kv = cross_of_layer(tape.keys_values, static_cast<int64_t>(l), b.target(), b.source());
    const CrossKeysValues dkv_here = cross_of_layer(dkv, static_cast<int64_t>(l), b.target(), b.source());
    DecoderLayerSaved& saved = tape.decoder[l];
    if (tape.layers_again) {
      norm_forward(context, decoder, w.decoder[l].attention.norm, w.decoder[l].attention.place,
                   std::move(saved.attention.norm.x), saved.attention.norm);
      decoder_layer_forward(context, decoder, w.decoder[l], kv, saved, {});
    }
    d = decoder_layer_backward(context, decoder, w.decoder[l], kv, std::move(d), saved, accumulate, dw.decoder[l],
                               dkv_here.k, dkv_here.v, end_below(w.decoder, dw.decoder, l));
  }
  tape.keys_values.release();
  // A tied table has its gradient from the output projection already; then the target's tokens, then the source's.
  embed_backward(context, decoder, w.target, embedding_scale(), b.target_ids, b.target_offsets, std::move(d.dy),
                 config_.pad_id, tied || accumulate, accumulate, dw.target);
  const Tensor memory = norm_output(context, encoder, w.encoder_norm, encoder_place_, tape.memory);
  dx = allocate(context, encoder_place_, memory.shape(), memory.dtype(), "dmemory");
  cross_keys_values_backward(context, dkv, memory, w.cross.weight, {}, accumulate, dx, dw.cross.weight, dw.cross.bias);
  dkv.release();
  d = norm_backward(context, encoder, w.encoder_norm, std::move(dx), {}, tape.memory, accumulate, dw.encoder_norm,
                    end_below(w.encoder, dw.encoder, w.encoder.size()));
  for (size_t l = w.encoder.size(); l-- > 0;) {
    EncoderLayerSaved& saved = tape.encoder[l];
    if (tape.layers_again) {
      norm_forward(context, encoder, w.encoder[l].attention.norm, w.encoder[l].attention.place,
                   std::move(saved.attention.norm.x), saved.attention.norm);
      encoder_layer_forward(context, encoder, w.encoder[l], b.source(), saved, {});
    }
    d = encoder_layer_backward(context, encoder, w.encoder[l], b.source(), std::move(d), saved, accumulate,
                               dw.encoder[l], end_below(w.encoder, dw.encoder, l));
  }
  embed_backward(context, encoder, w.source, embedding_scale(), b.source_ids, b.source_offsets, std::move(d.dy),
                 config_.pad_id, shared || accumulate, accumulate, dw.source);
  later.finish();
}

void Transformer::train_step(Context& context, const BatchView& batch, const Tensor& scale, const Tensor& totals,
                             const StepOptions& options) {
  FRIT_CHECK(workspace_->training(), "[transformer] train_step of a model that was built without gradients");
  FRIT_CHECK(scale.defined() && scale.dtype() == DType::kF32 && scale.numel() == 1,
             "[transformer] scale is {}, expected f32[1]", scale.to_string());
  check(batch);
  // If anything throws, the temporaries go back while their Memory is surely alive.
  struct Clear {
    Tape& tape;
    ~Clear() { tape.clear(); }
  } clear{*tape_};
  const bool activations = options.recompute == Recompute::kActivations;
  const LayerOptions encoder = layer_options(config_.encoder_heads, true, activations);
  const LayerOptions decoder = layer_options(config_.decoder_heads, true, activations);
  tape_->layers_again = options.recompute == Recompute::kLayer;
  Buffer x = forward(context, batch, encoder, decoder, *tape_);
  criterion(context, batch, options.criterion, x, scale, totals, options.accumulate);
  if (options.backward_begins && !context.planning()) options.backward_begins();
  backward(context, batch, encoder, decoder, std::move(x), options.accumulate, *tape_);
}

void Transformer::hold_pad_row(Context& context) const {
  fill_zero(context, gradients_.target.table.rows(config_.pad_id, config_.pad_id + 1));
}

void Transformer::evaluate(Context& context, const BatchView& batch, const Tensor& totals,
                           const CriterionOptions& options, bool accumulate) {
  check(batch);
  struct Clear {
    Tape& tape;
    ~Clear() { tape.clear(); }
  } clear{*tape_};
  const Buffer x = forward(context, batch, encoder_options(), decoder_options(), *tape_);
  criterion(context, batch, options, x, {}, totals, accumulate);
}

Buffer Transformer::logits(Context& context, const BatchView& batch) {
  check(batch);
  struct Clear {
    Tape& tape;
    ~Clear() { tape.clear(); }
  } clear{*tape_};
  const Buffer x = forward(context, batch, encoder_options(), decoder_options(), *tape_);
  const Output& w = weights_.output;
  Buffer y = allocate(context, w.place, {batch.target_tokens(), w.weight.dim(0)}, x->dtype(), "logits");
  linear(context, x, w.weight, w.bias, y);
  return y;
}

void Transformer::set_logits_bias(const std::vector<float>& values) {
  FRIT_CHECK(static_cast<int64_t>(values.size()) == config_.target_vocab,
             "[transformer] {} logit biases given, expected {}", values.size(), config_.target_vocab);
  const bool zero = std::all_of(values.begin(), values.end(), [](float v) { return v == 0; });
  if (logits_bias_block_ && workspace_->device()) workspace_->device()->died(logits_bias_block_.get());
  logits_bias_block_.reset();
  logits_bias_ = zero ? std::vector<float>() : values;
  if (!zero) logits_bias_block_ = place(values.data(), values.size() * sizeof(float), DType::kF32);
  weights_.output.bias =
      zero ? Tensor()
           : Tensor(logits_bias_block_.get(), DType::kF32, {config_.target_vocab}, workspace_->parameters().device());
}

std::unique_ptr<Transformer> Transformer::load(const std::string& directory, const Options& options) {
  auto model = std::make_unique<Transformer>(TransformerConfig::read(directory), options);
  model->load_weights(directory);
  return model;
}

void Transformer::load_weights(const std::string& directory) {
  const CheckpointTensors tensors(directory, config_);
  const ParameterLayout& layout = workspace_->layout();
  // Files may hold tied tensors under any of their names, and tensors that follow from the configuration.
  std::set<std::string> known = {"final_logits_bias"};
  if (config_.positions != Positions::kLearned)
    known.insert({"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"});
  std::vector<std::string> problems;
  std::vector<float> values;
  const std::set<std::string> tables = {source_table_name(config_), target_table_name(config_),
                                        output_table_name(config_)};
  const auto aliases = [&](const std::string& name) {
    std::vector<std::string> names = {name};
    if (!tables.count(name)) return names;
    if (name == source_table_name(config_)) names.push_back("model.encoder.embed_tokens.weight");
    if (name == target_table_name(config_)) names.push_back("model.decoder.embed_tokens.weight");
    if (name == output_table_name(config_)) names.push_back("lm_head.weight");
    names.push_back("model.shared.weight");  // last: where nothing is tied, transformers saves one that nobody reads
    return names;
  };
  for (const ParameterLayout::Slice& slice : layout.slices()) {
    const SafetensorsFile::Entry* entry = nullptr;
    for (const std::string& name : aliases(slice.name)) {
      known.insert(name);
      const SafetensorsFile::Entry* found = tensors.find(name);
      if (!found) continue;
      const bool unread = name == "model.shared.weight" && slice.name != name;
      if (!entry) {
        entry = found;
      } else if (!unread && (found->dtype != entry->dtype || found->bytes != entry->bytes ||
                             std::memcmp(found->data, entry->data, static_cast<size_t>(entry->bytes)) != 0)) {
        problems.push_back(
            fmt::format("{} and {} are tied by the configuration but differ in the file", entry->name, found->name));
      }
    }
    if (!entry) {
      problems.push_back(fmt::format("{} {} is missing", tensors.file_name(slice.name), slice.shape.to_string()));
    } else if (!(entry->shape == slice.shape)) {
      problems.push_back(fmt::format("{} is {} in the file, the configuration says {}", entry->name,
                                     entry->shape.to_string(), slice.shape.to_string()));
    } else if (entry->dtype == DType::kF32 && reinterpret_cast<uintptr_t>(entry->data) % alignof(float) == 0) {
      workspace_->set(slice.name, static_cast<const float*>(entry->data), slice.shape.numel());
    } else {
      values.resize(static_cast<size_t>(slice.shape.numel()));
      convert_to_f32(*entry, values.data());
      workspace_->set(slice.name, values.data(), slice.shape.numel());
    }
  }
  std::vector<float> bias(static_cast<size_t>(config_.target_vocab), 0.0f);
  if (const SafetensorsFile::Entry* entry = tensors.find("final_logits_bias")) {
    if (entry->shape == Shape{1, config_.target_vocab}) {
      convert_to_f32(*entry, bias.data());
    } else {
      problems.push_back(fmt::format("final_logits_bias is {} in the file, the configuration says [1, {}]",
                                     entry->shape.to_string(), config_.target_vocab));
    }
  }
  for (const auto& [name, entry] : tensors.entries())
    if (!known.count(name))
      problems.push_back(fmt::format("{} {} is not part of the model", entry.name, entry.shape.to_string()));
  if (!problems.empty()) {
    std::string list;
    constexpr size_t kShown = 20;
    for (size_t i = 0; i < problems.size() && i < kShown; ++i) list += "\n  " + problems[i];
    if (problems.size() > kShown) list += fmt::format("\n  and {} more", problems.size() - kShown);
    fail("[transformer] {} does not fit its configuration:{}", directory, list);
  }
  set_logits_bias(bias);
}

void Transformer::save_weights(const std::string& path, DType dtype) const {
  FRIT_CHECK(dtype == DType::kF32 || dtype == DType::kBF16,
             "[transformer] parameters saved as {}, expected f32 or bf16", name_of(dtype));
  std::vector<float> values;
  std::vector<bfloat16> rounded;
  // Sorted by name, as transformers writes them.
  std::vector<std::pair<std::string, Shape>> tensors = {{"final_logits_bias", {1, config_.target_vocab}}};
  for (const ParameterLayout::Slice& slice : workspace_->layout().slices())
    tensors.emplace_back(slice.name, slice.shape);
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  SafetensorsWriter writer(path);
  for (const auto& [name, shape] : tensors) writer.declare(name, dtype, shape);
  for (const auto& [name, shape] : tensors) {
    values.assign(static_cast<size_t>(shape.numel()), 0.0f);
    if (name != "final_logits_bias") {
      workspace_->get(name, values.data(), shape.numel());
    } else if (!logits_bias_.empty()) {
      values = logits_bias_;
    }
    if (dtype == DType::kF32) {
      writer.write(name, values.data(), shape.numel() * size_of(dtype));
    } else {
      rounded.resize(values.size());
      std::transform(values.begin(), values.end(), rounded.begin(), [](float v) { return bfloat16(v); });
      writer.write(name, rounded.data(), shape.numel() * size_of(dtype));
    }
  }
  writer.finish();
}

void Transformer::save(const std::string& directory, const GenerationConfig& generation, DType dtype) const {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) fail("[transformer] cannot create {}: {}", directory, error.message());
  const fs::path base(directory);
  save_weights((base / "model.safetensors").string(), dtype);
  write_file_atomically((base / "generation_config.json").string(), generation.to_json());
  write_file_atomically((base / "config.json").string(),
                        config_.to_json(dtype == DType::kF32 ? "float32" : "bfloat16"));
}

}  // namespace frit
