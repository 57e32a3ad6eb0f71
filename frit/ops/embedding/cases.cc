#include <cmath>
#include <limits>

#include "frit/ops/case.h"
#include "frit/ops/embedding/gpu.h"

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
  int64_t tail = 0;        // tokens behind the last sequence, and ids out of range: a GPU takes them for nothing
  bool counts = false;     // no word has more tokens than a piece: what backward reads on a GPU is known
  bool instances = false;  // every instance of the kernels is forced
  Fill ids = nullptr;
  const char* note = "";
};

OpCase make(std::vector<int64_t> lengths, int64_t width, int64_t vocabulary, DType dtype, Options o = {}) {
  OpCase c;
  int64_t tokens = 0, longest = 0;
  for (int64_t l : lengths) tokens += l, longest = std::max(longest, l);
  const int64_t real = tokens;
  tokens += o.tail;
  const int64_t places = std::max(o.places, o.position_offset + longest);
  c.name = fmt::format("{}x{}/V{}/{}/p{}{}{}{}{}{}{}{}", tokens, width, vocabulary, name_of(dtype), o.p_drop,
                       o.positions ? "" : "/no_positions", o.position_ids ? "/position_ids" : "",
                       o.position_offset ? fmt::format("/from{}", o.position_offset) : "", o.pad_id >= 0 ? "/pad" : "",
                       o.gradient == DType::kF32 ? "" : "/16_bit_gradient", o.stride ? "/strided" : "",
                       o.tail ? "/tail" + std::string(o.note) : o.note);
  const Dropout dropout{o.p_drop, dropout_site("case"), 2, {3, 8}};
  const float scale = std::sqrt(static_cast<float>(width));
  const Fill ids = [=](CaseRandom& random, Array& a) {
    fill_below(vocabulary)(random, a);
    if (o.tail == 0) return;
    for (int64_t t = real; t < tokens; t += 2) a[t] = -1;
    a[real / 2] = -1, a[real / 3] = static_cast<double>(vocabulary), a[0] = 2e9;
  };
  c.inputs = {{"ids", DType::kI32, {tokens}, o.ids ? o.ids : ids},
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
    result.resize(tokens, -1);
    if (o.position_ids)
      for (int64_t t = 0; t < real; ++t) result[t] = static_cast<int64_t>(in.at("position_ids")[t]);
    return result;
  };
  const auto counts = [=](const Arrays& in, int64_t t) {
    return t < real && in.at("ids")[t] >= 0 && in.at("ids")[t] < static_cast<double>(vocabulary);
  };
  const auto factor = [=](int64_t t, int64_t i) {
    return !dropout.active() ? 1 : dropout.keep(t, i) ? static_cast<double>(dropout.scale()) : 0;
  };
  c.forward = [=](Context& context, const Tensors& t) { embedding_forward(context, args(t), t.at("y")); };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    const auto at = positions(in);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; counts(in, t) && i < width; ++i) {
        double v = static_cast<double>(scale) * in.at("table")[static_cast<int64_t>(in.at("ids")[t]) * width + i];
        if (o.positions) v += in.at("positions")[at[t] * width + i];
        out["y"][t * width + i] = factor(t, i) * v;
      }
  };
  const int64_t size = size_of(dtype);
  c.forward_budget = {tokens * width == 0 ? 0 : 1, 0,
                      tokens * (4 + width * size * 2) + (o.positions ? std::min(tokens, places) * width * size : 0)};
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
    for (int64_t t = 0; t < real; ++t)
      for (int64_t i = 0; i < width; ++i) {
        const double g = factor(t, i) * in.at("dy")[t * width + i];
        const int64_t id = static_cast<int64_t>(in.at("ids")[t]);
        if (id != o.pad_id && counts(in, t)) out["dtable"][id * width + i] += static_cast<double>(scale) * g;
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

  // On a GPU: a warp of four tokens reads their ids, the last offset in every lane, the offsets once to find their
  // sequences (fewer than 32), and their rows.
  const int64_t sequences = static_cast<int64_t>(lengths.size());
  const int64_t warps = (tokens + kEmbeddingTokens - 1) / kEmbeddingTokens;
  const bool aligned = width * size % 16 == 0 && o.stride == 0, found = o.positions && !o.position_ids;
  c.forward_gpu.launches = tokens * width > 0;
  c.forward_gpu.barriers = c.forward_gpu.atomics = c.forward_gpu.scratch_bytes = 0;
  if (aligned && width > 0 && o.tail == 0 && sequences < 32) {
    c.forward_gpu.read_bytes = tokens * 4 + warps * 32 * 4 + (found ? warps * (sequences + 1) * 4 : 0) +
                               (o.position_ids ? tokens * 4 : 0) + tokens * width * size * (o.positions ? 2 : 1);
    c.forward_gpu.written_bytes = tokens * width * size;
  }
  const int64_t pieces = (tokens + kEmbeddingPiece - 1) / kEmbeddingPiece;
  const auto scratch = static_cast<int64_t>(align_up(tokens * 4) + align_up(pieces * 16) +
                                            align_up(2 * pieces * ((width + 3) / 4 * 4) * 4));
  c.backward_gpu.launches =
      width == 0 ? 0 : (tokens > 0 ? 3 : 1) * (learned ? 2 : 1) + (learned && found && tokens > 0);
  c.backward_gpu.scratch_bytes =
      width == 0 ? 0 : scratch + (learned && found ? static_cast<int64_t>(align_up(tokens * 4)) : 0);
  c.backward_gpu.atomics = 0;
  if (aligned && o.counts && !learned) {
    int64_t owners = 1;  // with 4 to 256 words each, at best 256
    while (owners < 256 && vocabulary / (2 * owners) >= 4) owners *= 2;
    while (vocabulary > 256 * owners) owners *= 2;
    c.backward_gpu.barriers = 4;  // of the first launch
    // A warp looks through whole 32 vectors of 4 ids.
    const int64_t looking = tokens == 0 ? 0 : (tokens + 127) / 128,
                  most = (looking + 15) / 16;  // by each of a block's 16 warps
    c.backward_gpu.read_bytes = owners * ((looking + most - 1) / std::max<int64_t>(most, 1) * 32 + tokens) * 4 +
                                tokens * width * size +                //
                                pieces * 32 * 16 +                     // what each lane must know of a piece's runs
                                (width + 127) / 128 * pieces * 8 * 8;  // and a warp, of all that begin, for 128 columns
    c.backward_gpu.written_bytes = pieces * 16 + vocabulary * width * size_of(o.gradient);
  }
  if (o.tail > 0) {
    c.incoming_fill = [=](CaseRandom& random, Array& a) {
      fill_normal()(random, a);
      for (int64_t i = real * width; i < tokens * width; ++i) a[i] = std::numeric_limits<double>::quiet_NaN();
    };
    c.finite_difference_step = 0;  // the loss is not a number
  }
  if (o.tail > 0 || dtype == DType::kF16) c.where = Where::kGpu;
  if (o.instances)
    c.forward_instances = {"2_vectors", "4_vectors"}, c.backward_instances = {"blocks_256", "blocks_128"};
  if (o.instances && size == 2 && width % 8 != 0 && o.stride == 0) c.forward_instances.push_back("shifted");
  return c;
}

// Words of a text: few are frequent, many are rare.
void fill_zipf(CaseRandom& random, Array& a) {
  for (double& v : a.v) v = std::floor(std::pow(8000.0, random.uniform())) - 1;
}

}  // namespace

std::vector<OpCase> embedding_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const bool narrow = dtype != DType::kF32;
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
    cases.push_back(make({12, 21}, 65, 1, dtype, {.p_drop = 0.5f}));             // every token the same
    if (dtype != DType::kF16) cases.push_back(make({12, 21}, 65, 3000, dtype));  // most rows without a token
    cases.push_back(make({200, 100}, 40, 20, dtype, {.places = 200}));
    cases.push_back(make({9, 5}, 33, 12, dtype, {.stride = 40}));
    cases.push_back(make({5, 3}, 33, 5, dtype,
                         {.stride = int64_t{1} << 30, .places = 5}));  // the last row begins past 2^31 elements
    cases.push_back(make({3}, 0, 5, dtype));
    // Words and positions with many pieces of tokens; all tokens one word; every instance, aligned and not.
    cases.push_back(make({300}, 24, 1, dtype, {.places = 300, .note = "/one_word"}));
    cases.push_back(make({70, 1, 90}, 136, 4, dtype, {.places = 90, .instances = true}));
    cases.push_back(make({9, 0, 14}, 1030, 30, dtype, {.instances = true}));
    cases.push_back(make({130, 70}, 131, 3, dtype, {.learned = false, .instances = true, .note = "/fixed_positions"}));
    cases.push_back(make(std::vector<int64_t>(70, 2), 19, 300, dtype, {.note = "/70_sequences"}));
    if (dtype == DType::kBF16)  // more than the warps of a block look at in one go
      for (int64_t vocabulary : {9, 100})
        cases.push_back(make(std::vector<int64_t>(25, 701), 8, vocabulary, dtype, {.learned = false, .note = "/many"}));
    // No word has many tokens: what is read and written is known.
    for (int64_t width : {64, 256, 520}) {
      cases.push_back(make({3, 11, 2}, width, 100, dtype, {.learned = false, .counts = true, .note = "/counted"}));
      cases.push_back(
          make({16}, width, 257, dtype, {.positions = false, .gradient = dtype, .counts = true, .note = "/counted"}));
    }
    for (int64_t width : {40, 65}) {
      cases.push_back(make({30, 7, 5}, width, 9, dtype, {.tail = 22}));
      cases.push_back(make({30, 7, 5}, width, 9, dtype, {.position_ids = true, .pad_id = 2, .tail = 3}));
      cases.push_back(make({30, 7, 5}, width, 9, dtype, {.positions = false, .gradient = dtype, .tail = 1}));
      cases.push_back(make({33}, width, 2, dtype, {.gradient = dtype, .tail = 50, .note = "/long_runs"}));
    }
    if (narrow) {
      cases.push_back(make({12, 21}, 65, 11, dtype, {.gradient = dtype}));
      // Rows that are no whole vectors, however they lie; the last ones of the table, of the positions and of dy end
      // within a vector. Few words, so that all of them occur; runs of one token, of some, and long ones.
      for (int64_t width = 1; width <= 40; ++width)
        if (width % 8 != 0)
          cases.push_back(make({5, 2}, width, 3, dtype,
                               {.learned = width % 5 == 0,
                                .p_drop = width % 3 == 0 ? 0.0f : 0.4f,
                                .gradient = dtype,
                                .places = 5,
                                .note = "/odd"}));
      for (int64_t width : {1023, 1025, 1100, 2051})
        cases.push_back(make(
            {5, 2}, width, 3, dtype,
            {.learned = false, .p_drop = 0.4f, .gradient = dtype, .places = 5, .instances = true, .note = "/odd"}));
      cases.push_back(make({1}, 8191, 1, dtype, {.gradient = dtype, .places = 1, .note = "/odd"}));
      cases.push_back(make({1}, 8193, 1, dtype, {.positions = false, .gradient = dtype, .note = "/odd"}));
      cases.push_back(make({60}, 131, 3, dtype, {.positions = false, .gradient = dtype, .note = "/long_runs"}));
    }
    if (dtype == DType::kF16) continue;
    for (float p : {0.0f, 0.1f}) {
      cases.push_back(
          make(std::vector<int64_t>(128, 32), 512, 8000, dtype, {.learned = false, .p_drop = p, .ids = fill_zipf}));
      cases.back().benchmark = true, cases.back().test = false, cases.back().where = Where::kCpu;
    }
  }
  const auto timed = [&](int64_t width, float p, Fill ids, const char* note) {
    cases.push_back(
        make(std::vector<int64_t>(512, 32), width, 32768, DType::kBF16,
             {.learned = false, .p_drop = p, .gradient = DType::kBF16, .instances = true, .ids = ids, .note = note}));
    cases.back().benchmark = true, cases.back().test = false, cases.back().where = Where::kGpu;
  };
  for (int64_t width : {1023, 1024, 1025}) timed(width, 0.1f, nullptr, "/random");
  timed(1024, 0, nullptr, "/random");
  timed(1024, 0.1f, fill_uniform(7, 7), "/one_word");
  timed(1025, 0.1f, fill_uniform(7, 7), "/one_word");
  timed(1024, 0.1f, fill_zipf, "/zipf");
  return cases;
}

}  // namespace frit
