#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "frit/ops/case.h"
#include "frit/ops/sample_step/gpu.h"
#include "frit/ops/sample_step/sample_step.h"

namespace frit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Draws {
  int sentences = 3, live = 2, entries = 3, width = 2, vocabulary = 40, places = 10, position = 4;
  double temperature = 1, top_p = 1;
  int64_t top_k = 0;
  int64_t seed = 1;
  float same = 0.1f, never = 0.1f;
  std::vector<int> eos = {0}, singles;
  std::vector<std::vector<int>> sequences;
  int ngram = 0, min_length = 0, forced_eos = -1;
  float penalty = 1;
  int64_t stride = 0;
};

// A row of one draw: what Sampler does, by sorting.
int token_at(const std::vector<double>& row, const Draws& d, double u) {
  const double top = *std::max_element(row.begin(), row.end());
  double lowest = -kInfinity;
  if (d.top_k > 0 && d.top_k < d.vocabulary) {
    std::vector<double> sorted = row;
    std::sort(sorted.rbegin(), sorted.rend());
    lowest = sorted[static_cast<size_t>(d.top_k - 1)];
  }
  std::vector<std::pair<double, int>> kept;
  double total = 0;
  for (int t = 0; t < d.vocabulary; ++t) {
    const double x = row[static_cast<size_t>(t)];
    if (x < lowest || x == -kInfinity) continue;
    kept.emplace_back(-std::exp((x - top) / d.temperature), t);
    total -= kept.back().first;
  }
  if (d.top_p < 1) {
    std::sort(kept.begin(), kept.end());
    double sum = 0;
    size_t n = 0;
    while (n < kept.size() && (n == 0 || sum < d.top_p * total)) sum -= kept[n++].first;
    kept.resize(n);
    total = sum;
  }
  double left = u * total;
  for (const auto& [weight, token] : kept) {
    if (left < -weight) return token;
    left += weight;
  }
  return kept.back().second;
}

void oracle(const Draws& d, const Arrays& in, Arrays& out) {
  const int length = d.position + 1, slots = d.sentences * d.width, side = d.position & 1;
  for (int r = 0; r < d.entries * d.width; ++r) {
    const int entry = r / d.width, b = r % d.width, s = static_cast<int>(in.at("live_sentence")[entry]);
    const int slot = s * d.width + b, max_length = static_cast<int>(in.at("max_length")[s]);
    std::vector<double> row(in.at("logits").v.begin() + r * d.vocabulary,
                            in.at("logits").v.begin() + (r + 1) * d.vocabulary);
    const std::vector<double> came = row;
    const auto leave = [&](double token, double score) {
      out["drawn"][r] = token, out["drawn_scores"][r] = score;
      for (int t = 0; t < d.vocabulary; ++t) out["logits"][r * d.vocabulary + t] = row[static_cast<size_t>(t)];
    };
    if (d.forced_eos >= 0 && length == max_length - 1) {
      leave(d.forced_eos, 0);
      continue;
    }
    if (entry >= d.live || length < static_cast<int>(in.at("prompt")[s]) || in.at("ended")[slot] != 0) {
      leave(0, 0);
      continue;
    }
    std::vector<int> ids;
    for (int i = 0; i < length; ++i)
      ids.push_back(static_cast<int>(in.at("ids")[(side * slots + slot) * d.places + i]));
    for (int t = 0; t < d.vocabulary; ++t) {
      double& x = row[static_cast<size_t>(t)];
      if (d.penalty != 1 && std::count(ids.begin(), ids.end(), t)) {
        const auto f = static_cast<float>(x);
        x = f < 0 ? f * d.penalty : f / d.penalty;
      }
      bool banned = std::count(d.singles.begin(), d.singles.end(), t) > 0;
      banned = banned || (length < d.min_length && std::count(d.eos.begin(), d.eos.end(), t));
      for (int i = 0; d.ngram > 0 && i + d.ngram <= length; ++i)
        banned = banned || (ids[static_cast<size_t>(i + d.ngram - 1)] == t &&
                            std::equal(ids.end() - (d.ngram - 1), ids.end(), ids.begin() + i));
      for (const auto& word : d.sequences)
        banned =
            banned || (word.back() == t && static_cast<int>(word.size()) - 1 <= length &&
                       std::equal(word.begin(), word.end() - 1, ids.end() - static_cast<int64_t>(word.size()) + 1));
      if (banned) x = -kInfinity;
    }
    if (*std::max_element(row.begin(), row.end()) == -kInfinity) {
      leave(0, -kInfinity);
      continue;
    }
    const double u = sampling_uniform(static_cast<uint64_t>(d.seed), static_cast<uint64_t>(100 + 7 * s),
                                      static_cast<uint32_t>(b), static_cast<uint32_t>(length));
    const int token = token_at(row, d, u);
    leave(token, static_cast<double>(static_cast<float>(came[static_cast<size_t>(token)]) -
                                     static_cast<float>(in.at("lse")[r])));
  }
}

OpCase make(const char* name, Draws d, int64_t seed) {
  d.seed = seed;
  std::mt19937 random(static_cast<unsigned>(seed) * 31 + 5);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto chance = [&](float p) { return static_cast<float>(random() >> 8) * 0x1p-24f < p; };
  const int S = d.sentences, k = d.width, rows = d.entries * k, length = d.position + 1;
  OpCase c;
  c.name = fmt::format("{}/{}x{}/V{}/{}", name, d.entries, k, d.vocabulary, seed);
  c.where = Where::kGpu;
  const auto add = [&](const char* operand, DType dtype, Shape shape, const std::function<double(int64_t)>& value) {
    std::vector<double> values;
    for (int64_t i = 0; i < shape.numel(); ++i) values.push_back(value(i));
    c.inputs.push_back({operand, dtype, shape, fill_values(values), 0});
  };
  add("logits", DType::kF32, {rows, d.vocabulary}, [&](int64_t) -> double {
    if (chance(d.never)) return -kInfinity;
    return chance(d.same) ? below(3) : below(4096) / 512.0 - 4;
  });
  c.inputs.back().row_stride = d.stride;
  c.outputs.push_back({"logits", DType::kF32, {rows, d.vocabulary}, {}, d.stride});
  add("lse", DType::kF32, {rows}, [&](int64_t) { return below(512) / 128.0; });
  std::vector<double> settings(kSearchLists, 0.0);
  settings[kSearchMinLength] = d.min_length, settings[kSearchNgram] = d.ngram, settings[kSearchForcedBos] = -1;
  settings[kSearchForcedEos] = d.forced_eos;
  settings[kSearchEos] = static_cast<double>(d.eos.size()),
  settings[kSearchSingles] = static_cast<double>(d.singles.size());
  settings[kSearchSequences] = static_cast<double>(d.sequences.size());
  settings.insert(settings.end(), d.eos.begin(), d.eos.end());
  settings.insert(settings.end(), d.singles.begin(), d.singles.end());
  auto begin = static_cast<double>(settings.size() + d.sequences.size() + 1);
  for (const auto& word : d.sequences) settings.push_back(begin), begin += static_cast<double>(word.size());
  settings.push_back(begin);
  for (const auto& word : d.sequences) settings.insert(settings.end(), word.begin(), word.end());
  const auto of = [](const std::vector<double>& values) {
    return [&values](int64_t i) { return values[static_cast<size_t>(i)]; };
  };
  add("settings", DType::kI32, {static_cast<int64_t>(settings.size())}, of(settings));
  add("numbers", DType::kF32, {2}, [&](int64_t i) { return i == kSearchPenalty ? d.penalty : 1.0; });
  std::vector<double> order(static_cast<size_t>(S));
  for (int i = 0; i < S; ++i) order[static_cast<size_t>(i)] = i;
  std::shuffle(order.begin(), order.end(), random);
  const int slots = S * k, few = std::min(d.vocabulary, 6);
  add("live", DType::kI32, {1}, [&](int64_t) { return d.live; });
  add("live_sentence", DType::kI32, {S}, of(order));
  add("position", DType::kI32, {1}, [&](int64_t) { return d.position; });
  add("prompt", DType::kI32, {S}, [&](int64_t) { return chance(0.1f) ? length + 1 : 1; });
  add("max_length", DType::kI32, {S}, [&](int64_t i) { return i % 2 ? length + 1 : length + 2; });
  add("ids", DType::kI32, {2, slots, d.places}, [&](int64_t) { return below(few); });
  add("ended", DType::kI32, {slots}, [&](int64_t) { return chance(0.2f) ? 1 : 0; });
  c.outputs.push_back({"drawn", DType::kI32, {rows}});
  c.outputs.push_back({"drawn_scores", DType::kF32, {rows}});
  for (const Operand& o : c.outputs) c.tolerance[o.name] = {0, 0};
  c.forward_gpu.launches = 1;
  c.forward = [d](Context& context, const Tensors& t) {
    // What sample_step does not read may be anything of the right shape.
    const int64_t S = d.sentences, slots = S * d.width, P = d.places;
    void* const some = t.at("ids").raw();
    SampleStepArgs a;
    a.logits = t.at("logits"), a.lse = t.at("lse"), a.settings = t.at("settings"), a.numbers = t.at("numbers");
    a.drawn = t.at("drawn"), a.drawn_scores = t.at("drawn_scores");
    SearchState& s = a.state;
    s.width = d.width;
    s.live = t.at("live"), s.live_sentence = t.at("live_sentence"), s.position = t.at("position");
    s.prompt = t.at("prompt"), s.max_length = t.at("max_length"), s.ids = t.at("ids"), s.ended = t.at("ended");
    s.origin = Tensor(some, DType::kI32, {2, slots, P}), s.scores = Tensor(some, DType::kF32, {slots});
    s.done_scores = s.scores, s.done_length = s.done_column = Tensor(some, DType::kI32, {slots});
    s.done_ids = Tensor(some, DType::kI32, {P, slots}), s.scratch = Tensor(some, DType::kI32, {2 * S + 2});
    s.row_ids = s.row_positions = Tensor(some, DType::kI32, {slots}), s.progress = Tensor(some, DType::kI64, {1});
    a.draw = t.at("draw");
    sample_step(context, a);
  };
  add("draw", DType::kI64, {kDrawSentences + S}, [&](int64_t i) -> double {
    if (i == kDrawSeed) return static_cast<double>(d.seed);
    if (i == kDrawTopK) return static_cast<double>(d.top_k);
    if (i == kDrawTemperature) return static_cast<double>(std::bit_cast<int64_t>(d.temperature));
    if (i == kDrawTopP) return static_cast<double>(std::bit_cast<int64_t>(d.top_p));
    return static_cast<double>(100 + 7 * (i - kDrawSentences));
  });
  c.oracle = [d](const Arrays& in, Arrays& out) { oracle(d, in, out); };
  return c;
}

}  // namespace

std::vector<OpCase> sample_step_cases() {
  std::vector<OpCase> cases;
  int64_t seed = 0;
  const auto add = [&](const char* name, const Draws& d) { cases.push_back(make(name, d, ++seed)); };
  for (const int vocabulary : {1, 2, 3, 31, 32, 33, 63, 65, 127, 128, 129, 255, 256, 257, 300, 400, 600})
    for (const int width : {1, 2}) {
      if (vocabulary > 200 && width > 1) continue;
      Draws d;
      d.vocabulary = vocabulary, d.width = width, d.never = vocabulary < 3 ? 0 : 0.1f;
      add("all", d);
      // Doubles whose bits a double can hold: the case table has numbers alone.
      d.temperature = 2, d.top_k = 5;
      add("top_k", d);
      d.top_k = 0, d.top_p = 0.75;
      add("top_p", d);
      d.top_k = 20, d.top_p = 0.5, d.same = 1;
      add("ties", d);
    }
  {
    Draws d;
    d.vocabulary = 66000, d.width = 1, d.entries = d.live = d.sentences = 1, d.temperature = 4;
    add("large", d);
    Draws rules;
    rules.penalty = 1.5f, rules.ngram = 2, rules.singles = {3, 9, 3}, rules.sequences = {{1, 2}, {4, 4}, {0, 5}, {5}};
    rules.min_length = 9, rules.eos = {0, 7}, rules.position = 7;
    add("rules", rules);
    rules.penalty = 0.5f, rules.ngram = 1, rules.stride = 44, rules.top_p = 0.5;
    add("rules", rules);
    rules.forced_eos = 2;
    add("forced", rules);
    Draws none;
    none.never = 1;
    add("banned", none);
    none.live = 0;
    add("none_left", none);
  }
  return cases;
}

}  // namespace frit
