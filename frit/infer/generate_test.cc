// Greedy and beam search against transformers' generate() (tests/goldens), independence of the batch, and errors.
#include "frit/infer/generate.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "frit/core/philox.h"
#include "frit/infer/translator.h"

namespace frit {
namespace {

using Json = nlohmann::json;
using Lists = std::vector<std::vector<Hypothesis>>;

std::string golden(const std::string& name) {
  const char* root = std::getenv("FRIT_SOURCE_DIR");
  return std::string(root ? root : ".") + "/tests/goldens/" + name;
}

struct Model {
  explicit Model(const std::string& directory, int threads = 2)
      : pool(threads),
        context(pool, memory),
        transformer(Transformer::load(directory, {})),
        generator(context, *transformer) {}
  Model(const TransformerConfig& config, uint32_t seed, int threads = 2)
      : pool(threads),
        context(pool, memory),
        transformer(std::make_unique<Transformer>(config, Transformer::Options{})) {
    transformer->initialise(seed);
    generator.emplace(context, *transformer);
  }
  ThreadPool pool;
  Memory memory;
  Context context;
  std::unique_ptr<Transformer> transformer;
  struct Holder {
    Holder() = default;
    Holder(Context& c, const Transformer& t) { emplace(c, t); }
    void emplace(Context& c, const Transformer& t) { g = std::make_unique<Generator>(c, t); }
    Generator* operator->() { return g.get(); }
    Generator& operator*() { return *g; }
    std::unique_ptr<Generator> g;
  } generator;
};

GenerateOptions options_of(const Json& p, const Json& file) {
  GenerateOptions o;
  o.beam = p["num_beams"], o.nbest = p["num_return_sequences"];
  o.alpha = p["length_penalty"];
  const Json& early = p["early_stopping"];
  o.early_stopping = early == "never" ? EarlyStopping::kNever
                     : early == true  ? EarlyStopping::kTrue
                                      : EarlyStopping::kFalse;
  o.max_length = p["max_length"], o.min_length = p["min_length"];
  o.repetition_penalty = p["repetition_penalty"], o.no_repeat_ngram = p["no_repeat_ngram_size"];
  if (!p["bad_words_ids"].is_null()) o.bad_words = p["bad_words_ids"].get<std::vector<std::vector<int32_t>>>();
  if (!p["forced_eos_token_id"].is_null()) o.forced_eos_id = p["forced_eos_token_id"];
  o.start_id = file["decoder_start_token_id"];
  o.eos_ids = {file["eos_token_id"].get<int32_t>()};
  return o;
}

// The directory, and whether a GPU decodes (the simulator where there is none).
class Goldens : public testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(Goldens, TokensAndScoresOfTransformers) {
  const auto [name, on_gpu] = GetParam();
  const std::string directory = golden(name);
  std::ifstream in(directory + "/generate.json");
  ASSERT_TRUE(in) << directory;
  const Json file = Json::parse(in);
  const std::unique_ptr<Gpu> gpu = on_gpu ? make_gpu() : nullptr;
  ThreadPool pool(2);
  Memory memory(gpu.get());
  Context context(pool, memory, gpu.get());
  const auto transformer = Transformer::load(directory, {.device = gpu.get()});
  Generator generator(context, *transformer, {.products = GeneratorOptions::Products::kLibrary});
  auto sources = file["sources"].get<std::vector<std::vector<int32_t>>>();
  if (on_gpu && !built_with_cuda()) sources.resize(2);  // the simulator is slow
  int64_t compared = 0;
  for (const Json& c : file["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>());
    const GenerateOptions options = options_of(c["params"], file);
    const auto prefix = c["params"]["prefix"].get<std::vector<int32_t>>();
    std::vector<GenerateInput> inputs;
    for (size_t i = 0; i < sources.size(); ++i) inputs.push_back({sources[i], prefix, i});
    const Lists ours = generator.generate(inputs, options);
    ASSERT_EQ(ours.size(), sources.size());
    for (size_t i = 0; i < sources.size(); ++i) {
      const Json& theirs = c["outputs"][i];
      if (theirs.is_null()) continue;
      ASSERT_EQ(ours[i].size(), theirs.size()) << "sentence " << i;
      for (size_t h = 0; h < theirs.size(); ++h) {
        ++compared;
        ASSERT_EQ(ours[i][h].tokens, theirs[h]["tokens"].get<std::vector<int32_t>>())
            << "sentence " << i << ", hypothesis " << h;
        if (theirs[h]["score"].is_null()) continue;
        const double score = theirs[h]["score"];
        EXPECT_NEAR(ours[i][h].score, score, 1e-4 * std::max(1.0, std::abs(score)))
            << "sentence " << i << ", hypothesis " << h;
      }
    }
  }
  EXPECT_GE(compared, static_cast<int64_t>(8 * sources.size()));
}
INSTANTIATE_TEST_SUITE_P(Transformers, Goldens,
                         testing::Combine(testing::Values("marian_tiny", "marian_separate", "marian_uneven",
                                                          "fairseq_fsmt", "fairseq_args"),
                                          testing::Bool()));

TransformerConfig small_config() {
  TransformerConfig c;
  c.encoder_layers = c.decoder_layers = 2;
  c.d_model = 48;
  c.encoder_heads = c.decoder_heads = 4;
  c.encoder_ffn_dim = c.decoder_ffn_dim = 80;
  c.source_vocab = c.target_vocab = 307;
  c.max_positions = 64;
  c.pad_id = c.start_id = 306;
  c.eos_id = 0;
  return c;
}

GenerateOptions small_options() {
  GenerateOptions o;
  o.start_id = 306, o.eos_ids = {0}, o.bad_words = {{306}};
  o.max_new_tokens = 24;
  return o;
}

std::vector<std::vector<int32_t>> random_sources(int64_t count, int64_t vocabulary, int64_t longest, uint32_t seed) {
  std::vector<std::vector<int32_t>> sources;
  for (uint32_t s = 0; s < count; ++s) {
    const uint32_t length = philox({seed, 0}, s, 0, 0, 0).v[0] % static_cast<uint32_t>(longest);
    sources.emplace_back();
    for (uint32_t i = 0; i < length; ++i)
      sources.back().push_back(
          1 + static_cast<int32_t>(philox({seed, 1}, s, i, 0, 0).v[0] % static_cast<uint32_t>(vocabulary - 2)));
    sources.back().push_back(0);
  }
  return sources;
}

void expect_same_bits(const std::vector<Hypothesis>& a, const std::vector<Hypothesis>& b, const std::string& where) {
  ASSERT_EQ(a.size(), b.size()) << where;
  for (size_t h = 0; h < a.size(); ++h) {
    EXPECT_EQ(a[h].tokens, b[h].tokens) << where << ", hypothesis " << h;
    EXPECT_EQ(std::bit_cast<uint32_t>(a[h].score), std::bit_cast<uint32_t>(b[h].score))
        << where << ", hypothesis " << h;
    ASSERT_EQ(a[h].token_scores.size(), b[h].token_scores.size());
    for (size_t t = 0; t < a[h].token_scores.size(); ++t)
      EXPECT_EQ(std::bit_cast<uint32_t>(a[h].token_scores[t]), std::bit_cast<uint32_t>(b[h].token_scores[t])) << where;
  }
}

// The same sentence at the first and the last place of batches of 1, 7 and 128.
void check_independence(Model& model, GenerateOptions options, const std::vector<int32_t>& prefix) {
  options.token_scores = true;
  const auto sources = random_sources(130, 307, 40, 5);
  for (const size_t subject : {size_t{128}, size_t{129}}) {
    const GenerateInput input{sources[subject], prefix, subject};
    const auto alone = model.generator->generate(std::span(&input, 1), options)[0];
    ASSERT_FALSE(alone.empty());
    for (const size_t count : {size_t{7}, size_t{128}})
      for (const size_t place : {size_t{0}, count - 1}) {
        std::vector<GenerateInput> inputs;
        for (size_t i = 0; i < count; ++i)
          inputs.push_back(
              i == place ? input
                         : GenerateInput{sources[i],
                                         i % 3 ? std::span<const int32_t>() : std::span<const int32_t>(prefix), i});
        expect_same_bits(model.generator->generate(inputs, options)[place], alone,
                         fmt::format("place {} of {}", place, count));
      }
  }
}

TEST(Generate, GreedyDoesNotDependOnTheBatch) {
  Model model(small_config(), 3);
  check_independence(model, small_options(), {});
}
TEST(Generate, BeamDoesNotDependOnTheBatch) {
  Model model(small_config(), 3);
  GenerateOptions o = small_options();
  o.beam = 4, o.nbest = 4;
  check_independence(model, o, {});
  o.beam = 5, o.nbest = 2, o.repetition_penalty = 1.2, o.no_repeat_ngram = 3, o.early_stopping = EarlyStopping::kTrue;
  check_independence(model, o, {7, 9});
}
TEST(Generate, SamplingDoesNotDependOnTheBatch) {
  Model model(small_config(), 3);
  GenerateOptions o = small_options();
  o.sampling = true, o.nbest = 3, o.top_k = 40, o.top_p = 0.9;
  check_independence(model, o, {});
}

TEST(Generate, DoesNotDependOnThreads) {
  Model one(small_config(), 3, 1), three(small_config(), 3, 3);
  GenerateOptions o = small_options();
  o.beam = 4, o.nbest = 4, o.token_scores = true;
  const auto sources = random_sources(20, 307, 30, 6);
  std::vector<GenerateInput> inputs;
  for (const auto& s : sources) inputs.push_back({s, {}, 0});
  const Lists a = one.generator->generate(inputs, o), b = three.generator->generate(inputs, o);
  for (size_t i = 0; i < inputs.size(); ++i) expect_same_bits(a[i], b[i], fmt::format("sentence {}", i));
}

// Scores from the model itself: a hypothesis' log-probability given by the training forward.
TEST(Generate, ScoresAreThoseOfTheModel) {
  for (const bool pre_norm : {false, true}) {
    TransformerConfig c = small_config();
    c.pre_norm = pre_norm;
    c.activation = Activation::kGelu;
    Model model(c, 4);
    GenerateOptions o = small_options();
    o.beam = 4, o.token_scores = true;
    o.penalty = LengthPenalty::kGnmt, o.alpha = 0.6;
    for (const auto& source : random_sources(5, 307, 30, 7)) {
      const GenerateInput input{source, {}, 0};
      const Hypothesis h = model.generator->generate(std::span(&input, 1), o)[0][0];
      std::vector<int32_t> target = {o.start_id};
      target.insert(target.end(), h.tokens.begin(), h.tokens.end() - 1);
      const std::vector<int32_t> source_offsets = {0, static_cast<int32_t>(source.size())};
      const std::vector<int32_t> target_offsets = {0, static_cast<int32_t>(target.size())};
      struct {
        std::vector<int32_t> source_ids, source_offsets, target_ids, labels, target_offsets;
      } batch{source, source_offsets, target, h.tokens, target_offsets};
      const Buffer logits = model.transformer->logits(model.context, BatchView::of(batch));
      double sum = 0;
      for (size_t t = 0; t < h.tokens.size(); ++t) {
        const float* row = logits->data<float>() + static_cast<int64_t>(t) * c.target_vocab;
        double total = 0;
        for (int64_t v = 0; v < c.target_vocab; ++v) total += std::exp(static_cast<double>(row[v]));
        const double lp = row[h.tokens[t]] - std::log(total);
        EXPECT_NEAR(h.token_scores[t], lp, 1e-4);
        sum += lp;
      }
      EXPECT_NEAR(h.score, sum / std::pow((5.0 + static_cast<double>(h.tokens.size())) / 6.0, 0.6), 1e-4);
    }
  }
}

// Diverse beam search against its formula: every continuation of every beam in doubles, scores from the training
// forward.
TEST(Generate, DiverseBeamsOfTheFormula) {
  TransformerConfig c = small_config();
  c.source_vocab = c.target_vocab = 29, c.pad_id = c.start_id = 28;
  Model model(c, 5);
  struct Beam {
    std::vector<int32_t> ids;
    double sum = 0;
  };
  constexpr int kLength = 5;
  const auto log_probabilities = [&](const std::vector<int32_t>& source, const std::vector<int32_t>& ids) {
    const std::vector<int32_t> source_offsets = {0, static_cast<int32_t>(source.size())};
    const std::vector<int32_t> target_offsets = {0, static_cast<int32_t>(ids.size())};
    struct {
      std::vector<int32_t> source_ids, source_offsets, target_ids, labels, target_offsets;
    } batch{source, source_offsets, ids, ids, target_offsets};
    const Buffer logits = model.transformer->logits(model.context, BatchView::of(batch));
    const float* row = logits->data<float>() + static_cast<int64_t>(ids.size() - 1) * c.target_vocab;
    std::vector<double> values(row, row + c.target_vocab);
    double total = 0;
    for (const double v : values) total += std::exp(v);
    for (double& v : values) v -= std::log(total);
    values[0] = values[28] = -std::numeric_limits<double>::infinity();  // EOS, which is too early, and what is banned
    return values;
  };
  int changed = 0;
  for (const auto& source : random_sources(2, 29, 12, 12))
    for (const int64_t beam : {2, 3, 5})
      for (const double diversity : {0.0, 0.3, 1.5}) {
        SCOPED_TRACE(fmt::format("beam {}, diversity {}", beam, diversity));
        std::vector<Beam> beams = {{{28}, 0}};
        for (int step = 0; step < kLength; ++step) {
          std::vector<Beam> all;
          for (const Beam& b : beams) {
            const std::vector<double> lp = log_probabilities(source, b.ids);
            std::vector<int32_t> order(lp.size());
            for (size_t t = 0; t < order.size(); ++t) order[t] = static_cast<int32_t>(t);
            std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
              return lp[static_cast<size_t>(x)] > lp[static_cast<size_t>(y)];
            });
            for (size_t j = 0; j < order.size(); ++j) {
              Beam next = b;
              next.ids.push_back(order[j]);
              next.sum += lp[static_cast<size_t>(order[j])] - diversity * static_cast<double>(j);
              all.push_back(std::move(next));
            }
          }
          std::stable_sort(all.begin(), all.end(), [](const Beam& x, const Beam& y) { return x.sum > y.sum; });
          all.resize(static_cast<size_t>(beam));
          beams = std::move(all);
        }
        GenerateOptions o = small_options();
        o.start_id = 28, o.bad_words = {{28}}, o.beam = o.nbest = beam, o.diversity = diversity;
        o.min_new_tokens = o.max_new_tokens = kLength;
        const GenerateInput input{source, {}, 0};
        const auto found = model.generator->generate(std::span(&input, 1), o)[0];
        ASSERT_EQ(found.size(), beams.size());
        for (size_t h = 0; h < found.size(); ++h) {
          EXPECT_EQ(found[h].tokens, std::vector<int32_t>(beams[h].ids.begin() + 1, beams[h].ids.end())) << h;
          EXPECT_NEAR(found[h].score, beams[h].sum / kLength, 1e-4) << h;
        }
        if (diversity > 0) {
          o.diversity = 0;
          const auto usual = model.generator->generate(std::span(&input, 1), o)[0];
          for (size_t h = 0; h < found.size(); ++h) changed += usual[h].tokens != found[h].tokens;
        }
      }
  EXPECT_GT(changed, 0);
}

TEST(Generate, RefreshSeesNewParameters) {
  Model model(small_config(), 8), other(small_config(), 9);
  const auto sources = random_sources(6, 307, 20, 8);
  std::vector<GenerateInput> inputs;
  for (const auto& s : sources) inputs.push_back({s, {}, 0});
  const GenerateOptions o = small_options();
  const Lists before = model.generator->generate(inputs, o), expected = other.generator->generate(inputs, o);
  model.transformer->initialise(9);
  model.generator->refresh();
  const Lists after = model.generator->generate(inputs, o);
  bool changed = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_same_bits(after[i], expected[i], fmt::format("sentence {}", i));
    changed = changed || before[i][0].tokens != after[i][0].tokens;
  }
  EXPECT_TRUE(changed);
}

TEST(Generate, Bf16ModelDecodes) {
  const TransformerConfig c = small_config();
  ThreadPool pool(2);
  Memory memory;
  Context context(pool, memory);
  Transformer bf16(c, {.precision = Precision::kBF16Master}), f32(c, {});
  bf16.initialise(3);
  std::vector<float> values;
  for (const auto& slice : bf16.workspace().layout().slices()) {
    values.resize(static_cast<size_t>(slice.shape.numel()));
    bf16.workspace().get(slice.name, values.data(), slice.shape.numel());
    f32.workspace().set(slice.name, values.data(), slice.shape.numel());
  }
  Generator a(context, bf16), b(context, f32);
  int same = 0;
  const auto sources = random_sources(20, 307, 20, 8);
  for (const auto& s : sources) {
    const GenerateInput input{s, {}, 0};
    const auto x = a.generate(std::span(&input, 1), small_options())[0][0],
               y = b.generate(std::span(&input, 1), small_options())[0][0];
    same += x.tokens == y.tokens;
  }
  // The same weights; only the rounded position table differs.
  EXPECT_GE(same, 15);
}

TEST(Generate, LengthsAreKept) {
  Model model(small_config(), 3);
  const auto sources = random_sources(12, 307, 20, 9);
  std::vector<GenerateInput> inputs;
  for (const auto& s : sources) inputs.push_back({s, {}, 0});
  for (const int64_t beam : {1, 3}) {
    GenerateOptions o = small_options();
    o.beam = beam, o.max_new_tokens = 9, o.min_new_tokens = 9;
    for (const auto& list : model.generator->generate(inputs, o)) EXPECT_EQ(list[0].tokens.size(), 9u);
    o.min_new_tokens = 6, o.forced_eos_id = 0;
    for (const auto& list : model.generator->generate(inputs, o)) {
      EXPECT_GE(list[0].tokens.size(), 7u);
      EXPECT_EQ(list[0].tokens.back(), 0);
    }
    o = small_options(), o.beam = beam, o.max_new_tokens = 0, o.min_length = 65;  // all the positions there are
    for (const auto& list : model.generator->generate(inputs, o)) EXPECT_EQ(list[0].tokens.size(), 64u);
  }
}

TEST(Generate, ImpossibleOptionsAreErrors) {
  Model model(small_config(), 3);
  const std::vector<int32_t> source = {4, 5, 0};
  const auto expect_error = [&](const char* word, const std::function<void(GenerateOptions&)>& change,
                                std::vector<int32_t> ids = {4, 5, 0}, std::vector<int32_t> prefix = {}) {
    GenerateOptions o = small_options();
    change(o);
    const GenerateInput input{ids, prefix, 0};
    try {
      model.generator->generate(std::span(&input, 1), o);
      ADD_FAILURE() << "no error for " << word;
    } catch (const std::invalid_argument& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
    }
  };
  expect_error("beam is 0", [](GenerateOptions& o) { o.beam = 0; });
  expect_error("nbest is 3", [](GenerateOptions& o) { o.beam = 2, o.nbest = 3; });
  expect_error("sampling with beam 2", [](GenerateOptions& o) { o.sampling = true, o.beam = 2; });
  expect_error("temperature is 0", [](GenerateOptions& o) { o.temperature = 0; });
  expect_error("top_p is 1.5", [](GenerateOptions& o) { o.top_p = 1.5; });
  expect_error("top_k is -1", [](GenerateOptions& o) { o.top_k = -1; });
  expect_error("max_length is 66", [](GenerateOptions& o) { o.max_length = 66; });
  expect_error("max_length is 1", [](GenerateOptions& o) { o.max_length = 1; });
  expect_error("min_length is 9", [](GenerateOptions& o) { o.max_length = 8, o.min_length = 9; });
  expect_error("repetition_penalty is 0", [](GenerateOptions& o) { o.repetition_penalty = 0; });
  expect_error("diversity is -1", [](GenerateOptions& o) { o.beam = 2, o.diversity = -1; });
  expect_error("expected 2 beams", [](GenerateOptions& o) { o.diversity = 1; });
  expect_error("bad word", [](GenerateOptions& o) { o.bad_words = {{}}; });
  expect_error("EOS id is 307", [](GenerateOptions& o) { o.eos_ids = {307}; });
  expect_error("leaves no room", [](GenerateOptions& o) { o.max_length = 4; }, {4, 0}, {5, 6, 7});
  expect_error("source without tokens", [](GenerateOptions&) {}, {});
  expect_error("source id 307", [](GenerateOptions&) {}, {307, 0});
  expect_error("prefix id -1", [](GenerateOptions&) {}, {4, 0}, {-1});
  expect_error(
      "65 tokens", [](GenerateOptions&) {}, std::vector<int32_t>(65, 4));
  EXPECT_THROW(parse_length_penalty("google"), Error);
  EXPECT_THROW(parse_early_stopping("maybe"), Error);
}

}  // namespace
}  // namespace frit
