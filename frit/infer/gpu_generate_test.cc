// The Generator on a GPU, or in the simulator where there is none, against the one on the CPU: the same tokens and
// scores for every way to search; independence of the batch; graphs.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <thread>

#include "frit/backend/queue.h"
#include "frit/infer/generate.h"

namespace frit {
namespace {

using Lists = std::vector<std::vector<Hypothesis>>;

TransformerConfig tiny_config() {
  TransformerConfig c;
  c.encoder_layers = 1, c.decoder_layers = 2;
  c.d_model = 32, c.encoder_heads = c.decoder_heads = 1;
  c.encoder_ffn_dim = c.decoder_ffn_dim = 48;
  c.source_vocab = c.target_vocab = 61;
  c.max_positions = 24;
  c.pad_id = c.start_id = 60, c.eos_id = 0;
  return c;
}

GenerateOptions tiny_options() {
  GenerateOptions o;
  o.start_id = 60, o.eos_ids = {0}, o.bad_words = {{60}};
  o.max_new_tokens = 9;
  return o;
}

// The same weights on both devices; outputs end at different lengths, since EOS is made likely.
struct Pair {
  explicit Pair(const TransformerConfig& config = tiny_config(), uint32_t seed = 3,
                Precision precision = Precision::kF32, GeneratorOptions how = {})
      : gpu(make_gpu()),
        pool(2),
        device_memory(gpu.get()),
        cpu_context(pool, memory),
        gpu_context(pool, device_memory, gpu.get()),
        cpu_model(config, {.precision = Precision::kF32}),
        gpu_model(config, {.precision = precision, .device = gpu.get()}) {
    std::vector<float> bias(static_cast<size_t>(config.target_vocab), 0.0f);
    bias[0] = 1.5f;
    for (Transformer* model : {&cpu_model, &gpu_model}) model->initialise(seed), model->set_logits_bias(bias);
    on_cpu = std::make_unique<Generator>(cpu_context, cpu_model);
    on_gpu = std::make_unique<Generator>(gpu_context, gpu_model, how);
  }
  std::unique_ptr<Gpu> gpu;
  ThreadPool pool;
  Memory memory, device_memory;
  Context cpu_context, gpu_context;
  Transformer cpu_model, gpu_model;
  std::unique_ptr<Generator> on_cpu, on_gpu;
};

std::vector<std::vector<int32_t>> random_sources(int count, unsigned seed, int vocabulary = 61, int longest = 12) {
  std::mt19937 random(seed);
  std::vector<std::vector<int32_t>> sources;
  for (int s = 0; s < count; ++s) {
    sources.emplace_back();
    const auto length = static_cast<int>(random() % static_cast<unsigned>(longest));
    for (int i = 0; i < length; ++i)
      sources.back().push_back(1 + static_cast<int32_t>(random() % static_cast<unsigned>(vocabulary - 2)));
    sources.back().push_back(0);
  }
  return sources;
}

std::vector<GenerateInput> inputs_of(const std::vector<std::vector<int32_t>>& sources,
                                     const std::vector<int32_t>& prefix = {}) {
  std::vector<GenerateInput> inputs;
  for (size_t i = 0; i < sources.size(); ++i)
    inputs.push_back({sources[i], i % 2 ? std::span<const int32_t>() : std::span<const int32_t>(prefix), i});
  return inputs;
}

void expect_alike(const Lists& a, const Lists& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size()) << "sentence " << i;
    for (size_t h = 0; h < a[i].size(); ++h) {
      EXPECT_EQ(a[i][h].tokens, b[i][h].tokens) << "sentence " << i << ", hypothesis " << h;
      EXPECT_NEAR(a[i][h].score, b[i][h].score, 1e-5 * std::max(1.0f, std::abs(a[i][h].score)))
          << "sentence " << i << ", hypothesis " << h;
      ASSERT_EQ(a[i][h].token_scores.size(), b[i][h].token_scores.size());
      for (size_t t = 0; t < a[i][h].token_scores.size(); ++t)
        EXPECT_NEAR(a[i][h].token_scores[t], b[i][h].token_scores[t], 2e-5) << "token " << t;
    }
  }
}

void expect_same_bits(const std::vector<Hypothesis>& a, const std::vector<Hypothesis>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t h = 0; h < a.size(); ++h) {
    EXPECT_EQ(a[h].tokens, b[h].tokens) << "hypothesis " << h;
    EXPECT_EQ(std::bit_cast<uint32_t>(a[h].score), std::bit_cast<uint32_t>(b[h].score)) << "hypothesis " << h;
    EXPECT_EQ(a[h].token_scores, b[h].token_scores) << "hypothesis " << h;
  }
}

const GeneratorOptions kLibrary{.products = GeneratorOptions::Products::kLibrary};

TEST(GpuGenerate, BeamsOfTheCpu) {
  Pair pair(tiny_config(), 3, Precision::kF32, kLibrary);
  const auto sources = random_sources(5, 1);
  for (const int64_t beam : {1, 2, 4, 5, 8}) {
    SCOPED_TRACE(beam);
    GenerateOptions o = tiny_options();
    o.beam = beam, o.nbest = beam, o.token_scores = true;
    const auto inputs = inputs_of(sources);
    expect_alike(pair.on_cpu->generate(inputs, o), pair.on_gpu->generate(inputs, o));
  }
}

TEST(GpuGenerate, PenaltiesAndEarlyStopping) {
  Pair pair(tiny_config(), 4, Precision::kF32, kLibrary);
  const auto sources = random_sources(4, 2);
  const auto inputs = inputs_of(sources);
  for (const LengthPenalty penalty : {LengthPenalty::kNone, LengthPenalty::kLength, LengthPenalty::kGnmt})
    for (const EarlyStopping early : {EarlyStopping::kFalse, EarlyStopping::kTrue, EarlyStopping::kNever})
      for (const double alpha : {0.6, -0.5}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(penalty), name_of(early), alpha));
        GenerateOptions o = tiny_options();
        o.beam = 3, o.nbest = 3, o.penalty = penalty, o.early_stopping = early, o.alpha = alpha;
        expect_alike(pair.on_cpu->generate(inputs, o), pair.on_gpu->generate(inputs, o));
      }
}

TEST(GpuGenerate, DiverseBeams) {
  Pair pair(tiny_config(), 4, Precision::kF32, kLibrary);
  const auto sources = random_sources(4, 2);
  const auto inputs = inputs_of(sources);
  int changed = 0;
  for (const int64_t beam : {2, 5})
    for (const double diversity : {0.3, 2.0}) {
      SCOPED_TRACE(fmt::format("beam {}, diversity {}", beam, diversity));
      GenerateOptions o = tiny_options();
      o.beam = o.nbest = beam, o.diversity = diversity, o.token_scores = true;
      const Lists found = pair.on_gpu->generate(inputs, o);
      expect_alike(pair.on_cpu->generate(inputs, o), found);
      o.diversity = 0;
      const Lists usual = pair.on_cpu->generate(inputs, o);
      for (size_t i = 0; i < inputs.size(); ++i) changed += usual[i][1].tokens != found[i][1].tokens;
    }
  EXPECT_GT(changed, 0);
}

TEST(GpuGenerate, Processors) {
  Pair pair(tiny_config(), 5, Precision::kF32, kLibrary);
  const auto sources = random_sources(4, 3);
  const std::vector<int32_t> prefix = {7, 9, 7};
  const auto inputs = inputs_of(sources, prefix);
  struct Case {
    const char* name;
    std::function<void(GenerateOptions&)> set;
  };
  const Case cases[] = {{"repetition", [](GenerateOptions& o) { o.repetition_penalty = 1.4; }},
                        {"boost", [](GenerateOptions& o) { o.repetition_penalty = 0.5; }},
                        {"ngram", [](GenerateOptions& o) { o.no_repeat_ngram = 2; }},
                        {"unigram", [](GenerateOptions& o) { o.no_repeat_ngram = 1; }},
                        {"bad words",
                         [](GenerateOptions& o) {
                           o.bad_words = {{60}, {9, 5}, {7, 7}, {3}, {21}, {5, 8, 9}};
                         }},
                        {"lengths",
                         [](GenerateOptions& o) {
                           o.min_length = 5, o.min_new_tokens = 4, o.eos_ids = {0, 11};
                         }},
                        {"forced", [](GenerateOptions& o) { o.forced_eos_id = 0, o.forced_bos_id = 17; }},
                        {"all", [](GenerateOptions& o) {
                           o.repetition_penalty = 1.2, o.no_repeat_ngram = 3, o.min_length = 6, o.forced_eos_id = 0;
                           o.bad_words = {{60}, {9, 5}};
                         }}};
  for (const int64_t beam : {1, 3})
    for (const Case& c : cases) {
      SCOPED_TRACE(fmt::format("{} beam {}", c.name, beam));
      GenerateOptions o = tiny_options();
      o.beam = beam, o.nbest = beam, o.token_scores = true;
      c.set(o);
      expect_alike(pair.on_cpu->generate(inputs, o), pair.on_gpu->generate(inputs, o));
    }
}

// So few tokens that candidates run out: banned ones are taken, and sums tie at the value of what cannot win.
TEST(GpuGenerate, CandidatesRunOut) {
  TransformerConfig c = tiny_config();
  c.source_vocab = c.target_vocab = 7, c.pad_id = c.start_id = 6;
  Pair pair(c, 6, Precision::kF32, kLibrary);
  const auto sources = random_sources(3, 4, 7);
  const auto inputs = inputs_of(sources);
  for (const int64_t beam : {2, 4, 7})
    for (const int bans : {0, 3, 5}) {
      SCOPED_TRACE(fmt::format("beam {}, {} banned", beam, bans));
      GenerateOptions o = tiny_options();
      o.start_id = 6, o.bad_words.clear();
      for (int i = 0; i < bans; ++i) o.bad_words.push_back({i + 1});
      o.beam = beam, o.nbest = beam;
      expect_alike(pair.on_cpu->generate(inputs, o), pair.on_gpu->generate(inputs, o));
      o.no_repeat_ngram = 1, o.bad_words.push_back({0});
      expect_alike(pair.on_cpu->generate(inputs, o), pair.on_gpu->generate(inputs, o));
    }
}

TEST(GpuGenerate, PreNormGeluAndLongOutputs) {
  TransformerConfig c = tiny_config();
  c.pre_norm = true, c.activation = Activation::kGelu, c.encoder_layers = 2, c.share_embeddings = false;
  c.positions = Positions::kLearned, c.max_positions = 100;
  Pair pair(c, 7, Precision::kF32, kLibrary);
  const auto sources = random_sources(2, 5);
  const auto inputs = inputs_of(sources);
  GenerateOptions o = tiny_options();
  o.beam = 2, o.max_new_tokens = 80, o.min_new_tokens = 75;
  expect_alike(pair.on_cpu->generate(inputs, o), pair.on_gpu->generate(inputs, o));
  EXPECT_EQ(pair.on_gpu->report().steps, 80);
}

TEST(GpuGenerate, SamplesOfTheCpu) {
  Pair pair(tiny_config(), 8, Precision::kF32, kLibrary);
  const auto sources = random_sources(2, 6);
  const std::vector<int32_t> prefix = {7, 9, 7};
  const auto inputs = inputs_of(sources, prefix);
  struct Case {
    const char* name;
    std::function<void(GenerateOptions&)> set;
  };
  const Case cases[] = {{"all", [](GenerateOptions&) {}},
                        {"flat", [](GenerateOptions& o) { o.temperature = 3; }},
                        {"top_k", [](GenerateOptions& o) { o.top_k = 5, o.temperature = 2; }},
                        {"top_p", [](GenerateOptions& o) { o.top_p = 0.7, o.temperature = 1.5; }},
                        {"both", [](GenerateOptions& o) { o.top_k = 20, o.top_p = 0.9; }},
                        {"least", [](GenerateOptions& o) { o.top_p = 1e-9; }},
                        {"rules", [](GenerateOptions& o) {
                           o.repetition_penalty = 1.5, o.no_repeat_ngram = 2, o.min_new_tokens = 4;
                           o.bad_words = {{60}, {5}, {9, 5}, {11}}, o.forced_eos_id = 0;
                         }}};
  uint64_t seed = uint64_t{1} << 40;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    GenerateOptions o = tiny_options();
    o.sampling = true, o.nbest = 2, o.token_scores = true, o.seed = ++seed;
    o.max_new_tokens = 6;
    c.set(o);
    expect_alike(pair.on_cpu->generate(inputs, o), pair.on_gpu->generate(inputs, o));
  }
  GenerateOptions o = tiny_options();
  o.sampling = true, o.bad_words.clear();
  for (int i = 0; i < 61; ++i) o.bad_words.push_back({i});
  EXPECT_THROW(pair.on_gpu->generate(inputs, o), Error);
}

// Draws against probabilities: no token outside of the support, every one inside of it, and as often as it should be.
// Five tokens have the same logit, in the middle of which top_k cuts.
TEST(GpuGenerate, DrawsFollowTheirProbabilities) {
  TransformerConfig c = tiny_config();
  c.decoder_layers = 1, c.encoder_ffn_dim = c.decoder_ffn_dim = 32;
  Pair pair(c, 3, Precision::kF32, kLibrary);
  const std::vector<int32_t> source = {5, 9, 33, 0};
  // The last norm gives 0: the bias alone is what the tokens' logits are, to the bit.
  std::vector<float> bias(61);
  for (int t = 0; t < 61; ++t)
    bias[static_cast<size_t>(t)] =
        t % 12 == 3 ? 2.0f : -0.125f * static_cast<float>(t * 7 % 61) + (t % 9 == 4 ? 4.0f : 0.0f);
  const std::vector<double> wanted(bias.begin(), bias.end());
  const std::vector<float> zero(32, 0.0f);
  pair.gpu_model.set_logits_bias(bias);
  for (const char* name : {"weight", "bias"})
    pair.gpu_model.workspace().set(fmt::format("model.decoder.layers.0.final_layer_norm.{}", name), zero.data(), 32);
  struct Case {
    int64_t top_k;
    double top_p, temperature;
  };
  constexpr int kSentences = 16, kSamples = 8;
  const int seeds = built_with_cuda() ? 128 : 1;  // the simulator is slow
  pair.on_gpu->refresh();
  std::vector<GenerateInput> inputs;
  for (uint64_t i = 0; i < kSentences; ++i) inputs.push_back({source, {}, i});
  for (const Case& k : {Case{0, 1, 2.5}, Case{3, 1, 1.5}, Case{0, 0.5, 1}, Case{12, 0.9, 2}}) {
    SCOPED_TRACE(fmt::format("top_k {}, top_p {}, temperature {}", k.top_k, k.top_p, k.temperature));
    std::vector<std::pair<double, int>> order;
    for (int t = 0; t < 60; ++t) order.emplace_back(-wanted[static_cast<size_t>(t)], t);
    std::sort(order.begin(), order.end());
    if (k.top_k > 0) {
      const double lowest = order[static_cast<size_t>(k.top_k - 1)].first;
      std::erase_if(order, [&](const auto& o) { return o.first > lowest; });
    }
    double total = 0, before = 0;
    for (const auto& [value, token] : order) total += std::exp(-value / k.temperature);
    std::map<int, double> support;
    for (const auto& [value, token] : order) {
      if (!support.empty() && before >= k.top_p * total) break;
      before += support[token] = std::exp(-value / k.temperature);
    }
    GenerateOptions o = tiny_options();
    o.sampling = true, o.nbest = kSamples, o.max_new_tokens = 1;
    o.top_k = k.top_k, o.top_p = k.top_p, o.temperature = k.temperature;
    std::map<int, int> drawn;
    for (o.seed = 1; o.seed <= static_cast<uint64_t>(seeds); ++o.seed)
      for (const auto& list : pair.on_gpu->generate(inputs, o))
        for (const Hypothesis& h : list) ++drawn[h.tokens.at(0)];
    double chi = 0, rest = 0;
    int cells = 0, rest_drawn = 0, all = 0;
    for (const auto& [token, count] : drawn) {
      EXPECT_TRUE(support.contains(token)) << token;
      all += count;
    }
    ASSERT_EQ(all, kSentences * kSamples * seeds);
    for (const auto& [token, weight] : support) {
      const double expected = all * weight / before;
      const int count = drawn.contains(token) ? drawn[token] : 0;
      if (expected < 8) {  // rare ones together
        rest += expected, rest_drawn += count;
        continue;
      }
      EXPECT_GT(count, 0) << token;
      chi += (count - expected) * (count - expected) / expected, ++cells;
    }
    if (rest >= 8) chi += (rest_drawn - rest) * (rest_drawn - rest) / rest, ++cells;
    ASSERT_GE(cells, 4);
    // Wilson and Hilferty's normal: 4.5 deviations, once in 300,000 times.
    const double n = cells - 1, v = 2 / (9 * n), z = (std::cbrt(chi / n) - (1 - v)) / std::sqrt(v);
    EXPECT_LT(z, 4.5) << "chi square " << chi << " with " << n << " degrees of freedom";
  }
}

// The same sentence at the first and the last place of batches of 1 and 7, of which some end early.
void check_independence(Pair& pair, GenerateOptions options, const std::vector<int32_t>& prefix = {}) {
  options.token_scores = true;
  const auto sources = random_sources(9, 12);
  for (const size_t subject : {size_t{7}, size_t{8}}) {
    const GenerateInput input{sources[subject], prefix, subject};
    const auto alone = pair.on_gpu->generate(std::span(&input, 1), options)[0];
    ASSERT_FALSE(alone.empty());
    for (const size_t place : {size_t{0}, size_t{6}}) {
      SCOPED_TRACE(place);
      std::vector<GenerateInput> inputs;
      for (size_t i = 0; i < 7; ++i)
        inputs.push_back(
            i == place
                ? input
                : GenerateInput{sources[i], i % 3 ? std::span<const int32_t>() : std::span<const int32_t>(prefix), i});
      expect_same_bits(pair.on_gpu->generate(inputs, options)[place], alone);
    }
  }
}

// In every precision the products by rows give a sentence the same bits in every batch.
TEST(GpuGenerate, RowsDoNotDependOnTheBatch) {
  for (const Precision precision : {Precision::kF32, Precision::kF16Stochastic, Precision::kBF16Stochastic}) {
    SCOPED_TRACE(name_of(precision));
    TransformerConfig c = tiny_config();
    c.decoder_layers = 1, c.encoder_ffn_dim = c.decoder_ffn_dim = 32;
    Pair pair(c, 3, precision, {.products = GeneratorOptions::Products::kRows});
    GenerateOptions o = tiny_options();
    o.beam = 2, o.nbest = 2;
    check_independence(pair, o, {7, 9});
    if (precision == Precision::kF32) {
      o.beam = o.nbest = 1;
      check_independence(pair, o);
      o.sampling = true, o.nbest = 2;
      check_independence(pair, o);
    }
  }
}

TEST(GpuGenerate, SixteenBitsAreNearTheCpu) {
  for (const Precision precision : {Precision::kF16Stochastic, Precision::kBF16Stochastic})
    for (const auto products : {GeneratorOptions::Products::kRows, GeneratorOptions::Products::kLibrary}) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(precision), name_of(products)));
      Pair pair(tiny_config(), 3, precision, {.products = products});
      const auto sources = random_sources(6, 14);
      const auto inputs = inputs_of(sources);
      GenerateOptions o = tiny_options();
      o.beam = 2;
      const Lists expected = pair.on_cpu->generate(inputs, o), got = pair.on_gpu->generate(inputs, o);
      int same = 0;
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (expected[i][0].tokens != got[i][0].tokens) continue;
        ++same;
        EXPECT_NEAR(expected[i][0].score, got[i][0].score, precision == Precision::kF16Stochastic ? 0.01 : 0.1);
      }
      EXPECT_GE(same, 3);
    }
}

// Small products by linear_rows between larger ones of the library: norms are where the next product needs them.
TEST(GpuGenerate, SmallProductsAmongLargeOnes) {
  for (const bool pre_norm : {false, true}) {
    TransformerConfig c = tiny_config();
    c.pre_norm = pre_norm;
    const auto sources = random_sources(6, 14);
    const auto inputs = inputs_of(sources);
    GenerateOptions o = tiny_options();
    o.beam = 2, o.min_new_tokens = o.max_new_tokens;  // all are there to the last step, which is reported
    const auto products = [&](int64_t small, Lists* lists, Lists* expected) {
      Pair pair(c, 3, Precision::kF16Stochastic, {.few_rows = 0, .small_product = small});
      *expected = pair.on_cpu->generate(inputs, o), *lists = pair.on_gpu->generate(inputs, o);
      return pair.on_gpu->report().products;
    };
    Lists expected, small, none, all;
    // Six sentences of two rows: width 32 x 32 and nothing larger. A decoder layer has three such of its six products.
    const int64_t of_small = products(12 * 32 * 32, &small, &expected), of_none = products(0, &none, &expected),
                  of_all = products(int64_t{1} << 30, &all, &expected);
    EXPECT_EQ(of_all, 0);
    EXPECT_EQ(of_none, 2 * 6 + 1);
    EXPECT_EQ(of_small, 2 * 3 + 1);
    for (const Lists* lists : {&small, &none, &all}) {
      int same = 0;
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (expected[i][0].tokens != (*lists)[i][0].tokens) continue;
        ++same;
        EXPECT_NEAR(expected[i][0].score, (*lists)[i][0].score, 0.01);
      }
      EXPECT_GE(same, 3);
    }
  }
}

TEST(GpuGenerate, GraphsChangeNoBit) {
  Pair with(tiny_config(), 3, Precision::kF32), without(tiny_config(), 3, Precision::kF32, {.graphs = false});
  GenerateOptions o = tiny_options();
  o.beam = 4, o.nbest = 4, o.token_scores = true;
  for (const unsigned seed : {20u, 21u, 22u}) {  // batches of several sizes, over the same graphs
    const auto sources = random_sources(static_cast<int>(2 + seed % 3), seed);
    const auto inputs = inputs_of(sources);
    const Lists a = with.on_gpu->generate(inputs, o), b = without.on_gpu->generate(inputs, o);
    for (size_t i = 0; i < a.size(); ++i) expect_same_bits(a[i], b[i]);
  }
  EXPECT_GT(with.on_gpu->report().recorded, 0);
  EXPECT_EQ(without.on_gpu->report().recorded, 0);
}

// Many short sentences, then few long ones: tables are laid out anew in the same memory, which is no larger than the
// larger of the two calls needs.
TEST(GpuGenerate, FewLongSentencesShareTheMemoryOfManyShortOnes) {
  Pair pair(tiny_config(), 3, Precision::kF32, kLibrary);
  const auto many = random_sources(12, 40), few = random_sources(2, 41);
  const auto short_ones = inputs_of(many), long_ones = inputs_of(few);
  GenerateOptions o = tiny_options();
  o.beam = 2, o.nbest = 2, o.token_scores = true;
  o.max_new_tokens = 6;
  expect_alike(pair.on_cpu->generate(short_ones, o), pair.on_gpu->generate(short_ones, o));
  const int64_t bytes = pair.on_gpu->report().cache_bytes, state = pair.on_gpu->report().state_bytes;
  for (int i = 0; i < 2; ++i) {
    o.max_new_tokens = 22, o.min_new_tokens = 20;
    expect_alike(pair.on_cpu->generate(long_ones, o), pair.on_gpu->generate(long_ones, o));
    o.max_new_tokens = 6, o.min_new_tokens = 0;
    expect_alike(pair.on_cpu->generate(short_ones, o), pair.on_gpu->generate(short_ones, o));
  }
  EXPECT_EQ(pair.on_gpu->report().cache_bytes, bytes);
  EXPECT_EQ(pair.on_gpu->report().state_bytes, state);
}

// Graphs are recorded of work that comes often, and what is prepared has room for every batch.
TEST(GpuGenerate, PreparedBatchesGrowNothing) {
  Pair pair(tiny_config(), 3, Precision::kF32, kLibrary), plain;
  const auto many = random_sources(6, 42, 61, 5), few = random_sources(2, 43);
  const std::vector<std::vector<GenerateInput>> batches = {inputs_of(few), inputs_of(many)};
  GenerateOptions o = tiny_options();
  o.beam = 2;
  pair.on_gpu->prepare(batches, o);
  const GenerateReport before = pair.on_gpu->report();
  EXPECT_GT(before.cache_bytes, 0);
  EXPECT_GT(before.arena_bytes, 0);
  EXPECT_EQ(before.recorded, 0);
  int64_t recorded = 0;
  for (int i = 0; i < 5; ++i) {
    for (const auto& batch : batches) expect_alike(plain.on_cpu->generate(batch, o), pair.on_gpu->generate(batch, o));
    const GenerateReport& now = pair.on_gpu->report();
    EXPECT_EQ(now.cache_bytes, before.cache_bytes);
    EXPECT_EQ(now.state_bytes, before.state_bytes);
    EXPECT_EQ(now.arena_bytes, before.arena_bytes);
    if (i == 4) {  // the first three runs of everything were plain
      EXPECT_GE(recorded, 4);
      EXPECT_EQ(now.recorded, recorded);
    }
    recorded = now.recorded;
  }
}

// Generators on queues of one GPU share a model and work at the same time: each gets what it gets alone.
TEST(GpuGenerate, QueuesShareAModel) {
  Pair pair(tiny_config(), 3, Precision::kF32, kLibrary);
  GenerateOptions o = tiny_options();
  o.beam = 2, o.nbest = 2;
  std::vector<std::vector<std::vector<int32_t>>> sources;
  std::vector<Lists> expected;
  for (const unsigned i : {0u, 1u, 2u, 3u}) {
    sources.push_back(random_sources(static_cast<int>(2 + i), 50 + i));
    expected.push_back(pair.on_gpu->generate(inputs_of(sources.back()), o));
  }
  struct Queue {
    explicit Queue(Pair& of)
        : gpu(make_queue(*of.gpu)),
          memory(gpu.get()),
          context(of.pool, memory, gpu.get()),
          generator(context, of.gpu_model, kLibrary) {}
    std::unique_ptr<Gpu> gpu;
    Memory memory;
    Context context;
    Generator generator;
  };
  Queue first(pair), second(pair);
  EXPECT_TRUE(same_device(*first.gpu, *pair.gpu));
  EXPECT_TRUE(same_device(*first.gpu, *second.gpu));
  std::vector<Lists> got[2];
  const auto work = [&](Generator& generator, std::vector<Lists>& lists) {
    for (const auto& batch : sources) lists.push_back(generator.generate(inputs_of(batch), o));
  };
  std::thread other([&] { work(second.generator, got[1]); });
  work(first.generator, got[0]);
  other.join();
  for (const auto& lists : got)
    for (size_t i = 0; i < sources.size(); ++i)
      for (size_t s = 0; s < sources[i].size(); ++s) expect_same_bits(lists[i][s], expected[i][s]);
}

// Sentences that have ended leave the batch: fewer rows are computed, and steps end when the last one has.
TEST(GpuGenerate, FinishedSentencesLeave) {
  Pair pair;
  const auto sources = random_sources(4, 30);
  const auto inputs = inputs_of(sources);
  GenerateOptions o = tiny_options();
  o.max_new_tokens = 20;
  const Lists lists = pair.on_gpu->generate(inputs, o);
  size_t longest = 0;
  for (const auto& list : lists) longest = std::max(longest, list[0].tokens.size());
  EXPECT_LT(longest, 20u);
  EXPECT_LE(pair.on_gpu->report().steps, static_cast<int64_t>(longest) + 1);
  EXPECT_GT(pair.on_gpu->report().cache_bytes, 0);
}

TEST(GpuGenerate, RefreshSeesNewParameters) {
  Pair pair, other(tiny_config(), 9);
  const auto sources = random_sources(3, 31);
  const auto inputs = inputs_of(sources);
  const GenerateOptions o = tiny_options();
  pair.on_gpu->generate(inputs, o);
  pair.gpu_model.initialise(9);
  pair.on_gpu->refresh();
  expect_alike(other.on_gpu->generate(inputs, o), pair.on_gpu->generate(inputs, o));
}

TEST(GpuGenerate, ImpossibleThingsAreErrors) {
  Pair pair;
  const std::vector<int32_t> source = {4, 5, 0};
  const GenerateInput input{source, {}, 0};
  GenerateOptions o = tiny_options();
  o.beam = 0;
  EXPECT_THROW(pair.on_gpu->generate(std::span(&input, 1), o), std::invalid_argument);
  o.beam = 2, o.max_length = 99;
  EXPECT_THROW(pair.on_gpu->generate(std::span(&input, 1), o), std::invalid_argument);
  EXPECT_THROW(Generator(pair.gpu_context, pair.cpu_model), std::invalid_argument);
  EXPECT_THROW(Generator(pair.cpu_context, pair.gpu_model), std::invalid_argument);
  if (!built_with_cuda()) {  // every simulator is a device of its own
    Pair other;
    EXPECT_FALSE(same_device(*pair.gpu, *other.gpu));
    EXPECT_THROW(Generator(pair.gpu_context, other.gpu_model), std::invalid_argument);
  }
}

}  // namespace
// The CPU says so too.
TEST(GpuGenerate, NanIsAnError) {
  Pair pair;
  std::vector<float> bias(61, 0.0f);
  bias[7] = std::numeric_limits<float>::quiet_NaN();
  pair.gpu_model.set_logits_bias(bias);
  pair.on_gpu->refresh();
  const auto sources = random_sources(3, 1);
  std::vector<GenerateInput> inputs;
  for (const auto& source : sources) inputs.push_back({source, {}, 0});
  for (const bool sampling : {false, true})
    for (const int64_t beam : {1, 2}) {
      GenerateOptions o = tiny_options();
      o.sampling = sampling, o.beam = sampling ? 1 : beam;
      try {
        pair.on_gpu->generate(inputs, o);
        ADD_FAILURE() << "no error with beam " << beam;
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("NaN"), std::string::npos) << e.what();
      }
    }
}

}  // namespace frit
