#include "frit/infer/generate.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "frit/infer/decoder.h"
#include "frit/infer/gpu_generate.h"
#include "frit/infer/processors.h"
#include "frit/infer/sample.h"
#include "frit/ops/beam_select/beam_select.h"

namespace frit {
namespace {

// A beam that cannot win against a real one: what transformers uses.
constexpr float kWorst = -1.0e9f;
// Logits held at a time: the chunk stays in the third-level cache between the product and the selection.
constexpr int64_t kLogits = int64_t{1} << 22;
constexpr int64_t kMinLogitRows = 96;
constexpr float kBanned = -std::numeric_limits<float>::infinity();

// The continuation of a row by a token.
struct Candidate {
  float value;  // what the search compares: processed logit, log-probability, or a running sum of these
  float log_probability;
  int32_t token;
  int32_t parent;
};

struct Finished {
  float score = kWorst;
  bool finished = false;
  std::vector<int32_t> tokens;
  std::vector<float> token_scores;
};

// One sentence's search. Its hypotheses have places [0, width) in the tables of State, twice: one for reading, one for
// writing.
struct Search {
  int64_t sentence = 0;
  int64_t prompt = 1, max_length = 0, length = 1;
  uint64_t index = 0;
  bool begun = false;          // past the first choice: the hypotheses differ
  int side = 0;                // of the tables
  int64_t row = -1;            // of its first hypothesis in this step
  std::vector<float> scores;   // running sums of the hypotheses
  std::vector<uint8_t> ended;  // sampling: this sample has ended
  std::vector<Finished> done;
  int64_t chosen_row = -1;  // of its first hypothesis among the rows with logits
};

}  // namespace

struct Generator::Impl {
  Impl(ThreadPool& pool, const Transformer& model) : decoder(pool, model) {}

  // Tables of all hypotheses: ids and, for the steps taken, places in the cache and token scores.
  int32_t* ids(const Search& s, int64_t beam, int side) { return id_table.data() + table(s, beam, side); }
  const float** history(const Search& s, int64_t beam, int side) { return history_table.data() + table(s, beam, side); }
  float* token_scores(const Search& s, int64_t beam, int side) { return score_table.data() + table(s, beam, side); }
  int64_t table(const Search& s, int64_t beam, int side) const {
    return ((s.sentence * 2 + side) * width + beam) * longest;
  }
  std::span<const int32_t> ids_of(const Search& s, int64_t beam) {
    return {ids(s, beam, s.side), static_cast<size_t>(s.length)};
  }

  void begin(std::span<const GenerateInput> inputs);
  void step(int64_t position);
  void choose(const Tensor& hidden, std::span<Search* const> choosing);
  void candidates_of(const float* logits, const float* values, const int32_t* columns, int64_t count, float lse,
                     std::vector<Candidate>& out);
  void advance(Search& s);
  void advance_beam(Search& s);
  void advance_single(Search& s);
  void continue_with(Search& s, std::span<const Candidate> next);
  void finish(Search& s, const Candidate& c, float score);
  HypothesisState state_of(const Search& s, int64_t beam) { return {ids_of(s, beam), s.prompt, s.max_length}; }
  bool is_eos(int32_t token) const {
    return std::find(options->eos_ids.begin(), options->eos_ids.end(), token) != options->eos_ids.end();
  }
  bool stops(const Search& s, int32_t token) const { return s.length + 1 >= s.max_length || is_eos(token); }

  StepDecoder decoder;
  const GenerateOptions* options = nullptr;
  int64_t width = 1;    // hypotheses of a sentence
  int64_t longest = 0;  // ids of a hypothesis at most
  int64_t keep = 1;     // candidates of a row
  std::vector<Search> searches;
  std::vector<Search*> active;
  std::vector<Processors> processors;  // one a worker
  std::vector<Sampler> samplers;
  std::vector<int32_t> id_table;
  std::vector<const float*> history_table;
  std::vector<float> score_table;
  std::vector<DecoderRow> rows;
  std::vector<std::vector<Candidate>> row_candidates;  // of rows with logits
  std::vector<Candidate> pool, next;
  std::vector<int64_t> ends;  // candidates of `pool` that end
  Scratch logit_scratch, gathered, sample_rows;
  std::vector<float> values, lse;
  std::vector<int32_t> columns;
  std::vector<Search*> choosing;
  struct Choice {
    Search* search;
    int64_t beam;
  };
  std::vector<Choice> choices;  // whose logits a row of the chunk is
};

const char* name_of(GeneratorOptions::Products products) {
  switch (products) {
    case GeneratorOptions::Products::kAuto:
      return "auto";
    case GeneratorOptions::Products::kRows:
      return "rows";
    case GeneratorOptions::Products::kLibrary:
      return "library";
  }
  return "";
}

GeneratorOptions::Products parse_products(std::string_view name) {
  using Products = GeneratorOptions::Products;
  for (const Products p : {Products::kAuto, Products::kRows, Products::kLibrary})
    if (name == name_of(p)) return p;
  fail("[generate] products are {}, expected auto, rows or library", name);
}

Generator::Generator(Context& context, const Transformer& model, const GeneratorOptions& how) : model_(model) {
  if (context.on_gpu()) {
    gpu_ = std::make_unique<GpuGenerator>(context, model, how);
    return;
  }
  FRIT_CHECK(!model.workspace().device(), "[generate] the model lies on a GPU, but the context has none");
  impl_ = std::make_unique<Impl>(context.pool(), model);
}
Generator::~Generator() = default;

void Generator::refresh() {
  if (gpu_) return gpu_->refresh();
  impl_->decoder.refresh();
}

int64_t Generator::tune(Tuning& tuning) {
  return gpu_ ? gpu_->tune(tuning) : 0;
}

const GenerateReport& Generator::report() const {
  return gpu_ ? gpu_->report() : no_report_;
}

void Generator::Impl::begin(std::span<const GenerateInput> inputs) {
  std::vector<std::span<const int32_t>> sources;
  for (const GenerateInput& input : inputs) sources.push_back(input.source);
  decoder.begin(sources, width);
  searches.assign(inputs.size(), {});
  active.clear();
  for (size_t i = 0; i < inputs.size(); ++i) {
    Search& s = searches[i];
    s.sentence = static_cast<int64_t>(i), s.index = inputs[i].index;
    s.prompt = 1 + static_cast<int64_t>(inputs[i].prefix.size());
    s.length = s.prompt;
    s.scores.assign(static_cast<size_t>(width), 0.0f);
    if (!options->sampling) std::fill(s.scores.begin() + 1, s.scores.end(), kWorst);
    s.ended.assign(static_cast<size_t>(width), 0);
    s.done.resize(static_cast<size_t>(width));
    int32_t* to = ids(s, 0, 0);
    to[0] = options->start_id;
    std::copy(inputs[i].prefix.begin(), inputs[i].prefix.end(), to + 1);
    active.push_back(&s);
  }
}

// The best `keep` candidates of a row after processors, best first. count of values and columns are the best raw
// logits; lse makes them log-probabilities.
void Generator::Impl::candidates_of(const float* logits, const float* values_in, const int32_t* columns_in,
                                    int64_t count, float row_lse, std::vector<Candidate>& out) {
  const Processors& p = processors[0];
  const bool beam = options->beam > 1;
  out.clear();
  if (p.forced() >= 0) {
    out.push_back({0, 0, p.forced(), 0});
    for (int32_t token = 0; static_cast<int64_t>(out.size()) < std::min(keep, decoder.vocabulary()); ++token)
      if (token != p.forced()) out.push_back({kBanned, kBanned, token, 0});
    return;
  }
  const auto add = [&](float logit, int32_t token) {
    const float value = p.apply(beam ? logit - row_lse : logit, token);
    out.push_back({value, beam ? value : logit - row_lse, token, 0});
  };
  for (int64_t i = 0; i < count; ++i) add(values_in[i], columns_in[i]);
  for (const int32_t token : p.boosted())
    if (std::find(columns_in, columns_in + count, token) == columns_in + count) add(logits[token], token);
  std::sort(out.begin(), out.end(), [](const Candidate& a, const Candidate& b) {
    return a.value != b.value ? a.value > b.value : a.token < b.token;
  });
  if (static_cast<int64_t>(out.size()) > keep) out.resize(static_cast<size_t>(keep));
}

// Logits of all hypotheses that choose a token now, in chunks of rows, and their candidates.
void Generator::Impl::choose(const Tensor& hidden, std::span<Search* const> who) {
  const int64_t V = decoder.vocabulary(), H = decoder.width();
  choices.clear();
  int64_t count = keep;
  for (Search* s : who) {
    s->chosen_row = static_cast<int64_t>(choices.size());
    const int64_t n = s->begun ? width : 1;
    for (int64_t b = 0; b < n; ++b)
      if (!s->ended[static_cast<size_t>(b)]) choices.push_back({s, b});
    count = std::max(count, keep + processors[0].touched(s->length));
  }
  const int64_t R = static_cast<int64_t>(choices.size());
  count = std::min(count, V);
  Tensor input = hidden;
  if (R != hidden.dim(0)) {  // others still read their prefix
    float* to = gathered.reserve(R * H);
    for (size_t i = 0; i < who.size(); ++i) {
      const int64_t first = who[i]->chosen_row, last = i + 1 < who.size() ? who[i + 1]->chosen_row : R;
      std::memcpy(to + first * H, hidden.data<float>() + who[i]->row * H,
                  static_cast<size_t>((last - first) * H) * sizeof(float));
    }
    input = Tensor(to, DType::kF32, {R, H});
  }
  if (static_cast<int64_t>(row_candidates.size()) < R) row_candidates.resize(static_cast<size_t>(R));
  const int64_t chunk = std::min(R, std::max(kMinLogitRows, kLogits / V));
  float* logits = logit_scratch.reserve(chunk * V);
  values.resize(static_cast<size_t>(chunk * count)), columns.resize(static_cast<size_t>(chunk * count));
  lse.resize(static_cast<size_t>(chunk));
  if (options->sampling) sample_rows.reserve(decoder.context().pool().threads() * V);
  for (int64_t begin = 0; begin < R; begin += chunk) {
    const int64_t n = std::min(chunk, R - begin);
    const Tensor rows_logits(logits, DType::kF32, {n, V});
    decoder.logits(input.rows(begin, begin + n), rows_logits);
    const int64_t selected = options->sampling ? 1 : count;
    beam_select(decoder.context(), rows_logits, selected, Tensor(values.data(), DType::kF32, {n, selected}),
                Tensor(columns.data(), DType::kI32, {n, selected}), Tensor(lse.data(), DType::kF32, {n}), {});
    if (options->sampling) {
      const SampleOptions how{options->temperature, options->top_k, options->top_p};
      decoder.context().pool().run(n, [&](int64_t r, int worker) {
        const Choice& choice = choices[static_cast<size_t>(begin + r)];
        const Search& s = *choice.search;
        Processors& p = processors[static_cast<size_t>(worker)];
        float* row = sample_rows.data() + worker * V;
        std::copy(logits + r * V, logits + (r + 1) * V, row);
        p.look_at(state_of(s, choice.beam));
        p.apply_to_row(row);
        std::vector<Candidate>& out = row_candidates[static_cast<size_t>(begin + r)];
        out.clear();
        // All samples of a sentence draw their first token from one row.
        for (int64_t b = choice.beam; b < (s.begun ? choice.beam + 1 : width); ++b) {
          const double u =
              sampling_uniform(options->seed, s.index, static_cast<uint32_t>(b), static_cast<uint32_t>(s.length));
          const int32_t token = samplers[static_cast<size_t>(worker)].draw({row, static_cast<size_t>(V)}, how, u);
          const float lp = p.forced() >= 0 ? 0.0f : logits[r * V + token] - lse[static_cast<size_t>(r)];
          out.push_back({row[token], lp, token, static_cast<int32_t>(s.begun ? b : 0)});
        }
      });
      continue;
    }
    for (int64_t r = 0; r < n; ++r) {
      const Choice& choice = choices[static_cast<size_t>(begin + r)];
      processors[0].look_at(state_of(*choice.search, choice.beam));
      candidates_of(logits + r * V, values.data() + r * count, columns.data() + r * count, count,
                    lse[static_cast<size_t>(r)], row_candidates[static_cast<size_t>(begin + r)]);
    }
  }
}

// Hypothesis b goes on as next[b] says.
void Generator::Impl::continue_with(Search& s, std::span<const Candidate> chosen) {
  bool in_place = s.begun || chosen.size() == 1;
  for (size_t b = 0; b < chosen.size(); ++b) in_place = in_place && chosen[b].parent == static_cast<int32_t>(b);
  const int side = in_place ? s.side : 1 - s.side;
  for (size_t b = 0; b < chosen.size(); ++b) {
    const int64_t to = static_cast<int64_t>(b), from = chosen[b].parent, n = s.length;
    if (!in_place) {
      std::copy_n(ids(s, from, s.side), n, ids(s, to, side));
      std::copy_n(history(s, from, s.side), n, history(s, to, side));
      if (options->token_scores) std::copy_n(token_scores(s, from, s.side), n, token_scores(s, to, side));
    }
    ids(s, to, side)[n] = chosen[b].token;
    if (options->token_scores) token_scores(s, to, side)[n] = chosen[b].log_probability;
  }
  s.side = side;
  s.begun = true;
}

// Puts parent + token among the finished hypotheses.
void Generator::Impl::finish(Search& s, const Candidate& c, float score) {
  Finished f;
  f.score = score, f.finished = true;
  const int32_t* from = ids(s, c.parent, s.side);
  f.tokens.assign(from + 1, from + s.length);
  f.tokens.push_back(c.token);
  if (options->token_scores) {
    const float* scores = token_scores(s, c.parent, s.side);
    f.token_scores.assign(scores + s.prompt, scores + s.length);
    f.token_scores.push_back(c.log_probability);
  }
  s.done.push_back(std::move(f));
}

// One step of transformers' beam search for one sentence; sets length to 0 when it has ended.
void Generator::Impl::advance_beam(Search& s) {
  const int64_t k = width, V = decoder.vocabulary();
  const auto diversity = static_cast<float>(options->diversity);
  pool.clear();
  for (int64_t b = 0; b < k; ++b) {
    // At the first choice all beams are one; the others' sums keep them from being chosen twice.
    const auto& row = row_candidates[static_cast<size_t>(s.chosen_row + (s.begun ? b : 0))];
    for (size_t j = 0; j < row.size(); ++j) {
      Candidate c = row[j];
      c.value -= diversity * static_cast<float>(j);
      c.value += s.scores[static_cast<size_t>(b)];
      c.parent = static_cast<int32_t>(b);
      pool.push_back(c);
    }
  }
  const size_t kept = std::min(pool.size(), static_cast<size_t>(keep));
  std::partial_sort(pool.begin(), pool.begin() + static_cast<int64_t>(kept), pool.end(),
                    [V](const Candidate& a, const Candidate& b) {
                      return a.value != b.value ? a.value > b.value : a.parent * V + a.token < b.parent * V + b.token;
                    });
  pool.resize(kept);
  if (!s.begun)
    for (Candidate& c : pool) c.parent = 0;
  const int64_t generated = s.length + 1 - s.prompt;
  const float divisor = static_cast<float>(options->normaliser(generated));
  bool all_end = true;
  next.clear();
  for (size_t i = 0; i < pool.size(); ++i) {
    const bool ends = stops(s, pool[i].token);
    all_end = all_end && ends;
    if (ends && i < static_cast<size_t>(k)) finish(s, pool[i], pool[i].value / divisor);
    next.push_back(pool[i]);
    if (ends) next.back().value += kWorst;
  }
  const auto better = [](const auto& a, const auto& b) { return a.value > b.value; };
  std::stable_sort(next.begin(), next.end(), better);
  next.resize(std::min(next.size(), static_cast<size_t>(k)));
  std::stable_sort(s.done.begin(), s.done.end(),
                   [](const Finished& a, const Finished& b) { return a.score > b.score; });
  s.done.resize(static_cast<size_t>(k));
  bool over = all_end;
  if (all_end && std::none_of(s.done.begin(), s.done.end(), [](const Finished& f) { return f.finished; })) {
    finish(s, pool[0], pool[0].value / divisor);  // everything was banned: what is left is better than nothing
    std::swap(s.done.front(), s.done.back());
    s.done.pop_back();
  }
  if (!over) {
    const bool complete = std::all_of(s.done.begin(), s.done.end(), [](const Finished& f) { return f.finished; });
    const bool bound = options->early_stopping == EarlyStopping::kNever && options->alpha > 0 &&
                       options->penalty != LengthPenalty::kNone;
    const int64_t length = bound ? s.max_length - s.prompt : generated;
    const float best = next[0].value / static_cast<float>(options->normaliser(length));
    float worst = s.done.back().score;  // sorted
    bool improvable = false;
    for (const Finished& f : s.done) improvable = improvable || best > (f.finished ? worst : kWorst);
    over = !improvable || (options->early_stopping == EarlyStopping::kTrue && complete);
  }
  if (over) {
    s.length = 0;
    return;
  }
  for (int64_t b = 0; b < k; ++b) s.scores[static_cast<size_t>(b)] = next[static_cast<size_t>(b)].value;
  continue_with(s, next);
  ++s.length;
}

// Greedy and sampling: every hypothesis goes its own way.
void Generator::Impl::advance_single(Search& s) {
  const float divisor = static_cast<float>(options->normaliser(s.length + 1 - s.prompt));
  next.clear();
  int64_t row = s.chosen_row;
  for (int64_t b = 0; b < width; ++b) {
    if (s.ended[static_cast<size_t>(b)]) {
      next.push_back({0, 0, options->eos_ids[0], static_cast<int32_t>(s.begun ? b : 0)});
      continue;
    }
    const auto& candidates = row_candidates[static_cast<size_t>(row)];
    Candidate c = candidates[options->sampling && !s.begun ? static_cast<size_t>(b) : 0];
    c.parent = static_cast<int32_t>(s.begun ? b : 0);
    if (s.begun) ++row;
    next.push_back(c);
  }
  bool all = true;
  for (int64_t b = 0; b < width; ++b) {
    const size_t i = static_cast<size_t>(b);
    if (s.ended[i]) continue;
    s.scores[i] += next[i].log_probability;
    if (!stops(s, next[i].token)) {
      all = false;
      continue;
    }
    finish(s, next[i], s.scores[i] / divisor);
    std::swap(s.done[i], s.done.back());
    s.done.pop_back();
    s.ended[i] = 1;
  }
  if (all) {
    s.length = 0;
    return;
  }
  continue_with(s, next);
  ++s.length;
}

void Generator::Impl::step(int64_t position) {
  rows.clear(), choosing.clear();
  for (Search* s : active) {
    s->row = static_cast<int64_t>(rows.size());
    const int64_t n = s->begun ? width : 1;
    for (int64_t b = 0; b < n; ++b)
      if (!s->ended[static_cast<size_t>(b)])
        rows.push_back({s->sentence, b, ids(*s, b, s->side)[position], history(*s, b, s->side)});
    if (position == s->length - 1) choosing.push_back(s);
  }
  const Tensor hidden = decoder.step(rows, position);
  if (choosing.empty()) return;
  choose(hidden, choosing);
  for (Search* s : choosing) options->beam > 1 ? advance_beam(*s) : advance_single(*s);
  std::erase_if(active, [](const Search* s) { return s->length == 0; });
}

std::vector<int64_t> Generator::check(std::span<const GenerateInput> inputs, const GenerateOptions& options) const {
  const TransformerConfig& c = config();
  options.validate(c);
  // As many ids as there are positions to read them, and one more that is never read.
  const int64_t most = options.max_length > 0 ? options.max_length : c.max_positions + 1;
  std::vector<int64_t> longest;
  for (const GenerateInput& input : inputs) {
    const int64_t prompt = 1 + static_cast<int64_t>(input.prefix.size());
    longest.push_back(options.max_new_tokens > 0 ? std::min(most, prompt + options.max_new_tokens) : most);
    FRIT_CHECK(!input.source.empty(), "[generate] a source without tokens, expected at least EOS");
    FRIT_CHECK(static_cast<int64_t>(input.source.size()) <= c.max_positions,
               "[generate] a source of {} tokens, but the model has {} positions", input.source.size(),
               c.max_positions);
    for (const int32_t id : input.source)
      FRIT_CHECK(id >= 0 && id < c.source_vocab, "[generate] source id {}, expected one below {}", id, c.source_vocab);
    for (const int32_t id : input.prefix)
      FRIT_CHECK(id >= 0 && id < c.target_vocab, "[generate] prefix id {}, expected one below {}", id, c.target_vocab);
    FRIT_CHECK(prompt < longest.back(), "[generate] a prefix of {} tokens leaves no room below the maximum length {}",
               input.prefix.size(), longest.back());
  }
  return longest;
}

void Generator::prepare(std::span<const std::vector<GenerateInput>> batches, const GenerateOptions& options) {
  std::vector<GpuGenerator::Batch> checked;
  for (const std::vector<GenerateInput>& batch : batches)
    if (!batch.empty()) checked.push_back({batch, check(batch, options)});
  if (gpu_) gpu_->prepare(checked, options);
}

std::map<std::string, double> Generator::time_parts(std::span<const GenerateInput> inputs,
                                                    const GenerateOptions& options, int64_t position, int replays) {
  if (!gpu_) fail("[generate] parts are timed on a GPU");
  return gpu_->time_parts(inputs, check(inputs, options), options, position, replays);
}

std::vector<std::vector<Hypothesis>> Generator::generate(std::span<const GenerateInput> inputs,
                                                         const GenerateOptions& options) {
  const std::vector<int64_t> longest = check(inputs, options);
  if (inputs.empty()) return {};
  if (gpu_) return gpu_->generate(inputs, longest, options);
  const TransformerConfig& c = config();
  Impl& g = *impl_;
  g.longest = *std::max_element(longest.begin(), longest.end());
  g.options = &options;
  g.width = options.sampling ? options.nbest : options.beam;
  const int64_t ends = std::max<int64_t>(2, 1 + static_cast<int64_t>(options.eos_ids.size()));
  g.keep = options.beam > 1 ? ends * options.beam : 1;
  const size_t table = inputs.size() * 2 * static_cast<size_t>(g.width * g.longest);
  if (g.id_table.size() < table) g.id_table.resize(table), g.history_table.resize(table);
  if (options.token_scores && g.score_table.size() < table) g.score_table.resize(table);
  const size_t workers = options.sampling ? static_cast<size_t>(g.decoder.context().pool().threads()) : 1;
  g.processors.clear();
  for (size_t i = 0; i < workers; ++i) g.processors.emplace_back(options, c.target_vocab);
  g.samplers.resize(workers);
  g.begin(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) g.searches[i].max_length = longest[i];
  for (int64_t position = 0; !g.active.empty(); ++position) g.step(position);

  std::vector<std::vector<Hypothesis>> results(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<Finished>& done = g.searches[i].done;
    if (options.sampling)
      std::stable_sort(done.begin(), done.end(),
                       [](const Finished& a, const Finished& b) { return a.score > b.score; });
    for (Finished& f : done) {
      if (!f.finished || static_cast<int64_t>(results[i].size()) == options.nbest) continue;
      results[i].push_back({std::move(f.tokens), f.score, std::move(f.token_scores)});
    }
  }
  g.searches.clear();
  g.options = nullptr;
  return results;
}

}  // namespace frit
