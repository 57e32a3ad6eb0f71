// Layers against PyTorch's, from tests/goldens/layers.safetensors (made by tools/goldens/make_layers.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "frit/layers/decoder_layer.h"
#include "frit/layers/encoder_layer.h"
#include "frit/ops/cross_keys_values/cross_keys_values.h"

namespace frit {
namespace {

// Reads the goldens by hand: the safetensors reader lives above the layers.
class Goldens {
 public:
  Goldens() {
    const char* root = std::getenv("FRIT_SOURCE_DIR");
    std::ifstream in(std::string(root ? root : ".") + "/tests/goldens/layers.safetensors", std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
    uint64_t length = 0;
    std::memcpy(&length, bytes_.data(), 8);
    header_ = nlohmann::json::parse(bytes_.begin() + 8, bytes_.begin() + 8 + static_cast<int64_t>(length));
    data_ = 8 + length;
  }
  // A tensor of one case, of four bytes an element, as a view of the file's bytes.
  Tensor at(const std::string& name) {
    const auto& entry = header_.at(name);
    const std::vector<int64_t> d = entry["shape"];
    const DType dtype = entry["dtype"] == "F32" ? DType::kF32 : DType::kI32;
    std::vector<float>& copy = copies_[name];  // aligned
    copy.resize((entry["data_offsets"][1].get<size_t>() - entry["data_offsets"][0].get<size_t>()) / 4);
    std::memcpy(copy.data(), bytes_.data() + data_ + entry["data_offsets"][0].get<size_t>(), copy.size() * 4);
    return Tensor(copy.data(), dtype, d.size() == 1 ? Shape{d[0]} : Shape{d[0], d[1]});
  }
  // Several matrices or vectors one below the other.
  Tensor joined(const std::vector<std::string>& names) {
    std::string all;
    std::vector<float> values;
    Shape shape;
    for (const std::string& name : names) {
      const Tensor part = at(name);
      values.insert(values.end(), part.data<float>(), part.data<float>() + part.numel());
      if (all.empty()) {
        shape = part.shape();
      } else {
        shape[0] += part.dim(0);
      }
      all += name;
    }
    copies_[all] = values;
    return Tensor(copies_[all].data(), DType::kF32, shape);
  }

 private:
  std::string bytes_;
  uint64_t data_ = 0;
  nlohmann::json header_;
  std::map<std::string, std::vector<float>> copies_;
};

void expect_near(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.numel(), expected.numel()) << what;
  double error = 0, size = 0;
  for (int64_t i = 0; i < got.numel(); ++i) {
    const double g = got.data<float>()[i], e = expected.data<float>()[i];
    error += (g - e) * (g - e), size += e * e;
  }
  EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(size) + 1e-6) << what;
}

// Owns the memory of tensors shaped like others.
struct Pool {
  std::vector<std::vector<float>> owned;
  Tensor like(const Tensor& t) {
    owned.emplace_back(static_cast<size_t>(t.numel()), std::nanf(""));  // whatever is not written shows
    return Tensor(owned.back().data(), DType::kF32, t.shape());
  }
  Linear like(const Linear& w) { return {like(w.weight), like(w.bias)}; }
  LayerNorm like(const LayerNorm& w) {
    return w.gamma.defined() ? LayerNorm{like(w.gamma), like(w.beta)} : LayerNorm{};
  }
};

Buffer copy_of(Context& context, const Tensor& t) {
  Buffer b = context.allocate(t.shape(), DType::kF32, "copy");
  std::memcpy(b->raw(), t.raw(), static_cast<size_t>(t.bytes()));
  return b;
}

class Layers : public ::testing::TestWithParam<std::tuple<bool, Activation, bool>> {
 protected:
  Layers() : pool_(1), context_(pool_, memory_) {
    options_.heads = 2;
    options_.training = true;
    options_.pre_norm = std::get<0>(GetParam());
    options_.activation = std::get<1>(GetParam());
    options_.recompute = std::get<2>(GetParam());
  }
  std::string case_name(const std::string& kind) const {
    const std::map<Activation, std::string> names = {{Activation::kRelu, "relu"},
                                                     {Activation::kGelu, "gelu"},
                                                     {Activation::kGeluTanh, "gelu_tanh"},
                                                     {Activation::kSilu, "silu"}};
    return kind + (options_.pre_norm ? "_pre_" : "_post_") + names.at(options_.activation);
  }
  // Names of three parameters of one joined product.
  static std::vector<std::string> qkv(const std::string& prefix, const char* kind) {
    return {prefix + "q_proj." + kind, prefix + "k_proj." + kind, prefix + "v_proj." + kind};
  }
  Linear linear(const std::string& name) { return {goldens_.at(name + ".weight"), goldens_.at(name + ".bias")}; }
  LayerNorm norm(const std::string& name) { return {goldens_.at(name + ".weight"), goldens_.at(name + ".bias")}; }
  void expect_linear(const Linear& d, const std::string& name) {
    expect_near(d.weight, goldens_.at(name + ".weight"), name + ".weight");
    expect_near(d.bias, goldens_.at(name + ".bias"), name + ".bias");
  }
  void expect_norm(const LayerNorm& d, const std::string& name) {
    expect_near(d.gamma, goldens_.at(name + ".weight"), name + ".weight");
    expect_near(d.beta, goldens_.at(name + ".bias"), name + ".bias");
  }

  ThreadPool pool_;
  Memory memory_;
  Context context_;
  Goldens goldens_;
  LayerOptions options_;
  Pool owned_;
};
INSTANTIATE_TEST_SUITE_P(All, Layers,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(Activation::kRelu, Activation::kGelu,
                                                              Activation::kGeluTanh, Activation::kSilu),
                                            ::testing::Bool()));

TEST_P(Layers, EncoderLayerIsPyTorchs) {
  const std::string w0 = "encoder_layer.", name = case_name("encoder_layer");
  const LayerNorm first = norm(w0 + "self_attn_layer_norm"), last = norm(w0 + "final_layer_norm");
  EncoderLayer w;
  LayerNorm behind;
  if (options_.pre_norm) {
    w.attention.norm = first, w.feed_forward.norm = last;
  } else {
    w.feed_forward.norm = first, behind = last;
  }
  w.attention.qkv = {goldens_.joined(qkv(w0 + "self_attn.", "weight")),
                     goldens_.joined(qkv(w0 + "self_attn.", "bias"))};
  w.attention.out = linear(w0 + "self_attn.out_proj");
  w.feed_forward.in = linear(w0 + "fc1"), w.feed_forward.out = linear(w0 + "fc2");
  EncoderLayer dw;
  dw.attention = {owned_.like(w.attention.norm), owned_.like(w.attention.qkv), owned_.like(w.attention.out), {}};
  dw.feed_forward = {
      owned_.like(w.feed_forward.norm), owned_.like(w.feed_forward.in), owned_.like(w.feed_forward.out), {}};
  const LayerNorm dbehind = owned_.like(behind);
  const Tensor offsets = goldens_.at(w0 + "offsets");

  EncoderLayerSaved saved;
  NormSaved top;
  const Place place("top");
  w.attention.place = Place("attention"), w.feed_forward.place = Place("feed_forward");
  norm_forward(context_, options_, w.attention.norm, w.attention.place, copy_of(context_, goldens_.at(w0 + "x")),
               saved.attention.norm);
  encoder_layer_forward(context_, options_, w, offsets, saved, {&behind, &place, &top});
  expect_near(top.output(), goldens_.at(name + ".y"), name);
  OutputGradient dy = norm_backward(context_, options_, behind, copy_of(context_, goldens_.at(w0 + "dy")), {}, top,
                                    false, dbehind, {&w.feed_forward.place, dw.feed_forward.out.bias});
  const Buffer dx = encoder_layer_backward(context_, options_, w, offsets, std::move(dy), saved, false, dw, {}).dy;
  const std::string d = name + ".d";
  expect_near(dx, goldens_.at(d + "x"), d + "x");
  expect_near(dw.attention.qkv.weight, goldens_.joined(qkv(d + "self_attn.", "weight")), "qkv weight");
  expect_near(dw.attention.qkv.bias, goldens_.joined(qkv(d + "self_attn.", "bias")), "qkv bias");
  expect_linear(dw.attention.out, d + "self_attn.out_proj");
  expect_linear(dw.feed_forward.in, d + "fc1");
  expect_linear(dw.feed_forward.out, d + "fc2");
  expect_norm(options_.pre_norm ? dw.attention.norm : dw.feed_forward.norm, d + "self_attn_layer_norm");
  expect_norm(options_.pre_norm ? dw.feed_forward.norm : dbehind, d + "final_layer_norm");
}

TEST_P(Layers, DecoderLayerIsPyTorchs) {
  const std::string w0 = "decoder_layer.", name = case_name("decoder_layer");
  const LayerNorm first = norm(w0 + "self_attn_layer_norm"), middle = norm(w0 + "encoder_attn_layer_norm"),
                  last = norm(w0 + "final_layer_norm");
  DecoderLayer w;
  LayerNorm behind;
  if (options_.pre_norm) {
    w.attention.norm = first, w.cross.norm = middle, w.feed_forward.norm = last;
  } else {
    w.cross.norm = first, w.feed_forward.norm = middle, behind = last;
  }
  w.attention.qkv = {goldens_.joined(qkv(w0 + "self_attn.", "weight")),
                     goldens_.joined(qkv(w0 + "self_attn.", "bias"))};
  w.attention.out = linear(w0 + "self_attn.out_proj");
  w.cross.q = linear(w0 + "encoder_attn.q_proj"), w.cross.out = linear(w0 + "encoder_attn.out_proj");
  w.feed_forward.in = linear(w0 + "fc1"), w.feed_forward.out = linear(w0 + "fc2");
  const auto kv_names = [](const std::string& prefix, const char* kind) {
    return std::vector<std::string>{prefix + "encoder_attn.k_proj." + kind, prefix + "encoder_attn.v_proj." + kind};
  };
  const Linear cross = {goldens_.joined(kv_names(w0, "weight")), goldens_.joined(kv_names(w0, "bias"))};
  DecoderLayer dw;
  dw.attention = {owned_.like(w.attention.norm), owned_.like(w.attention.qkv), owned_.like(w.attention.out), {}};
  dw.cross = {owned_.like(w.cross.norm), owned_.like(w.cross.q), owned_.like(w.cross.out), {}};
  dw.feed_forward = {
      owned_.like(w.feed_forward.norm), owned_.like(w.feed_forward.in), owned_.like(w.feed_forward.out), {}};
  const LayerNorm dbehind = owned_.like(behind);
  const Linear dcross = owned_.like(cross);
  const Tensor memory = goldens_.at(w0 + "memory");
  const int64_t H = memory.dim(1);

  Buffer kv = context_.allocate({memory.dim(0), 2 * H}, DType::kF32, "kv"),
         dkv = context_.allocate({memory.dim(0), 2 * H}, DType::kF32, "dkv");
  cross_keys_values_forward(context_, memory, cross.weight, cross.bias, kv);
  const CrossKeysValues keys = {kv->columns(0, H), kv->columns(H, 2 * H), goldens_.at(w0 + "offsets"),
                                goldens_.at(w0 + "offsets_memory")};
  DecoderLayerSaved saved;
  NormSaved top;
  const Place place("top");
  w.attention.place = Place("attention"), w.cross.place = Place("cross"), w.feed_forward.place = Place("feed_forward");
  norm_forward(context_, options_, w.attention.norm, w.attention.place, copy_of(context_, goldens_.at(w0 + "x")),
               saved.attention.norm);
  decoder_layer_forward(context_, options_, w, keys, saved, {&behind, &place, &top});
  expect_near(top.output(), goldens_.at(name + ".y"), name);
  OutputGradient dy = norm_backward(context_, options_, behind, copy_of(context_, goldens_.at(w0 + "dy")), {}, top,
                                    false, dbehind, {&w.feed_forward.place, dw.feed_forward.out.bias});
  const Buffer dx = decoder_layer_backward(context_, options_, w, keys, std::move(dy), saved, false, dw,
                                           dkv->columns(0, H), dkv->columns(H, 2 * H), {})
                        .dy;
  Buffer dmemory = context_.allocate(memory.shape(), DType::kF32, "dmemory");
  cross_keys_values_backward(context_, dkv, memory, cross.weight, {}, false, dmemory, dcross.weight, dcross.bias);
  const std::string d = name + ".d";
  expect_near(dx, goldens_.at(d + "x"), d + "x");
  expect_near(dmemory, goldens_.at(d + "memory"), d + "memory");
  expect_near(dcross.weight, goldens_.joined(kv_names(d, "weight")), "cross weight");
  expect_near(dcross.bias, goldens_.joined(kv_names(d, "bias")), "cross bias");
  expect_near(dw.attention.qkv.weight, goldens_.joined(qkv(d + "self_attn.", "weight")), "qkv weight");
  expect_near(dw.attention.qkv.bias, goldens_.joined(qkv(d + "self_attn.", "bias")), "qkv bias");
  expect_linear(dw.attention.out, d + "self_attn.out_proj");
  expect_linear(dw.cross.q, d + "encoder_attn.q_proj");
  expect_linear(dw.cross.out, d + "encoder_attn.out_proj");
  expect_linear(dw.feed_forward.in, d + "fc1");
  expect_linear(dw.feed_forward.out, d + "fc2");
  expect_norm(options_.pre_norm ? dw.attention.norm : dw.cross.norm, d + "self_attn_layer_norm");
  expect_norm(options_.pre_norm ? dw.cross.norm : dw.feed_forward.norm, d + "encoder_attn_layer_norm");
  expect_norm(options_.pre_norm ? dw.feed_forward.norm : dbehind, d + "final_layer_norm");
}

// A layer may run twice before its backward: what is saved belongs to the run.
TEST_P(Layers, TwoRunsBeforeBackwardKeepApart) {
  const std::string w0 = "encoder_layer.";
  FeedForward w;
  w.norm = norm(w0 + "self_attn_layer_norm");
  w.in = linear(w0 + "fc1"), w.out = linear(w0 + "fc2");
  const auto gradients = [&] { return FeedForward{owned_.like(w.norm), owned_.like(w.in), owned_.like(w.out), {}}; };
  const FeedForward alone = gradients(), first = gradients(), second = gradients();
  const Tensor x = goldens_.at(w0 + "x"), dy = goldens_.at(w0 + "dy");
  FeedForwardSaved a, b;
  const LayerNorm none;
  const auto forward = [&](const Tensor& input, FeedForwardSaved& saved) {
    NormSaved above;
    norm_forward(context_, options_, w.norm, w.place, copy_of(context_, input), saved.norm);
    feed_forward_forward(context_, options_, w, saved, {&none, &w.place, &above});
  };
  const auto backward = [&](FeedForwardSaved& saved, const FeedForward& dw) {
    feed_forward_backward(context_, options_, w, {copy_of(context_, dy), {}, false}, saved, false, dw, {});
  };
  forward(x, a), backward(a, alone);
  forward(x, a), forward(dy, b);
  backward(a, first), backward(b, second);
  EXPECT_EQ(std::memcmp(alone.in.weight.raw(), first.in.weight.raw(), static_cast<size_t>(alone.in.weight.bytes())), 0);
  EXPECT_NE(std::memcmp(alone.in.weight.raw(), second.in.weight.raw(), static_cast<size_t>(alone.in.weight.bytes())),
            0);
}

}  // namespace
}  // namespace frit
