#include <cmath>

#include "frit/ops/case.h"
#include "frit/ops/embedding/embedding.h"

namespace frit {
namespace {

struct Options {
  bool positions = true, position_ids = false, learned = true;  // learned: positions have a gradient
  int64_t position_offset = 0;
  float p_drop = 0.1f;
  int64_t pad_id = -1;
  DType gradient = DType::kF32;
  int64_t stride = 0;  // of the table and the positions
  int64_t places = 40;
  Fill ids = nullptr;
  const char* note = "";
};

OpCase make(std::vector<int64_t> lengths, int64_t width, int64_t vocabulary, DType dtype, Options o = {}) {
  OpCase c;
  int64_t tokens = 0, longest = 0;
  for (int64_t l : lengths) tokens += l, longest = std::max(longest, l);
  const int64_t places = std::max(o.places, o.position_offset + longest);
  c.name = fmt::format("{}x{}/V{}/{}/p{}{}{}{}{}{}{}{}", tokens, width, vocabulary, name_of(dtype), o.p_drop,
                       o.positions ? "" : "/no_positions", o.position_ids ? "/position_ids" : "",
                       o.position_offset ? fmt::format("/from{}", o.position_offset) : "", o.pad_id >= 0 ? "/pad" : "",
                       o.gradient == DType::kF32 ? "" : "/bf16_gradient", o.stride ? "/strided" : "", o.note);
  const Dropout dropout{o.p_drop, dropout_site("case"), 2, {3, 8}};
  const float scale = std::sqrt(static_cast<float>(width));
  c.inputs = {{"ids", DType::kI32, {tokens}, o.ids ? o.ids : fill_below(vocabulary)},
              {"offsets", DType::kI32, {static_cast<int64_t>(lengths.size()) + 1}, fill_offsets(lengths)},
              {"table", dtype, {vocabulary, width}, fill_normal(), o.stride}};
  if (o.positions) c.inputs.push_back({"positions", dtype, {places, width}, fill_normal(), o.stride});
  if (o.position_ids) c.inputs.push_back({"position_ids", DType::kI32, {tokens}, fill_below(places)});
  c.outputs = {{"y", dtype, {tokens, width}}};
  const auto args = [=](const Tensors& t) {
    EmbeddingArgs a;
    a.ids = t.at("ids"), a.offsets = t.at("offsets"), a.table = t.at("table");
    if (o.positions) a.positions = t.at("positions");
    if (o.position_ids) a.position_ids = t.at("position_ids");
    a.position_offset = o.position_offset, a.scale = scale, a.dropout = dropout;
    return a;
  };
  const auto positions = [=](const Arrays& in) {
    std::vector<int64_t> result;
    for (int64_t l : lengths)
      for (int64_t i = 0; i < l; ++i) result.push_back(i + o.position_offset);
    if (o.position_ids)
      for (int64_t t = 0; t < tokens; ++t) result[t] = static_cast<int64_t>(in.at("position_ids")[t]);
    return result;
  };
  const auto factor = [=](int64_t t, int64_t i) {
    return !dropout.active() ? 1 : dropout.keep(t, i) ? static_cast<double>(dropout.scale()) : 0;
  };
  c.forward = [=](Context& context, const Tensors& t) { embedding_forward(context, args(t), t.at("y")); };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    const auto at = positions(in);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < width; ++i) {
        double v = static_cast<double>(scale) * in.at("table")[static_cast<int64_t>(in.at("ids")[t]) * width + i];
        if (o.positions) v += in.at("positions")[at[t] * width + i];
        out["y"][t * width + i] = factor(t, i) * v;
      }
  };
  const int64_t size = size_of(dtype);
  c.forward_budget = {tokens * width == 0 ? 0 : 1, 0, tokens * (4 + width * size * (o.positions ? 3 : 2))};
  c.incoming = {"y"};
  c.differentiable = c.accumulates = {"table"};
  const bool learned = o.positions && o.learned;
  if (learned) c.differentiable.push_back("positions"), c.accumulates.push_back("positions");
  for (const std::string& name : c.differentiable) {
    c.gradient_dtype[name] = o.gradient;
    // Sums over equal tokens, times the scale.
    c.gradient_tolerance[name] = tolerance_for(
        o.gradient, o.gradient == DType::kF32 ? std::max(4.0, std::sqrt(width) * tokens / vocabulary) : 4);
  }
  c.backward = [=](Context& context, const Tensors& t, bool accumulate) {
    embedding_backward(context, args(t), t.at("dy"), o.pad_id, accumulate, t.at("dtable"),
                       learned ? t.at("dpositions") : Tensor());
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& out) {
    const auto at = positions(in);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < width; ++i) {
        const double g = factor(t, i) * in.at("dy")[t * width + i];
        const int64_t id = static_cast<int64_t>(in.at("ids")[t]);
        if (id != o.pad_id) out["dtable"][id * width + i] += static_cast<double>(scale) * g;
        if (learned) out["dpositions"][at[t] * width + i] += g;
      }
  };
  if (o.pad_id >= 0) c.finite_difference_step = 0;  // the pad's gradient is withheld, so it is not the derivative
  const int64_t keys = std::max(vocabulary, learned ? places : 0);
  c.backward_budget = {
      width == 0 ? 0
      : learned  ? 2
                 : 1,
      static_cast<int64_t>(align_up((keys + 2) * 4) + align_up(tokens * 4)),
      tokens * (4 + width * size) + (vocabulary + (learned ? places : 0)) * width * size_of(o.gradient)};
  return c;
}

// Words of a text: few are frequent, many are rare.
void fill_zipf(CaseRandom& random, Array& a) {
  for (double& v : a.v) v = std::floor(std::pow(8000.0, random.uniform())) - 1;
}

}  // namespace

std::vector<OpCase> embedding_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t width : {1, 7, 31, 32, 33, 127, 511, 513, 1023, 1024, 1025}) {
      cases.push_back(make({}, width, 5, dtype));
      cases.push_back(make({1}, width, 3, dtype));
      cases.push_back(make({2, 0, 1}, width, 7, dtype));
      if (width < 128) cases.push_back(make({5, 31, 1, 0, 0, 30}, width, 29, dtype));
    }
    cases.push_back(make({12, 21}, 65, 11, dtype, {.positions = false}));
    cases.push_back(make({12, 21}, 65, 11, dtype, {.learned = false, .note = "/fixed_positions"}));
    cases.push_back(make({12, 21}, 65, 11, dtype, {.position_ids = true}));
    cases.push_back(make({1, 1, 1, 1}, 65, 11, dtype, {.position_offset = 17}));
    cases.push_back(make({12, 21}, 65, 11, dtype, {.p_drop = 0, .pad_id = 3}));
    cases.push_back(make({12, 21}, 65, 1, dtype, {.p_drop = 0.5f}));  // every token the same
    cases.push_back(make({12, 21}, 65, 3000, dtype));                 // most rows without a token
    cases.push_back(make({200, 100}, 40, 20, dtype, {.places = 200}));
    cases.push_back(make({9, 5}, 33, 12, dtype, {.stride = 40}));
    cases.push_back(make({5, 3}, 33, 5, dtype,
                         {.stride = int64_t{1} << 30, .places = 5}));  // the last row begins past 2^31 elements
    cases.push_back(make({3}, 0, 5, dtype));
    for (float p : {0.0f, 0.1f}) {
      cases.push_back(
          make(std::vector<int64_t>(128, 32), 512, 8000, dtype, {.learned = false, .p_drop = p, .ids = fill_zipf}));
      cases.back().benchmark = true, cases.back().test = false;
    }
  }
  cases.push_back(make({12, 21}, 65, 11, DType::kBF16, {.gradient = DType::kBF16}));
  return cases;
}

}  // namespace frit
