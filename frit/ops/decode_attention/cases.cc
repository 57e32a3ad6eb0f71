#include <algorithm>
#include <cmath>
#include <limits>

#include "frit/ops/case.h"
#include "frit/ops/decode_attention/decode_attention.h"
#include "frit/ops/decode_attention/gpu.h"

namespace frit {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A step: which sentences are live, and how many rows there are, padding included.
struct Step {
  int64_t sentences = 1, width = 1;
  std::vector<int64_t> live = {0};
  int64_t padding = 0;  // rows past the live ones
  int64_t heads = 1, d = 64;
  DType dtype = DType::kF32;

  int64_t live_rows() const { return static_cast<int64_t>(live.size()) * width; }
  int64_t rows() const { return live_rows() + padding; }
  int64_t slots() const { return sentences * width; }
  int64_t columns() const { return heads * d; }
  std::string name() const {
    return fmt::format("{}of{}x{}+{}/{}x{}", live.size(), sentences, width, padding, heads, d);
  }
};

// Rows past the live ones are NaN.
Fill fill_live(const Step& s, double deviation) {
  return [=](CaseRandom& random, Array& a) {
    const int64_t columns = a.dim(1);
    for (int64_t i = 0; i < static_cast<int64_t>(a.v.size()); ++i)
      a.v[i] = i / columns < s.live_rows() ? deviation * random.normal() : kNaN;
  };
}
std::vector<double> to_double(const std::vector<int64_t>& x) {
  return {x.begin(), x.end()};
}
void add_rows(OpCase& c, const Step& s) {
  std::vector<double> live = to_double(s.live);
  live.resize(s.sentences, -12345);  // never read
  c.inputs.push_back({"live", DType::kI32, {1}, fill_values({static_cast<double>(s.live.size())})});
  c.inputs.push_back({"live_sentence", DType::kI32, {s.sentences}, fill_values(live)});
}
DecodeRows rows_of(const Tensors& t, const Step& s) {
  return {t.at("live"), t.at("live_sentence"), s.width};
}

// out[0..d) = softmax(scale q.k) v in double; key(j) and value(j) point at d doubles.
template <typename K, typename V>
void attend(const double* q, int64_t keys, K&& key, V&& value, int64_t d, double scale, double* out) {
  std::vector<double> scores(keys);
  double top = -std::numeric_limits<double>::infinity(), total = 0;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < d; ++i) scores[j] += scale * q[i] * key(j)[i];
    top = std::max(top, scores[j]);
  }
  for (double& x : scores) total += x = std::exp(x - top);
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t i = 0; i < d; ++i) out[i] += scores[j] / total * value(j)[i];
}

struct Options {
  std::string note = {};
  int64_t stride = 0;      // of qkv or q
  bool both = false;       // all instances
  bool budget = false;     // of the vectors' form
  bool wild = false;       // origins (offsets) out of range, where the GPU takes the nearest
  bool outside = false;    // the position lies outside of the cache
  double deviation = 1.0;  // of queries and keys
  Where where = Where::kEverywhere;
};

void finish(OpCase& c, const Step& s, const Options& o) {
  c.op = "decode_attention";
  c.where = s.dtype == DType::kF16 || o.wild || o.outside ? Where::kGpu : o.where;
  c.name = fmt::format("{}/{}{}{}{}", c.name, name_of(s.dtype), o.note.empty() ? "" : "/", o.note,
                       o.stride ? "/strided" : "");
  if (o.both) c.forward_instances = {"vectors", "any", "warps"};
  // Scores of hundreds, whose last places count.
  if (o.deviation > 1 && s.dtype == DType::kF32) c.tolerance["out"] = {1e-4, 1e-4};
  if (s.rows() == 0) c.forward_gpu = {0, 0, 0, 0, 0, 0};
}

constexpr double kFar = 10000;  // what past the position must not count

OpCase self(const Step& s, int64_t position, int64_t positions, const Options& o = {}) {
  const int64_t h = s.columns(), slots = s.slots(), places = positions + 3, heads = s.heads, d = s.d, width = s.width;
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  OpCase c;
  c.name = fmt::format("self/{}/at{}of{}", s.name(), position, positions);
  c.inputs = {{"qkv", s.dtype, {s.rows(), 3 * h}, fill_live(s, o.deviation), o.stride}};
  c.inputs.push_back({"cache", s.dtype, {positions, slots, 2, h}, [=](CaseRandom& random, Array& a) {
                        const int64_t step = slots * 2 * h;
                        for (int64_t i = 0; i < static_cast<int64_t>(a.v.size()); ++i)
                          a.v[i] = i / step < position ? o.deviation * random.normal() : kFar;
                      }});
  c.inputs.push_back({"origin", DType::kI32, {2, slots, places}, [=](CaseRandom& random, Array& a) {
                        for (int64_t i = 0; i < static_cast<int64_t>(a.v.size()); ++i) {
                          a.v[i] = i % places < position && i / (slots * places) == position % 2
                                       ? static_cast<double>(random.below(slots))
                                       : -54321;
                          if (o.wild && i % 3 == 0) a.v[i] = i % 2 ? -1 : static_cast<double>(slots + 5);
                        }
                      }});
  c.inputs.push_back(
      {"position", DType::kI32, {1}, fill_values({static_cast<double>(o.outside ? positions + 1 : position)})});
  add_rows(c, s);
  c.outputs = {{"out", s.dtype, {s.rows(), h}}, {"cache", s.dtype, {positions, slots, 2, h}}};
  c.tolerance["cache"] = {0, 0};
  c.forward = [=](Context& context, const Tensors& t) {
    decode_self_attention(context,
                          {.qkv = t.at("qkv"),
                           .cache = t.at("cache"),
                           .origin = t.at("origin"),
                           .position = t.at("position"),
                           .rows = rows_of(t, s),
                           .heads = heads,
                           .scale = static_cast<float>(scale)},
                          t.at("out"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    Array& cache = out["cache"];
    cache = in.at("cache");
    if (o.outside) return;
    const std::vector<double>&qkv = in.at("qkv").v, &origin = in.at("origin").v;
    for (int64_t r = 0; r < s.live_rows(); ++r) {
      const int64_t slot = s.live[r / width] * width + r % width;
      std::copy_n(qkv.data() + r * 3 * h + h, 2 * h, cache.v.data() + (position * slots + slot) * 2 * h);
    }
    for (int64_t r = 0; r < s.live_rows(); ++r)
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t slot = s.live[r / width] * width + r % width;
        const auto key = [&](int64_t j) {
          int64_t from = slot;
          if (j < position) {
            from = static_cast<int64_t>(origin[((position % 2) * slots + slot) * places + j]);
            from = std::clamp<int64_t>(from, 0, slots - 1);
          }
          return cache.v.data() + (j * slots + from) * 2 * h + head * d;
        };
        attend(
            qkv.data() + r * 3 * h + head * d, position + 1, key, [&](int64_t j) { return key(j) + h; }, d,
            static_cast<double>(static_cast<float>(scale)), out["out"].v.data() + r * h + head * d);
      }
  };
  finish(c, s, o);
  const int64_t size = size_of(s.dtype), live = s.live_rows(), t = kDecodeAttentionThreads, lanes = d * size / 16;
  c.forward_budget.bytes = live * ((position + 1) * 2 * h + 4 * h) * size;
  if (o.budget) {
    // A thread reads position, live and live_sentence, and 16 bytes of the query; each past key's origin is read once.
    const int64_t threads = s.rows() * heads >= kDecodeAttentionMany ? 32 : t;
    const bool brief = position < kDecodeAttentionBrief * (32 / lanes);
    c.forward_gpu = {1,
                     brief || threads == 32 || live == 0 ? 0 : 1,
                     s.rows() * heads * threads * 28 + live * heads * (position * 4 + (position + 1) * 2 * d * size),
                     s.rows() * h * size + live * 2 * h * size,
                     0,
                     0};
  }
  return c;
}

// lengths: of the sentences' sources.
OpCase cross(const Step& s, const std::vector<int64_t>& lengths, const Options& o = {}, int64_t layers = 2) {
  const int64_t h = s.columns(), heads = s.heads, d = s.d, width = s.width;
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  std::vector<double> offsets = {0};
  for (int64_t n : lengths) offsets.push_back(offsets.back() + static_cast<double>(n));
  const int64_t tokens = static_cast<int64_t>(offsets.back());
  if (o.wild) offsets.front() = -3, offsets.back() = static_cast<double>(tokens + 1000);
  OpCase c;
  c.name = fmt::format("cross/{}/of{}_longest{}", s.name(), tokens,
                       lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end()));
  const int64_t columns = layers * 2 * h, first = columns - 2 * h;  // the last layer's
  c.inputs = {{"q", s.dtype, {s.rows(), h}, fill_live(s, o.deviation), o.stride}};
  c.inputs.push_back({"keys_values", s.dtype, {tokens, columns}, fill_normal(0, o.deviation)});
  c.inputs.push_back({"offsets", DType::kI32, {s.sentences + 1}, fill_values(offsets)});
  add_rows(c, s);
  c.outputs = {{"out", s.dtype, {s.rows(), h}}};
  c.forward = [=](Context& context, const Tensors& t) {
    decode_cross_attention(context,
                           {.q = t.at("q"),
                            .keys = t.at("keys_values").columns(first, first + h),
                            .values = t.at("keys_values").columns(first + h, columns),
                            .source_offsets = t.at("offsets"),
                            .rows = rows_of(t, s),
                            .heads = heads,
                            .scale = static_cast<float>(scale)},
                           t.at("out"));
  };
  c.oracle = [=](const Arrays& in, Arrays& out) {
    for (int64_t r = 0; r < s.live_rows(); ++r)
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t sentence = s.live[r / width];
        const auto end = [&](double x) { return std::clamp<int64_t>(static_cast<int64_t>(x), 0, tokens); };
        const int64_t from = end(offsets[sentence]), keys = end(offsets[sentence + 1]) - from;
        const auto key = [&](int64_t j) {
          return in.at("keys_values").v.data() + (from + j) * columns + first + head * d;
        };
        attend(
            in.at("q").v.data() + r * h + head * d, keys, key, [&](int64_t j) { return key(j) + h; }, d,
            static_cast<double>(static_cast<float>(scale)), out["out"].v.data() + r * h + head * d);
      }
  };
  finish(c, s, o);
  const int64_t size = size_of(s.dtype), live = static_cast<int64_t>(s.live.size()), t = kDecodeAttentionThreads;
  int64_t keys = 0;  // of the live sentences
  for (int64_t sentence : s.live) keys += lengths[sentence];
  c.forward_budget.bytes = keys * 2 * h * size + s.live_rows() * 2 * h * size;
  if (o.budget) {
    // Blocks of `most` rows: a thread reads live and live_sentence, two offsets, 16 bytes of each of `most` queries.
    const int64_t most = decode_cross_rows(width), chunks = (width + most - 1) / most;
    const int64_t padding = s.padding / width * chunks;  // whole sentences
    c.forward_gpu = {1,
                     1,
                     (live * chunks + padding) * heads * t * 8 + live * chunks * heads * t * (8 + 16 * most) +
                         chunks * keys * 2 * h * size,
                     s.rows() * h * size,
                     0,
                     0};
    // Or a warp a row: a thread reads 16 bytes of its query, live and live_sentence, two offsets.
    if (width > 1 && width <= 8)
      c.forward_gpu = {1,
                       0,
                       s.rows() * heads * 32 * 24 + s.live_rows() * heads * 32 * 8 + width * keys * 2 * h * size,
                       s.rows() * h * size,
                       0,
                       0};
  }
  return c;
}

}  // namespace

std::vector<OpCase> decode_attention_cases() {
  std::vector<OpCase> cases;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    // Positions and head widths.
    for (int64_t position : {0, 1, 31, 32, 67})
      for (int64_t d : {32, 64, 128, 24, 1})
        cases.push_back(self({1, 4, {0}, 0, d == 64 ? 3 : 2, d, dtype}, position, position + 2));
    cases.push_back(self({1, 1, {0}, 0, 1, 64, dtype}, 300, 301));
    cases.push_back(self({1, 1, {0}, 0, 1, 20, dtype}, 300, 304));
    // Rows: widths, sentences in any order, padding in part of a sentence too.
    for (int64_t width : {1, 4, 5}) {
      cases.push_back(self({6, width, {5, 0, 3}, 2 * width, 2, 64, dtype}, 9, 12, {.note = "both", .both = true}));
      cases.push_back(self({4, width, {3, 2, 1, 0}, 0, 2, 32, dtype}, 17, 18, {.budget = true}));
      cases.push_back(self({3, width, {2}, width == 1 ? 1 : 3, 2, 128, dtype}, 40, 64, {.budget = true}));
      cases.push_back(self({3, width, {}, width, 2, 64, dtype}, 3, 5));
    }
    cases.push_back(self({1, 2, {0}, 0, 8, 64, dtype}, 32, 33, {.budget = true}));
    cases.push_back(self({1, 2, {0}, 0, 8, 64, dtype}, 70, 73, {.budget = true}));
    cases.push_back(self({16, 4, {3, 1, 5, 0, 15, 7}, 40, 16, 32, dtype}, 5, 6, {.budget = true}));
    for (int64_t position : {0, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 129, 300})
      for (int64_t d : {32, 64, 128})
        cases.push_back(self({1, 1, {0}, 0, 1, d, dtype}, position, position + 2, {.note = "all", .both = true}));
    cases.push_back(self({2, 2, {}, 0, 2, 64, dtype}, 3, 5));
    cases.push_back(self({2, 2, {1, 0}, 0, 2, 64, dtype}, 70, 80, {.note = "both", .both = true}));
    cases.push_back(self({2, 2, {1, 0}, 0, 2, 64, dtype}, 12, 20, {.note = "peaked", .both = true, .deviation = 6}));
    cases.push_back(self({2, 2, {1, 0}, 0, 2, 64, dtype}, 12, 20, {.stride = 400}));
    cases.push_back(self({2, 2, {1, 0}, 0, 2, 64, dtype}, 12, 20, {.note = "odd", .stride = 403}));
    cases.push_back(self({1, 2, {0}, 0, 1, 32, dtype}, 2, 3, {.note = "far", .stride = int64_t{1} << 30}));
    cases.push_back(self({2, 2, {1, 0}, 0, 2, 64, dtype}, 12, 20, {.note = "wild", .both = true, .wild = true}));
    cases.push_back(self({2, 2, {1, 0}, 0, 2, 64, dtype}, 12, 20, {.note = "outside", .both = true, .outside = true}));

    for (int64_t d : {32, 64, 128, 24, 1}) {
      cases.push_back(cross({1, 4, {0}, 0, d == 64 ? 3 : 2, d, dtype}, {33}));
      cases.push_back(cross({3, 1, {2, 0}, 1, 2, d, dtype}, {1, 9, 31}, {.note = "both", .both = d >= 32}));
    }
    for (int64_t width : {1, 4, 5, 8, 9}) {
      cases.push_back(cross({4, width, {3, 0, 1}, width, 2, 64, dtype}, {7, 0, 5, 70},
                            {.note = "both", .both = true, .budget = true}));
      cases.push_back(cross({2, width, {1}, width == 1 ? 1 : width - 1, 2, 32, dtype}, {3, 40}));
    }
    cases.push_back(cross({1, 2, {0}, 0, 1, 64, dtype}, {300}, {.budget = true}));
    cases.push_back(cross({1, 8, {0}, 0, 2, 128, dtype}, {37}, {.budget = true}));
    cases.push_back(cross({2, 2, {}, 2, 2, 64, dtype}, {3, 5}));
    cases.push_back(cross({2, 2, {0, 1}, 0, 2, 64, dtype}, {0, 0}));
    cases.push_back(cross({2, 2, {1, 0}, 0, 2, 64, dtype}, {30, 31}, {.note = "peaked", .both = true, .deviation = 6}));
    cases.push_back(cross({2, 2, {1, 0}, 0, 2, 64, dtype}, {30, 31}, {.stride = 136}));
    cases.push_back(cross({2, 2, {1, 0}, 0, 2, 64, dtype}, {30, 31}, {.note = "odd", .stride = 133}));
    cases.push_back(cross({2, 2, {1, 0}, 0, 2, 64, dtype}, {30, 31}, {.note = "wild", .both = true, .wild = true}));
  }
  // mt-base and mt-big in the middle of a sentence; GPT-2 near its end.
  for (DType dtype : {DType::kF16, DType::kF32})
    for (int64_t heads : {8, 16})
      for (int64_t sentences : {1, 8, 32, 128}) {
        std::vector<int64_t> live(sentences);
        for (int64_t i = 0; i < sentences; ++i) live[i] = i;
        const Step step{sentences, 4, live, 0, heads, 64, dtype};
        cases.push_back(self(step, 16, 34, {.note = "timed", .where = Where::kGpu}));
        cases.back().benchmark = true, cases.back().test = false;
        cases.push_back(cross(step, std::vector<int64_t>(sentences, 32), {.note = "timed", .where = Where::kGpu}, 6));
        cases.back().benchmark = true, cases.back().test = false;
      }
  for (int64_t sentences : {1, 32}) {
    std::vector<int64_t> live(sentences);
    for (int64_t i = 0; i < sentences; ++i) live[i] = i;
    cases.push_back(
        self({sentences, 4, live, 0, 12, 64, DType::kF16}, 150, 160, {.note = "timed", .where = Where::kGpu}));
    cases.back().benchmark = true, cases.back().test = false;
  }
  return cases;
}

}  // namespace frit
