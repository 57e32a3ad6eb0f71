#include <algorithm>
#include <array>
#include <limits>
#include <random>

#include "frit/ops/case.h"
#include "frit/ops/search_step/gpu.h"
#include "frit/ops/search_step/search_step.h"

namespace frit {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kWorst = -1.0e9f;

// A batch in the middle of its search.
struct Batch {
  int sentences = 4, live = 3, entries = 4;  // entries: for which there are rows
  int width = 2, vocabulary = 20, keep = 4, count = 6, places = 12, position = 4;
  bool beam = true, drawn = false, token_scores = false;
  DType logits = DType::kF32;
  bool with_logits = false;
  float same = 0.2f;                                       // how often a value is one of three, so that there are ties
  float never = 0.1f;                                      // and -inf
  int shortest_prompt = 1, longest_prompt = 3, most = 12;  // of max_length; from position + 2 on
  std::vector<int> eos = {0}, singles;
  std::vector<std::vector<int>> sequences;
  int ngram = 0, min_length = 0, min_new = 0, forced_bos = -1, forced_eos = -1, early = 0;
  bool bound = false;
  float penalty = 1, diversity = 0;
  unsigned seed = 1;
};

using Values = std::vector<double>;
float number(const Array& a, int64_t i) {
  return static_cast<float>(a.v[static_cast<size_t>(i)]);
}
int whole(const Array& a, int64_t i) {
  return static_cast<int>(a.v[static_cast<size_t>(i)]);
}

// What transformers does with one sentence after another, in the floats that it has.
class Oracle {
 public:
  Oracle(const Batch& batch, const Arrays& in, Arrays& out) : b_(batch), in_(in), out_(out) {}

  void run() {
    for (auto& [name, array] : out_) array.v = in_.at(name).v;
    const int p = b_.position;
    std::vector<int> over(static_cast<size_t>(b_.live), 0);
    for (int e = 0; e < b_.entries; ++e) {
      const int sentence = whole(in_.at("live_sentence"), e);
      const bool ended = one(e, sentence);
      if (e < b_.live) over[static_cast<size_t>(e)] = ended, out_["scratch"][e] = ended;
    }
    std::vector<double> stay, leave;
    for (int e = 0; e < b_.live; ++e)
      (over[static_cast<size_t>(e)] ? leave : stay).push_back(in_.at("live_sentence")[e]);
    const auto left = static_cast<int>(stay.size());
    for (size_t i = 0; i < leave.size(); ++i) out_["scratch"][b_.sentences + static_cast<int64_t>(i)] = leave[i];
    stay.insert(stay.end(), leave.begin(), leave.end());
    for (size_t i = 0; i < stay.size(); ++i) out_["live_sentence"][static_cast<int64_t>(i)] = stay[i];
    if (p + 1 < b_.places)
      for (int r = 0; r < b_.entries * b_.width; ++r) {
        const int slot = whole(out_["live_sentence"], r / b_.width) * b_.width + r % b_.width;
        out_["row_ids"][r] = out_["ids"][place((p + 1) & 1, slot, p + 1)];
        out_["row_positions"][r] = p + 1;
      }
    out_["position"][0] = p + 1, out_["live"][0] = left;
    out_["progress"][0] = static_cast<double>(static_cast<int64_t>(p + 1) << 32 | left);
  }

 private:
  struct Candidate {
    float value, score;
    int token, parent;
  };
  struct Done {
    float score;
    int length, column;
    bool added;
    Candidate last;
  };
  int64_t slots() const { return b_.sentences * b_.width; }
  int64_t place(int side, int64_t slot, int64_t at) const { return (side * slots() + slot) * b_.places + at; }
  std::vector<int> ids_of(int64_t slot) const {
    std::vector<int> ids;
    for (int i = 0; i <= b_.position; ++i) ids.push_back(whole(in_.at("ids"), place(b_.position & 1, slot, i)));
    return ids;
  }
  bool is_eos(int token) const { return std::count(b_.eos.begin(), b_.eos.end(), token) > 0; }
  float normaliser(int n) const { return number(in_.at("numbers"), kSearchNormalisers + n); }

  float processed(float value, int token, const std::vector<int>& ids, int prompt) const {
    const int length = static_cast<int>(ids.size()), n = b_.ngram;
    bool banned = std::count(b_.singles.begin(), b_.singles.end(), token) > 0;
    if (is_eos(token) && (length < b_.min_length || length - prompt < b_.min_new)) banned = true;
    for (int i = 0; n > 0 && i + n <= length; ++i)
      if (ids[static_cast<size_t>(i + n - 1)] == token && std::equal(ids.end() - (n - 1), ids.end(), ids.begin() + i))
        banned = true;
    for (const auto& word : b_.sequences)
      if (word.back() == token && static_cast<int>(word.size()) - 1 <= length &&
          std::equal(word.begin(), word.end() - 1, ids.end() - static_cast<int64_t>(word.size()) + 1))
        banned = true;
    if (banned) return -kInfinity;
    if (b_.penalty != 1 && std::count(ids.begin(), ids.end(), token))
      return value < 0 ? value * b_.penalty : value / b_.penalty;
    return value;
  }

  std::vector<Candidate> candidates(int64_t row, int64_t slot, int prompt, int max_length) const {
    const std::vector<int> ids = ids_of(slot);
    const auto length = static_cast<int>(ids.size()), kept = std::min(b_.keep, b_.vocabulary);
    int forced = length == 1 ? b_.forced_bos : -1;
    if (length == max_length - 1 && b_.forced_eos >= 0) forced = b_.forced_eos;
    std::vector<Candidate> all;
    if (forced >= 0) {
      all.push_back({0, 0, forced, 0});
      for (int t = 0; static_cast<int>(all.size()) < kept; ++t)
        if (t != forced) all.push_back({-kInfinity, -kInfinity, t, 0});
      return all;
    }
    const float lse = number(in_.at("lse"), row);
    std::vector<int> seen;
    const auto add = [&](float logit, int token) {
      seen.push_back(token);
      const float value = processed(b_.beam ? logit - lse : logit, token, ids, prompt);
      all.push_back({value, b_.beam ? value : logit - lse, token, 0});
    };
    for (int i = 0; i < b_.count; ++i)
      add(number(in_.at("values"), row * b_.count + i), whole(in_.at("columns"), row * b_.count + i));
    if (b_.penalty < 1 && b_.with_logits)
      for (const int token : ids)
        if (!std::count(seen.begin(), seen.end(), token))
          add(number(in_.at("logits"), row * b_.vocabulary + token), token);
    std::sort(all.begin(), all.end(), [](const Candidate& x, const Candidate& y) {
      return x.value != y.value ? x.value > y.value : x.token < y.token;
    });
    all.resize(static_cast<size_t>(kept));
    return all;
  }

  // Returns whether the sentence is over.
  bool one(int entry, int sentence) {
    const int p = b_.position, length = p + 1, k = b_.width, side = p & 1;
    const int64_t base = static_cast<int64_t>(sentence) * k, row = static_cast<int64_t>(entry) * k;
    const int prompt = whole(in_.at("prompt"), sentence), max_length = whole(in_.at("max_length"), sentence);
    const bool active = entry < b_.live;
    std::vector<Candidate> next;
    bool over = false;
    if (active && length >= prompt)
      over = b_.beam ? beams(row, base, prompt, max_length, &next) : single(row, base, prompt, max_length, &next);
    const bool given = active && length < prompt;
    for (int b = 0; b < k; ++b) {
      const bool goes_on = !next.empty() && !over;
      const int64_t from = base + (goes_on ? next[static_cast<size_t>(b)].parent : b);
      const int copied = given ? std::max(length, prompt) : length;
      const auto copy = [&](const char* name, int n) {
        for (int j = 0; j < n; ++j) out_[name][place(side ^ 1, base + b, j)] = in_.at(name)[place(side, from, j)];
      };
      copy("ids", copied), copy("origin", length);
      if (b_.token_scores) copy("token_scores", length);
      if (length >= b_.places) continue;
      if (!given) out_["ids"][place(side ^ 1, base + b, length)] = goes_on ? next[static_cast<size_t>(b)].token : 0;
      out_["origin"][place(side ^ 1, base + b, length)] = static_cast<double>(base + b);
      if (b_.token_scores)
        out_["token_scores"][place(side ^ 1, base + b, length)] = goes_on ? next[static_cast<size_t>(b)].score : 0;
    }
    return over;
  }

  void finish(int64_t base, int64_t parent, const Candidate& c, int column, int prompt) {
    const int length = b_.position + 1, side = b_.position & 1;
    for (int j = 1; j <= length && j < b_.places; ++j) {
      const int64_t to = (j - 1) * slots() + base + column;
      out_["done_ids"][to] = j < length ? in_.at("ids")[place(side, base + parent, j)] : c.token;
      if (b_.token_scores)
        out_["done_token_scores"][to] = j == length   ? c.score
                                        : j >= prompt ? in_.at("token_scores")[place(side, base + parent, j)]
                                                      : 0;
    }
  }

  bool beams(int64_t row, int64_t base, int prompt, int max_length, std::vector<Candidate>* next) {
    const int length = b_.position + 1, k = b_.width;
    const bool begun = length > prompt;
    std::vector<Candidate> pool;
    for (int b = 0; b < k; ++b) {
      const int from = begun ? b : 0;
      int j = 0;
      for (Candidate c : candidates(row + from, base + from, prompt, max_length)) {
        c.value -= b_.diversity * static_cast<float>(j++);
        c.value += number(in_.at("scores"), base + b), c.parent = b;
        pool.push_back(c);
      }
    }
    std::sort(pool.begin(), pool.end(), [](const Candidate& x, const Candidate& y) {
      return x.value != y.value ? x.value > y.value : std::pair(x.parent, x.token) < std::pair(y.parent, y.token);
    });
    pool.resize(std::min(pool.size(), static_cast<size_t>(b_.keep)));
    if (!begun)
      for (Candidate& c : pool) c.parent = 0;
    std::vector<Done> done;
    std::vector<int> free;
    for (int j = 0; j < k; ++j)
      done.push_back({number(in_.at("done_scores"), base + j),
                      whole(in_.at("done_length"), base + j),
                      whole(in_.at("done_column"), base + j),
                      false,
                      {}});
    const float divisor = normaliser(length + 1 - prompt);
    bool all_end = true;
    for (size_t i = 0; i < pool.size(); ++i) {
      const bool ends = length + 1 >= max_length || is_eos(pool[i].token);
      all_end = all_end && ends;
      if (ends && static_cast<int>(i) < k) done.push_back({pool[i].value / divisor, length, -1, true, pool[i]});
      next->push_back(pool[i]);
      if (ends) next->back().value += kWorst;
    }
    std::stable_sort(next->begin(), next->end(), [](const auto& x, const auto& y) { return x.value > y.value; });
    next->resize(static_cast<size_t>(k));
    // Columns of the old ones that go, in their old order.
    std::vector<Done> sorted = done;
    std::stable_sort(sorted.begin(), sorted.end(), [](const Done& x, const Done& y) { return x.score > y.score; });
    sorted.resize(static_cast<size_t>(k));
    const auto none_of = [](const std::vector<Done>& list) {
      return std::none_of(list.begin(), list.end(), [](const Done& d) { return d.length > 0; });
    };
    if (all_end && none_of(sorted)) sorted[0] = {pool[0].value / divisor, length, -1, true, pool[0]};
    for (int j = 0; j < k; ++j) {
      const int column = done[static_cast<size_t>(j)].column;
      if (std::none_of(sorted.begin(), sorted.end(), [&](const Done& d) { return !d.added && d.column == column; }))
        free.push_back(column);
    }
    // The new ones take them in the order of the candidates.
    size_t taken = 0;
    for (const Candidate& c : pool)
      for (Done& d : sorted)
        if (d.added && d.column < 0 && d.last.parent == c.parent && d.last.token == c.token) {
          d.column = free[taken++];
          finish(base, c.parent, c, d.column, prompt);
        }
    bool complete = true, improvable = false;
    const float best = (*next)[0].value / (b_.bound ? normaliser(max_length - prompt) : divisor);
    for (int j = 0; j < k; ++j) {
      const Done& d = sorted[static_cast<size_t>(j)];
      out_["done_scores"][base + j] = d.score, out_["done_length"][base + j] = d.length;
      out_["done_column"][base + j] = d.column;
      complete = complete && d.length > 0;
      improvable = improvable || best > (d.length > 0 ? sorted.back().score : kWorst);
    }
    const bool over = all_end || !improvable || (b_.early == 1 && complete);
    for (int b = 0; b < k && !over; ++b) out_["scores"][base + b] = (*next)[static_cast<size_t>(b)].value;
    return over;
  }

  bool single(int64_t row, int64_t base, int prompt, int max_length, std::vector<Candidate>* next) {
    const int length = b_.position + 1, k = b_.width;
    bool over = true;
    for (int b = 0; b < k; ++b) {
      if (whole(in_.at("ended"), base + b)) {
        next->push_back({0, 0, b_.eos[0], b});
        continue;
      }
      Candidate c;
      if (b_.drawn)
        c = {0, number(in_.at("drawn_scores"), row + b), whole(in_.at("drawn"), row + b), b};
      else
        c = candidates(row, base, prompt, max_length)[0];
      c.parent = b;
      next->push_back(c);
      const float sum = number(in_.at("scores"), base + b) + c.score;
      out_["scores"][base + b] = sum;
      if (length + 1 < max_length && !is_eos(c.token)) {
        over = false;
        continue;
      }
      out_["done_scores"][base + b] = sum / normaliser(length + 1 - prompt), out_["done_length"][base + b] = length;
      out_["ended"][base + b] = 1;
      finish(base, b, c, b, prompt);
    }
    return over;
  }

  const Batch& b_;
  const Arrays& in_;
  Arrays& out_;
};

OpCase make(const std::string& name, const Batch& b) {
  std::mt19937 random(b.seed * 7919 + 17);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto chance = [&](float p) { return static_cast<float>(random() >> 8) * 0x1p-24f < p; };
  const int S = b.sentences, k = b.width, slots = S * k, rows = b.entries * k, P = b.places, length = b.position + 1;
  OpCase c;
  c.name = fmt::format("{}/{}x{}/V{}/best{}of{}/at{}/{}", name, b.entries, k, b.vocabulary, b.keep, b.count, b.position,
                       b.seed);
  c.where = Where::kGpu;
  const auto add = [&](const char* operand, DType dtype, Shape shape, const std::function<double(int64_t)>& value,
                       bool in_place = false) {
    Values values;
    for (int64_t i = 0; i < shape.numel(); ++i) values.push_back(value(i));
    Operand o{operand, dtype, shape, fill_values(values), 0};
    c.inputs.push_back(o);
    if (in_place) c.outputs.push_back({operand, dtype, shape});
  };
  const auto logit = [&]() -> double {
    if (chance(b.never)) return -kInfinity;
    if (chance(b.same)) return below(3) - 4;
    return static_cast<double>(below(4096)) / 256 - 12;
  };
  if (b.drawn) {
    add("drawn", DType::kI32, {rows}, [&](int64_t) { return chance(0.3f) ? b.eos[0] : below(b.vocabulary); });
    add("drawn_scores", DType::kF32, {rows}, [&](int64_t) { return -below(1024) / 128.0; });
  } else {
    Values values, columns;
    for (int r = 0; r < rows; ++r) {
      std::vector<std::pair<double, int>> all;
      for (int t = 0; t < b.vocabulary; ++t) all.emplace_back(-logit(), t);
      if (chance(0.5f)) all[static_cast<size_t>(b.eos[0])].first = 1;  // EOS among the first
      std::sort(all.begin(), all.end());
      for (int i = 0; i < b.count; ++i)
        values.push_back(-all[static_cast<size_t>(i)].first), columns.push_back(all[static_cast<size_t>(i)].second);
    }
    add("values", DType::kF32, {rows, b.count}, [&](int64_t i) { return values[static_cast<size_t>(i)]; });
    add("columns", DType::kI32, {rows, b.count}, [&](int64_t i) { return columns[static_cast<size_t>(i)]; });
    add("lse", DType::kF32, {rows}, [&](int64_t) { return below(512) / 128.0; });
  }
  if (b.with_logits) add("logits", b.logits, {rows, b.vocabulary}, [&](int64_t) { return below(64) / 16.0 - 3; });

  Values settings(kSearchLists, 0.0);
  settings[kSearchEarlyStopping] = b.early, settings[kSearchLongestBound] = b.bound;
  settings[kSearchMinLength] = b.min_length, settings[kSearchMinNew] = b.min_new, settings[kSearchNgram] = b.ngram;
  settings[kSearchForcedBos] = b.forced_bos, settings[kSearchForcedEos] = b.forced_eos, settings[kSearchPad] = b.eos[0];
  settings[kSearchEos] = static_cast<double>(b.eos.size()),
  settings[kSearchSingles] = static_cast<double>(b.singles.size());
  settings[kSearchSequences] = static_cast<double>(b.sequences.size());
  settings.insert(settings.end(), b.eos.begin(), b.eos.end());
  settings.insert(settings.end(), b.singles.begin(), b.singles.end());
  auto begin = static_cast<double>(settings.size() + b.sequences.size() + 1);
  for (const auto& word : b.sequences) settings.push_back(begin), begin += static_cast<double>(word.size());
  settings.push_back(begin);
  for (const auto& word : b.sequences) settings.insert(settings.end(), word.begin(), word.end());
  add("settings", DType::kI32, {static_cast<int64_t>(settings.size())},
      [&](int64_t i) { return settings[static_cast<size_t>(i)]; });
  add("numbers", DType::kF32, {kSearchNormalisers + P + 1}, [&](int64_t i) {
    if (i == kSearchDiversity) return static_cast<double>(b.diversity);
    return i == kSearchPenalty ? b.penalty : 1.0 + 0.25 * static_cast<double>(i - kSearchNormalisers);
  });
  std::vector<int> order(static_cast<size_t>(S));
  for (int i = 0; i < S; ++i) order[static_cast<size_t>(i)] = i;
  std::shuffle(order.begin(), order.end(), random);
  Values prompt, max_length;
  for (int s = 0; s < S; ++s) {
    prompt.push_back(b.shortest_prompt + below(b.longest_prompt - b.shortest_prompt + 1));
    const int least = std::max(length + 1, static_cast<int>(prompt.back()) + 1);
    max_length.push_back(least + below(std::max(1, b.most - least + 1)));
  }
  add(
      "live", DType::kI32, {1}, [&](int64_t) { return b.live; }, true);
  add(
      "live_sentence", DType::kI32, {S}, [&](int64_t i) { return order[static_cast<size_t>(i)]; }, true);
  add(
      "position", DType::kI32, {1}, [&](int64_t) { return b.position; }, true);
  add("prompt", DType::kI32, {S}, [&](int64_t i) { return prompt[static_cast<size_t>(i)]; });
  add("max_length", DType::kI32, {S}, [&](int64_t i) { return max_length[static_cast<size_t>(i)]; });
  const int few = std::min(b.vocabulary, 7);  // so that there are repetitions
  add(
      "ids", DType::kI32, {2, slots, P}, [&](int64_t) { return below(few); }, true);
  add(
      "origin", DType::kI32, {2, slots, P}, [&](int64_t) { return below(slots); }, true);
  if (b.token_scores) {
    add(
        "token_scores", DType::kF32, {2, slots, P}, [&](int64_t) { return -below(256) / 64.0; }, true);
    add(
        "done_token_scores", DType::kF32, {P, slots}, [&](int64_t) { return below(5); }, true);
  }
  add(
      "scores", DType::kF32, {slots},
      [&](int64_t i) {
        const int s = static_cast<int>(i) / k;
        if (b.beam && prompt[static_cast<size_t>(s)] >= length) return i % k == 0 ? 0.0 : double{kWorst};
        return -below(8) / 2.0 - (chance(0.3f) ? below(1024) / 512.0 : 0.0);
      },
      true);
  add(
      "ended", DType::kI32, {slots}, [&](int64_t) { return !b.beam && k > 1 && chance(0.4f) ? 1 : 0; }, true);
  // Sorted, the places without a hypothesis last.
  std::vector<std::array<double, 3>> done;
  for (int s = 0; s < S; ++s) {
    std::vector<double> scores;
    const int finished = b.beam ? below(k + 1) : 0;
    for (int i = 0; i < finished; ++i) scores.push_back(-below(24) / 4.0);
    std::sort(scores.rbegin(), scores.rend());
    std::vector<int> columns(static_cast<size_t>(k));
    for (int i = 0; i < k; ++i) columns[static_cast<size_t>(i)] = i;
    if (b.beam) std::shuffle(columns.begin(), columns.end(), random);
    for (int i = 0; i < k; ++i)
      done.push_back({i < finished ? scores[static_cast<size_t>(i)] : double{kWorst},
                      i < finished ? 1.0 + below(length) : 0.0, static_cast<double>(columns[static_cast<size_t>(i)])});
  }
  add(
      "done_scores", DType::kF32, {slots}, [&](int64_t i) { return done[static_cast<size_t>(i)][0]; }, true);
  add(
      "done_length", DType::kI32, {slots}, [&](int64_t i) { return done[static_cast<size_t>(i)][1]; }, true);
  add(
      "done_column", DType::kI32, {slots}, [&](int64_t i) { return done[static_cast<size_t>(i)][2]; }, true);
  add(
      "done_ids", DType::kI32, {P, slots}, [&](int64_t) { return below(b.vocabulary); }, true);
  add(
      "row_ids", DType::kI32, {rows}, [&](int64_t) { return 3; }, true);
  add(
      "row_positions", DType::kI32, {rows}, [&](int64_t) { return 3; }, true);
  add(
      "scratch", DType::kI32, {2 * S + 2}, [&](int64_t) { return 0; }, true);
  add(
      "progress", DType::kI64, {1}, [&](int64_t) { return 0; }, true);
  for (const Operand& o : c.outputs) c.tolerance[o.name] = {0, 0};
  c.forward_gpu.launches = 1;

  c.forward = [b](Context& context, const Tensors& t) {
    const auto given = [&](const char* name) { return t.count(name) ? t.at(name) : Tensor(); };
    SearchStepArgs a;
    a.values = given("values"), a.columns = given("columns"), a.lse = given("lse"), a.logits = given("logits");
    a.drawn = given("drawn"), a.drawn_scores = given("drawn_scores");
    a.settings = t.at("settings"), a.numbers = t.at("numbers");
    a.vocabulary = b.vocabulary, a.beam = b.beam, a.keep = b.keep;
    SearchState& s = a.state;
    s.width = b.width;
    s.live = t.at("live"), s.live_sentence = t.at("live_sentence"), s.position = t.at("position");
    s.prompt = t.at("prompt"), s.max_length = t.at("max_length"), s.ids = t.at("ids"), s.origin = t.at("origin");
    s.token_scores = given("token_scores"), s.done_token_scores = given("done_token_scores");
    s.scores = t.at("scores"), s.ended = t.at("ended"), s.done_scores = t.at("done_scores");
    s.done_length = t.at("done_length"), s.done_column = t.at("done_column"), s.done_ids = t.at("done_ids");
    s.row_ids = t.at("row_ids"), s.row_positions = t.at("row_positions");
    s.scratch = t.at("scratch"), s.progress = t.at("progress");
    search_step(context, a);
  };
  c.oracle = [b](const Arrays& in, Arrays& out) { Oracle(b, in, out).run(); };
  return c;
}

}  // namespace

std::vector<OpCase> search_step_cases() {
  std::vector<OpCase> cases;
  unsigned seed = 0;
  const auto add = [&](const char* name, Batch b) {
    b.seed = ++seed;
    cases.push_back(make(name, b));
  };
  for (const int width : {2, 3, 4, 5, 8})
    for (const int early : {0, 1, 2}) {
      Batch b;
      b.width = width, b.keep = 2 * width, b.count = 2 * width + early, b.early = early, b.bound = early == 2;
      b.vocabulary = 40 + width;
      for (const int position : {0, 1, 4, 7}) {
        b.position = position, b.token_scores = position == 4;
        add("beam", b);
      }
      for (const int position : {0, 4}) {
        b.position = position, b.diversity = 0.75f;
        add("diverse", b);
      }
      b.position = 7, b.same = 1, b.never = 0.5f;
      add("diverse_ties", b);
      b.diversity = 0;
      add("ties", b);
      b.never = 1;
      add("banned", b);
      b.never = 0.1f, b.most = 0;  // every sentence is at its last token
      add("last", b);
    }
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Batch b;
    b.width = 3, b.keep = 6, b.count = 9, b.vocabulary = 30, b.position = 8, b.most = 11;
    b.logits = dtype, b.with_logits = true, b.penalty = 0.5f;
    add(name_of(dtype), b);
    b.beam = false, b.width = 1, b.keep = 1, b.count = 4;
    add(name_of(dtype), b);
  }
  for (const int width : {1, 3})
    for (const int rule : {0, 1, 2, 3, 4, 5, 6, 7}) {
      Batch b;
      b.beam = width > 1, b.width = width, b.keep = b.beam ? 2 * width : 1, b.vocabulary = 17, b.count = 17;
      b.position = 8, b.most = 10, b.token_scores = true;
      if (rule == 0) b.penalty = 1.5f;
      if (rule == 1) b.ngram = 1;
      if (rule == 2) b.ngram = 2, b.singles = {3, 9};
      if (rule == 3) b.sequences = {{2, 4}, {1, 1, 5}, {0, 3}, {1, 2, 3, 4, 5, 6, 0, 1, 2, 3}}, b.singles = {16};
      if (rule == 4) b.min_length = 12, b.eos = {0, 5};
      if (rule == 5) b.min_new = 8, b.eos = {4};
      if (rule == 6) b.forced_eos = 6, b.most = 11;
      if (rule == 7) b.position = 0, b.shortest_prompt = b.longest_prompt = 1, b.forced_bos = 9;
      add("rules", b);
      b.penalty = 2, b.ngram = 3, b.same = 0.9f;
      add("more_rules", b);
    }
  // Sentences that still read their prefix; few tokens; the last place; many entries, most of them over.
  {
    Batch b;
    b.longest_prompt = 9, b.position = 3, b.places = 16, b.most = 15;
    add("prefixes", b);
    b.beam = false, b.width = 1, b.keep = 1;
    add("prefixes", b);
    Batch few;
    few.width = 4, few.keep = 8, few.vocabulary = 5, few.count = 5;
    add("few_tokens", few);
    few.never = 0.8f, few.position = 0, few.longest_prompt = 1;
    add("few_tokens", few);
    Batch end;
    end.position = 11, end.most = 0, end.places = 12;
    add("last_place", end);
    Batch many;
    many.sentences = 300, many.live = 270, many.entries = 280, many.most = 6;
    add("many", many);
    many.beam = false, many.width = 1, many.keep = 1, many.count = 2;
    add("many", many);
    // One entry, whose block has nobody to wait for; rows of several hundred places.
    for (const int sentences : {1, 3})
      for (const int width : {1, 4, 5}) {
        Batch alone;
        alone.sentences = sentences, alone.live = alone.entries = 1;
        alone.beam = width > 1, alone.width = width, alone.keep = alone.beam ? 2 * width : 1, alone.count = 10;
        add("alone", alone);
        alone.token_scores = true, alone.places = 300, alone.most = 290, alone.position = 170 + 20 * width;
        add("alone_long", alone);
        alone.most = 0;
        add("alone_last", alone);
        alone.live = 0;
        add("alone_padding", alone);
        alone.live = 1, alone.places = 16, alone.longest_prompt = 9, alone.position = 3, alone.most = 15;
        add("alone_prefix", alone);
      }
    Batch tall;
    tall.width = 5, tall.keep = 10, tall.count = 10, tall.places = 301, tall.most = 300, tall.position = 201;
    add("long", tall);
    Batch none;
    none.live = 0;
    add("none_left", none);
  }
  for (const int width : {1, 2, 5}) {
    Batch b;
    b.beam = false, b.drawn = true, b.width = width, b.keep = 1, b.token_scores = width == 2;
    add("drawn", b);
    b.sentences = b.entries = b.live = 9, b.position = 0, b.shortest_prompt = b.longest_prompt = 1;
    add("drawn", b);
  }
  return cases;
}

}  // namespace frit
