#include "frit/models/transformer/transformer.h"
#include "frit/core/file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "frit/memory/planner.h"
#include "frit/models/format/safetensors.h"

namespace frit {
namespace {

struct Rig {
  explicit Rig(int threads = 1) : pool(threads), context(pool, memory) { context.set_random(7, 3); }
  ThreadPool pool;
  Memory memory;
  Context context;
};

struct TestBatch {
  std::vector<int32_t> source_ids, source_offsets, target_ids, labels, target_offsets;
};

// Random sentences of the given lengths: sources end in EOS, decoders start with the start token.
TestBatch make_batch(const TransformerConfig& c, uint32_t seed, const std::vector<int>& source,
                     const std::vector<int>& target) {
  TestBatch b;
  b.source_offsets = b.target_offsets = {0};
  uint32_t counter = 0;
  const auto draw = [&](int64_t vocab) {
    int32_t id;
    do id = static_cast<int32_t>(philox({seed, 1}, counter++, 0, 0, 0).v[0] % static_cast<uint32_t>(vocab));
    while (id == c.pad_id || id == c.eos_id);
    return id;
  };
  for (size_t s = 0; s < source.size(); ++s) {
    for (int i = 0; i + 1 < source[s]; ++i) b.source_ids.push_back(draw(c.source_vocab));
    if (source[s] > 0) b.source_ids.push_back(static_cast<int32_t>(c.eos_id));
    b.source_offsets.push_back(static_cast<int32_t>(b.source_ids.size()));
    for (int i = 0; i < target[s]; ++i) {
      b.target_ids.push_back(i == 0 ? static_cast<int32_t>(c.start_id) : b.labels.back());
      b.labels.push_back(i + 1 < target[s] ? draw(c.target_vocab) : static_cast<int32_t>(c.eos_id));
    }
    b.target_offsets.push_back(static_cast<int32_t>(b.labels.size()));
  }
  return b;
}

TransformerConfig tiny(bool pre_norm = false) {
  TransformerConfig c;
  c.encoder_layers = 2, c.decoder_layers = 2;
  c.d_model = 16, c.encoder_heads = 4, c.decoder_heads = 2;
  c.encoder_ffn_dim = 24, c.decoder_ffn_dim = 20;
  c.source_vocab = c.target_vocab = 37;
  c.max_positions = 20;
  c.activation = Activation::kGelu;
  c.pre_norm = pre_norm;
  c.dropout = 0.1, c.attention_dropout = 0.1, c.activation_dropout = 0.1;
  c.pad_id = c.start_id = 36, c.eos_id = 0;
  return c;
}
TransformerConfig without_dropout(TransformerConfig c) {
  c.dropout = c.attention_dropout = c.activation_dropout = 0;
  return c;
}

std::unique_ptr<Transformer> make_model(const TransformerConfig& c, Precision precision = Precision::kF32,
                                        bool training = true) {
  auto model = std::make_unique<Transformer>(c, Transformer::Options{.precision = precision, .training = training});
  model->initialise(5);
  // Gammas, betas and biases away from their first values, so that no gradient is trivial.
  std::vector<float> values;
  for (const auto& slice : model->workspace().layout().slices()) {
    if (slice.shape.rank() != 1) continue;
    values.resize(static_cast<size_t>(slice.shape.numel()));
    model->workspace().get(slice.name, values.data(), slice.shape.numel());
    for (size_t i = 0; i < values.size(); ++i)
      values[i] += 0.1f * std::sin(static_cast<float>(3 * i) + static_cast<float>(slice.name.size()));
    model->workspace().set(slice.name, values.data(), slice.shape.numel());
  }
  return model;
}

Loss step(Rig& rig, Transformer& model, const TestBatch& batch, StepOptions options = {}, float scale = 1.0f) {
  LossTotals totals;
  model.train_step(rig.context, BatchView::of(batch), Tensor(&scale, DType::kF32, {1}), totals.tensor(), options);
  return totals.loss();
}
Loss evaluate(Rig& rig, Transformer& model, const TestBatch& batch) {
  LossTotals totals;
  model.evaluate(rig.context, BatchView::of(batch), totals.tensor());
  return totals.loss();
}
StepOptions smoothed(double a = 0.1) {
  StepOptions o;
  o.criterion.smoothing = static_cast<float>(a);
  return o;
}
std::vector<float> gradients(const Transformer& model) {
  const Tensor g = model.workspace().gradients();
  return std::vector<float>(g.data<float>(), g.data<float>() + g.numel());
}
std::vector<float> values_of(const Tensor& t) {
  return std::vector<float>(t.data<float>(), t.data<float>() + t.numel());
}

double norm_of(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return std::sqrt(sum);
}
// |a - b| / |b|.
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  return std::sqrt(sum) / std::max(norm_of(b.data(), static_cast<int64_t>(b.size())), 1e-30);
}

const std::vector<int> kSource = {5, 1, 9, 3}, kTarget = {4, 7, 1, 6};

struct Variant {
  const char* name;
  std::function<void(TransformerConfig&)> change;
};
void PrintTo(const Variant& v, std::ostream* out) {
  *out << v.name;
}
const Variant kVariants[] = {
    {"post_sinusoidal_shared_gelu", [](TransformerConfig&) {}},
    {"pre_learned_separate_silu",
     [](TransformerConfig& c) {
       c.pre_norm = true, c.positions = Positions::kLearned, c.share_embeddings = false, c.target_vocab = 41;
       c.activation = Activation::kSilu, c.scale_embedding = false;
     }},
    {"post_learned_untied_gelu_tanh",
     [](TransformerConfig& c) {
       c.positions = Positions::kLearned, c.tie_output = false, c.activation = Activation::kGeluTanh;
     }},
    {"pre_sinusoidal_separate_untied",
     [](TransformerConfig& c) { c.pre_norm = true, c.share_embeddings = c.tie_output = false, c.decoder_layers = 1; }},
};

class Variants : public ::testing::TestWithParam<Variant> {
 protected:
  static TransformerConfig config() {
    TransformerConfig c = tiny();
    GetParam().change(c);
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Transformer, Variants, ::testing::ValuesIn(kVariants),
                         [](const auto& info) { return std::string(info.param.name); });

// The directional derivative of the loss, dropout on, against differences of the loss, for every parameter.
TEST_P(Variants, GradientsAreDifferencesOfTheLoss) {
  Rig rig;
  auto model = make_model(config());
  TestBatch batch = make_batch(config(), 1, kSource, kTarget);
  batch.labels[2] = -1;  // counts for nothing
  const StepOptions options = smoothed();
  const Loss loss = step(rig, *model, batch, options);
  EXPECT_EQ(loss.tokens, 17);
  const std::vector<float> g = gradients(*model);
  float* p = model->workspace().parameters().data<float>();
  uint32_t direction = 0;
  for (const auto& slice : model->workspace().layout().slices()) {
    const int64_t n = slice.shape.numel();
    const double g_norm = norm_of(g.data() + slice.offset, n);
    const std::vector<float> before(p + slice.offset, p + slice.offset + n);
    for (int repeat = 0; repeat < 2; ++repeat, ++direction) {
      // Along the gradient, mixed with a random direction of the same length; then the random one alone.
      std::vector<float> v(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i)
        v[i] = static_cast<float>(philox({9, direction}, static_cast<uint32_t>(i), 0, 0, 0).v[0]) * 0x1p-31f - 1.0f;
      const double v_norm = norm_of(v.data(), n);
      double along = 0;
      for (int64_t i = 0; i < n; ++i) {
        v[i] = static_cast<float>(v[i] / v_norm);
        if (repeat == 0 && g_norm > 0) v[i] += static_cast<float>(g[slice.offset + i] / g_norm);
      }
      // The start token is the pad token, whose look-ups are meant to leave no gradient: its row stays where it is.
      if (slice.name == "model.shared.weight" || slice.name.find("embed_tokens") != std::string::npos)
        std::fill_n(v.begin() + config().pad_id * 16, 16, 0.0f);
      for (int64_t i = 0; i < n; ++i) along += static_cast<double>(v[i]) * g[slice.offset + i];
      const double h = 1e-2;
      const auto at = [&](double t) {
        for (int64_t i = 0; i < n; ++i) p[slice.offset + i] = before[i] + static_cast<float>(t * v[i]);
        return step(rig, *model, batch, options).loss;
      };
      const double measured = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      EXPECT_NEAR(measured, along, 2e-3 * g_norm + 2e-3) << slice.name;
    }
    std::copy(before.begin(), before.end(), p + slice.offset);
  }
}

TEST_P(Variants, RecomputationGivesTheSameBitsWithLessMemory) {
  Rig rig;
  auto model = make_model(config());
  const TestBatch batch = make_batch(config(), 2, kSource, kTarget);
  const auto peak = [&](StepOptions o) {
    rig.memory.begin_recording();
    model->train_step(rig.context, BatchView::planned(4, 18, 18), Tensor(nullptr, DType::kF32, {1}),
                      Tensor(nullptr, DType::kF64, {3}), o);
    return plan_memory(rig.memory.end_recording()).peak;
  };
  StepOptions options = smoothed();
  const Loss kept = step(rig, *model, batch, options);
  const std::vector<float> g = gradients(*model);
  const size_t kept_peak = peak(options);
  for (const Recompute level : {Recompute::kActivations, Recompute::kLayer}) {
    options.recompute = level;
    const Loss rebuilt = step(rig, *model, batch, options);
    EXPECT_EQ(kept.loss, rebuilt.loss);
    EXPECT_EQ(g, gradients(*model));
    EXPECT_LT(peak(options), kept_peak);
  }
}

// A plan made without data, replayed in an arena full of NaNs, gives the bits of the heap; every temporary has died by
// the end.
TEST_P(Variants, PlannedStepsGiveTheSameBits) {
  Rig rig;
  auto model = make_model(config());
  const TestBatch batch = make_batch(config(), 3, kSource, kTarget);
  for (const Recompute recompute : {Recompute::kNone, Recompute::kActivations, Recompute::kLayer}) {
    StepOptions options = smoothed();
    options.recompute = recompute, options.criterion.chunk_rows = 5;
    const Loss heap = step(rig, *model, batch, options);
    const std::vector<float> g = gradients(*model);
    rig.memory.begin_recording();
    model->train_step(rig.context, BatchView::planned(4, 18, 18), Tensor(nullptr, DType::kF32, {1}),
                      Tensor(nullptr, DType::kF64, {3}), options);
    const std::vector<Lifetime> lifetimes = rig.memory.end_recording();
    EXPECT_EQ(gradients(*model), g);  // planning computes nothing
    int64_t end = 0;
    for (const Lifetime& t : lifetimes) end = std::max(end, t.death);
    int64_t last = 0;
    for (const Lifetime& t : lifetimes) last += t.death == end;
    EXPECT_EQ(last, 1) << "temporaries that outlive the step";
    EXPECT_TRUE(std::any_of(lifetimes.begin(), lifetimes.end(),
                            [](const Lifetime& t) { return t.name == "decoder.0.cross_attention.dq"; }));
    const Plan plan = plan_memory(lifetimes);
    rig.memory.set_poison(true);
    rig.memory.begin_replay(plan);
    const Loss replayed = step(rig, *model, batch, options);
    rig.memory.end_replay();
    rig.memory.set_poison(false);
    EXPECT_EQ(heap.loss, replayed.loss);
    EXPECT_EQ(heap.nll, replayed.nll);
    EXPECT_EQ(g, gradients(*model));
  }
}

TEST_P(Variants, ThreadsDoNotChangeBits) {
  Rig one(1), three(3);
  auto model = make_model(config());
  const TestBatch batch = make_batch(config(), 4, {12, 7, 20, 3, 1, 15}, {9, 16, 2, 20, 11, 5});
  const Loss a = step(one, *model, batch, smoothed());
  const std::vector<float> g = gradients(*model);
  const Loss b = step(three, *model, batch, smoothed());
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(g, gradients(*model));
}

TEST_P(Variants, ChunksOfLogitsChangeRoundingOnly) {
  Rig rig;
  auto model = make_model(config());
  const TestBatch batch = make_batch(config(), 5, kSource, kTarget);
  StepOptions options = smoothed();
  options.criterion.chunk_rows = 0;
  const Loss whole = step(rig, *model, batch, options);
  const std::vector<float> g = gradients(*model);
  for (const int64_t rows : {1, 5, 18, 100}) {
    options.criterion.chunk_rows = rows;
    const Loss chunked = step(rig, *model, batch, options);
    EXPECT_NEAR(chunked.loss, whole.loss, 1e-6 * whole.loss);
    EXPECT_LT(difference(gradients(*model), g), 1e-5) << rows;
  }
}

TEST_P(Variants, MicroBatchesAddUpToOneBatch) {
  Rig rig;
  const TransformerConfig c = without_dropout(config());
  auto model = make_model(c);
  const Loss whole = step(rig, *model, make_batch(c, 6, kSource, kTarget), smoothed(), 1.0f / 18);
  const std::vector<float> g = gradients(*model);
  // The same sentences, cut behind the second: the generator's draws are in order, so cut the batch itself.
  const TestBatch all = make_batch(c, 6, kSource, kTarget);
  TestBatch first, second;
  const auto cut = [](const std::vector<int32_t>& from, int64_t begin, int64_t end) {
    return std::vector<int32_t>(from.begin() + begin, from.begin() + end);
  };
  const int64_t s = all.source_offsets[2], t = all.target_offsets[2];
  first = {cut(all.source_ids, 0, s), cut(all.source_offsets, 0, 3), cut(all.target_ids, 0, t), cut(all.labels, 0, t),
           cut(all.target_offsets, 0, 3)};
  second = {cut(all.source_ids, s, 18), cut(all.source_offsets, 2, 5), cut(all.target_ids, t, 18),
            cut(all.labels, t, 18), cut(all.target_offsets, 2, 5)};
  for (int32_t& o : second.source_offsets) o -= static_cast<int32_t>(s);
  for (int32_t& o : second.target_offsets) o -= static_cast<int32_t>(t);
  StepOptions options = smoothed();
  const Loss a = step(rig, *model, first, options, 1.0f / 18);
  options.accumulate = true;
  const Loss b = step(rig, *model, second, options, 1.0f / 18);
  EXPECT_NEAR(a.loss + b.loss, whole.loss, 1e-6 * whole.loss);
  EXPECT_EQ(a.tokens + b.tokens, whole.tokens);
  EXPECT_LT(difference(gradients(*model), g), 1e-5);
}

// A sentence gives the same bits alone and among others.
TEST_P(Variants, NeighboursDoNotChangeASentence) {
  Rig rig;
  auto model = make_model(config(), Precision::kF32, false);
  const TestBatch all = make_batch(config(), 7, kSource, kTarget);
  const Buffer together = model->logits(rig.context, BatchView::of(all));
  const Buffer memory = model->encode(rig.context, BatchView::of(all).source_ids, BatchView::of(all).source_offsets);
  const int64_t V = config().target_vocab;
  double nll = 0;
  for (int s = 0; s < 4; ++s) {
    const auto cut = [&](const std::vector<int32_t>& from, const std::vector<int32_t>& offsets) {
      return std::vector<int32_t>(from.begin() + offsets[s], from.begin() + offsets[s + 1]);
    };
    const TestBatch one = {cut(all.source_ids, all.source_offsets),
                           {0, kSource[s]},
                           cut(all.target_ids, all.target_offsets),
                           cut(all.labels, all.target_offsets),
                           {0, kTarget[s]}};
    const Buffer alone = model->logits(rig.context, BatchView::of(one));
    EXPECT_EQ(std::memcmp(alone->raw(), together->data<float>() + all.target_offsets[s] * V,
                          static_cast<size_t>(alone->bytes())),
              0)
        << s;
    const Buffer encoded = model->encode(rig.context, BatchView::of(one).source_ids, BatchView::of(one).source_offsets);
    EXPECT_EQ(std::memcmp(encoded->raw(), memory->data<float>() + all.source_offsets[s] * 16,
                          static_cast<size_t>(encoded->bytes())),
              0);
    nll += evaluate(rig, *model, one).nll;
  }
  const Loss loss = evaluate(rig, *model, all);
  EXPECT_NEAR(loss.nll, nll, 1e-6 * nll);
  EXPECT_NEAR(loss.loss, loss.nll, 1e-6 * nll);  // no smoothing asked for
  EXPECT_EQ(loss.tokens, 18);
}

TEST_P(Variants, Bf16StaysNearFp32) {
  Rig rig;
  const TransformerConfig c = without_dropout(config());
  auto fp32 = make_model(c), bf16 = make_model(c, Precision::kBF16Master);
  const TestBatch batch = make_batch(c, 8, kSource, kTarget);
  const Loss a = step(rig, *fp32, batch, smoothed()), b = step(rig, *bf16, batch, smoothed());
  EXPECT_NEAR(b.loss, a.loss, 0.02 * a.loss);
  EXPECT_LT(difference(gradients(*bf16), gradients(*fp32)), 0.05);
  // 16-bit gradients too.
  Transformer narrow(c, {.precision = Precision::kBF16Stochastic, .training = true, .gradient_dtype = DType::kBF16});
  for (const auto& slice : fp32->workspace().layout().slices())
    narrow.workspace().set(slice.name, fp32->workspace().parameter(slice.name).data<float>(), slice.shape.numel());
  step(rig, narrow, batch, smoothed());
  const Tensor g = narrow.workspace().gradients();
  std::vector<float> widened(static_cast<size_t>(g.numel()));
  for (int64_t i = 0; i < g.numel(); ++i) widened[i] = static_cast<float>(g.data<bfloat16>()[i]);
  EXPECT_LT(difference(widened, gradients(*fp32)), 0.05);
}

TEST(Transformer, DropoutFollowsSeedStepAndStream) {
  Rig rig;
  auto model = make_model(tiny());
  const TestBatch batch = make_batch(tiny(), 9, kSource, kTarget);
  const double first = step(rig, *model, batch).loss;
  const std::vector<float> g = gradients(*model);
  rig.context.set_random(7, 4);
  EXPECT_NE(step(rig, *model, batch).loss, first);
  rig.context.set_random(8, 3);
  EXPECT_NE(step(rig, *model, batch).loss, first);
  rig.context.set_random(7, 3, 1);
  EXPECT_NE(step(rig, *model, batch).loss, first);
  rig.context.set_random(7, 3);
  EXPECT_EQ(step(rig, *model, batch).loss, first);
  EXPECT_EQ(gradients(*model), g);
  // Every use of dropout draws its own mask: turning one off changes the loss, and so does each alone.
  for (int use = 0; use < 3; ++use) {
    TransformerConfig c = without_dropout(tiny());
    const double none = step(rig, *make_model(c), batch).loss;
    (use == 0 ? c.dropout : use == 1 ? c.attention_dropout : c.activation_dropout) = 0.3;
    EXPECT_NE(step(rig, *make_model(c), batch).loss, none) << use;
  }
  // Evaluation drops nothing.
  EXPECT_EQ(evaluate(rig, *model, batch).loss, evaluate(rig, *make_model(without_dropout(tiny())), batch).loss);
}

TEST(Transformer, TwoModelsLiveSideBySide) {
  Rig rig, other;
  const TestBatch batch = make_batch(tiny(), 10, kSource, kTarget),
                  pre_batch = make_batch(tiny(true), 11, {3, 8}, {5, 2});
  auto alone = make_model(tiny());
  const double loss = step(rig, *alone, batch).loss;
  const std::vector<float> g = gradients(*alone);
  auto a = make_model(tiny()), b = make_model(tiny(true));
  const double b_loss = step(other, *b, pre_batch).loss;
  EXPECT_EQ(step(rig, *a, batch).loss, loss);
  EXPECT_EQ(step(other, *b, pre_batch).loss, b_loss);
  a.reset();
  EXPECT_EQ(step(other, *b, pre_batch).loss, b_loss);
  EXPECT_EQ(step(rig, *alone, batch).loss, loss);
  EXPECT_EQ(gradients(*alone), g);
}

TEST(Transformer, EmptyAndOddBatches) {
  Rig rig;
  auto model = make_model(tiny());
  const TestBatch none = make_batch(tiny(), 12, {}, {});
  const Loss loss = step(rig, *model, none);
  EXPECT_EQ(loss.loss, 0);
  EXPECT_EQ(loss.tokens, 0);
  for (float v : gradients(*model)) ASSERT_EQ(v, 0);
  // A sentence pair of which one side is empty: attention without keys gives zeros, never NaN.
  step(rig, *model, make_batch(tiny(), 13, {0, 4}, {3, 0}));
  for (float v : gradients(*model)) ASSERT_TRUE(std::isfinite(v));
}

TEST(Transformer, RefusesWhatDoesNotFit) {
  Rig rig;
  auto model = make_model(tiny());
  TestBatch batch = make_batch(tiny(), 14, kSource, kTarget);
  const std::vector<float> g = gradients(*model);
  const auto refused = [&](const TestBatch& b) {
    EXPECT_THROW(step(rig, *model, b), std::invalid_argument);
    EXPECT_EQ(rig.memory.mode(), Memory::Mode::kHeap);
  };
  TestBatch wrong = batch;
  wrong.labels.pop_back();
  refused(wrong);
  wrong = batch;
  wrong.source_ids[0] = 37;
  refused(wrong);
  wrong = batch;
  wrong.target_ids[0] = -1;
  refused(wrong);
  wrong = batch;
  wrong.target_offsets.pop_back();
  refused(wrong);
  refused(make_batch(tiny(), 15, {21}, {3}));  // longer than the positions
  EXPECT_TRUE(std::isfinite(step(rig, *model, batch).loss));
  auto inference = make_model(tiny(), Precision::kF32, false);
  EXPECT_THROW(step(rig, *inference, batch), std::invalid_argument);
  TransformerConfig c = tiny();
  c.encoder_layerdrop = 0.1;
  EXPECT_THROW(Transformer(c, {.training = true}), Error);
  EXPECT_NO_THROW(Transformer(c, {.training = false}));
  c = tiny();
  c.decoder_heads = 3;
  EXPECT_THROW(Transformer(c, {}), Error);
}

TEST(Transformer, InitialValuesDependOnNameAndPlaceAlone) {
  TransformerConfig c = tiny(), deeper = tiny();
  deeper.encoder_layers = 4, deeper.target_vocab = deeper.source_vocab = 50;
  Transformer a(c, {}), b(deeper, {});
  a.initialise(5), b.initialise(5);
  for (const char* name : {"model.decoder.layers.1.fc1.weight", "model.encoder.layers.0.self_attn.k_proj.weight"}) {
    EXPECT_EQ(values_of(a.workspace().parameter(name)), values_of(b.workspace().parameter(name)));
  }
  EXPECT_NE(values_of(a.workspace().parameter("model.encoder.layers.0.self_attn.k_proj.weight")),
            values_of(a.workspace().parameter("model.encoder.layers.0.self_attn.q_proj.weight")));
  b.initialise(6);
  EXPECT_NE(values_of(a.workspace().parameter("model.decoder.layers.1.fc1.weight")),
            values_of(b.workspace().parameter("model.decoder.layers.1.fc1.weight")));
  // Xavier: within +-sqrt(6 / (in + out)), deviation sqrt(2 / (in + out)).
  const std::vector<float> w = values_of(a.workspace().parameter("model.encoder.layers.0.fc1.weight"));
  EXPECT_NEAR(norm_of(w.data(), static_cast<int64_t>(w.size())) / std::sqrt(static_cast<double>(w.size())),
              std::sqrt(2.0 / 40), 0.02);
  for (float v : w) ASSERT_LE(std::abs(v), std::sqrt(6.0f / 40));
  // Embeddings: N(0, 1/H), the pad row 0.
  const std::vector<float> e = values_of(a.workspace().parameter("model.shared.weight"));
  EXPECT_NEAR(norm_of(e.data(), 36 * 16) / std::sqrt(36.0 * 16), 0.25, 0.02);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(e[36 * 16 + i], 0);
  a.initialise(5, {.kind = InitOptions::Kind::kNormal, .normal_std = 0.02});
  const std::vector<float> n = values_of(a.workspace().parameter("model.encoder.layers.0.fc1.weight"));
  EXPECT_NEAR(norm_of(n.data(), static_cast<int64_t>(n.size())) / std::sqrt(static_cast<double>(n.size())), 0.02,
              0.002);
}

TEST(Transformer, InitialValuesAreTheSameWhateverThreadsDrawThem) {
  TransformerConfig c = tiny();
  c.source_vocab = c.target_vocab = 1037;  // an odd number of values, in more than one piece
  c.d_model = 33, c.encoder_heads = c.decoder_heads = 3;
  c.encoder_layers = c.decoder_layers = 1;
  Transformer a(c, {}), b(c, {});
  a.initialise(5);
  ThreadPool pool(3);
  b.initialise(5, {}, &pool);
  EXPECT_GT(pool.regions(), 0);
  for (const ParameterLayout::Slice& slice : a.workspace().layout().slices())
    EXPECT_EQ(values_of(a.workspace().parameter(slice.name)), values_of(b.workspace().parameter(slice.name)))
        << slice.name;
}

class Directories : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "frit-model-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  static std::string error_of(const std::string& directory) {
    try {
      Transformer::load(directory, {});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  // Writes the directory's tensors again after `change` had its way with them.
  void rewrite(const std::function<void(std::map<std::string, std::pair<Shape, std::vector<float>>>&)>& change,
               DType dtype = DType::kF32) {
    const std::string path = directory_ + "/model.safetensors";
    std::map<std::string, std::pair<Shape, std::vector<float>>> tensors;
    {
      const SafetensorsFile in(path);
      for (const auto& entry : in.entries()) {
        auto& [shape, values] = tensors[entry.name];
        shape = entry.shape, values.resize(static_cast<size_t>(shape.numel()));
        convert_to_f32(entry, values.data());
      }
    }
    change(tensors);
    SafetensorsWriter out(path);
    for (const auto& [name, tensor] : tensors) out.declare(name, dtype, tensor.first);
    for (const auto& [name, tensor] : tensors) {
      if (dtype == DType::kF32) {
        out.write(name, tensor.second.data(), static_cast<int64_t>(tensor.second.size()) * 4);
      } else {
        std::vector<float16> half;
        for (float v : tensor.second) half.emplace_back(v);
        out.write(name, half.data(), static_cast<int64_t>(half.size()) * 2);
      }
    }
    out.finish();
  }
  std::string directory_;
};

TEST_F(Directories, LoadingReturnsWhatWasSaved) {
  Rig rig;
  for (const Variant& variant : kVariants) {
    TransformerConfig c = tiny();
    variant.change(c);
    auto model = make_model(c);
    std::vector<float> bias(static_cast<size_t>(c.target_vocab), 0.5f);
    bias[3] = -2;
    model->set_logits_bias(bias);
    model->save(directory_);
    auto back = Transformer::load(directory_, {.training = true});
    EXPECT_EQ(back->config().to_json(), c.to_json());
    EXPECT_EQ(values_of(back->workspace().parameters()), values_of(model->workspace().parameters())) << variant.name;
    const TestBatch batch = make_batch(c, 16, kSource, kTarget);
    EXPECT_EQ(step(rig, *back, batch).loss, step(rig, *model, batch).loss);
    model->set_logits_bias(std::vector<float>(static_cast<size_t>(c.target_vocab), 0.0f));
    EXPECT_NE(step(rig, *back, batch).loss, step(rig, *model, batch).loss);
    EXPECT_FALSE(model->logits_bias().defined());
    EXPECT_TRUE(back->logits_bias().defined());
    const auto names = ModelTensors(directory_).names();
    EXPECT_EQ(std::count(names.begin(), names.end(), "final_logits_bias"), 1);
    EXPECT_EQ(std::count(names.begin(), names.end(), "model.encoder.embed_positions.weight"),
              c.positions == Positions::kLearned);
    EXPECT_EQ(GenerationConfig::read(directory_).bad_words, (std::vector<std::vector<int64_t>>{{36}}));
  }
}

TEST_F(Directories, MastersAndResidualsAreSavedExactly) {
  for (const Precision precision : {Precision::kBF16Master, Precision::kBF16Residual}) {
    auto fp32 = make_model(tiny()), model = make_model(tiny(), precision);
    model->save(directory_);
    auto back = Transformer::load(directory_, {});
    EXPECT_EQ(values_of(back->workspace().parameters()), values_of(fp32->workspace().parameters()))
        << name_of(precision);
  }
}

TEST_F(Directories, SixteenBitFilesLoad) {
  Rig rig;
  auto model = make_model(tiny());
  const TestBatch batch = make_batch(tiny(), 17, kSource, kTarget);
  const double loss = evaluate(rig, *model, batch).loss;
  model->save(directory_, GenerationConfig::for_model(tiny()), DType::kBF16);
  EXPECT_EQ(SafetensorsFile(directory_ + "/model.safetensors").at("model.shared.weight").dtype, DType::kBF16);
  EXPECT_NEAR(evaluate(rig, *Transformer::load(directory_, {}), batch).loss, loss, 0.02 * loss);
  model->save(directory_);
  rewrite([](auto&) {}, DType::kF16);
  EXPECT_NEAR(evaluate(rig, *Transformer::load(directory_, {}), batch).loss, loss, 0.002 * loss);
}

TEST_F(Directories, TiedTensorsMayHaveAnyOfTheirNames) {
  auto model = make_model(tiny());
  model->save(directory_);
  rewrite([](auto& t) {
    t["model.encoder.embed_tokens.weight"] = t["lm_head.weight"] = t["model.shared.weight"];
    t["model.encoder.embed_positions.weight"] = {Shape{20, 16}, std::vector<float>(320)};
    t.erase("model.shared.weight");
    t.erase("final_logits_bias");
  });
  EXPECT_EQ(values_of(Transformer::load(directory_, {})->workspace().parameters()),
            values_of(model->workspace().parameters()));
  rewrite([](auto& t) { t["lm_head.weight"].second[3] += 1; });
  EXPECT_NE(error_of(directory_).find("are tied by the configuration but differ"), std::string::npos);
}

TEST_F(Directories, ErrorsListEveryTensorThatDoesNotFit) {
  make_model(tiny())->save(directory_);
  rewrite([](auto& t) {
    t.erase("model.encoder.layers.1.fc1.bias");
    t["model.decoder.layers.0.fc2.weight"] = {Shape{20, 16}, std::vector<float>(320)};
    t["model.extra.weight"] = {Shape{2}, std::vector<float>(2)};
    t["final_logits_bias"] = {Shape{37}, std::vector<float>(37)};
  });
  const std::string error = error_of(directory_);
  EXPECT_NE(error.find("model.encoder.layers.1.fc1.bias [24] is missing"), std::string::npos) << error;
  EXPECT_NE(error.find("model.decoder.layers.0.fc2.weight is [20, 16] in the file, the configuration says [16, 20]"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("model.extra.weight [2] is not part of the model"), std::string::npos) << error;
  EXPECT_NE(error.find("final_logits_bias is [37] in the file, the configuration says [1, 37]"), std::string::npos)
      << error;
  std::filesystem::remove(directory_ + "/config.json");
  EXPECT_NE(error_of(directory_).find("config.json"), std::string::npos);
}

std::string goldens() {
  const char* root = std::getenv("FRIT_SOURCE_DIR");
  return std::string(root ? root : ".") + "/tests/goldens/";
}

std::vector<int32_t> ints(const SafetensorsFile& file, const std::string& name) {
  const auto& entry = file.at(name);
  std::vector<int32_t> values(static_cast<size_t>(entry.shape.numel()));
  std::memcpy(values.data(), entry.data, values.size() * sizeof(int32_t));
  return values;
}
std::vector<float> floats(const SafetensorsFile& file, const std::string& name) {
  const auto& entry = file.at(name);
  std::vector<float> values(static_cast<size_t>(entry.shape.numel()));
  convert_to_f32(entry, values.data());
  return values;
}

// What transformers computed with models that it saved itself: tests/goldens/, made by tools/goldens/make_marian.py.
TEST(Goldens, MarianGivesTransformersLogitsLossAndGradients) {
  for (const char* name : {"marian_tiny", "marian_separate", "marian_uneven"}) {
    Rig rig;
    const std::string directory = goldens() + name;
    TransformerConfig c = without_dropout(TransformerConfig::from_json(read_file(directory + "/config.json")));
    Transformer model(c, {.training = true});
    model.load_weights(directory);
    const SafetensorsFile golden(directory + "/goldens.safetensors");
    const TestBatch batch = {ints(golden, "src_ids"), ints(golden, "src_offsets"), ints(golden, "tgt_ids"),
                             ints(golden, "labels"), ints(golden, "tgt_offsets")};
    const BatchView view = BatchView::of(batch);
    EXPECT_LT(difference(values_of(model.encode(rig.context, view.source_ids, view.source_offsets)),
                         floats(golden, "encoder_output")),
              1e-5);
    const std::vector<float> logits = values_of(model.logits(rig.context, view)), expected = floats(golden, "logits");
    ASSERT_EQ(logits.size(), expected.size());
    for (size_t i = 0; i < logits.size(); ++i) ASSERT_NEAR(logits[i], expected[i], 1e-4) << name;
    const Loss loss = step(rig, model, batch, smoothed(), 1.0f / static_cast<float>(batch.labels.size()));
    const double golden_loss = floats(golden, "loss")[0];
    EXPECT_NEAR(loss.loss / static_cast<double>(loss.tokens), golden_loss, 1e-5 * golden_loss) << name;
    int compared = 0;
    for (const auto& slice : model.workspace().layout().slices()) {
      const std::vector<float> gradient = values_of(model.workspace().gradient(slice.name)),
                               other = floats(golden, "grad." + slice.name);
      const double scale = norm_of(other.data(), slice.shape.numel());
      // The keys' bias has no gradient but rounding.
      if (scale < 1e-7) {
        EXPECT_LT(norm_of(gradient.data(), slice.shape.numel()), 1e-6) << slice.name;
      } else {
        EXPECT_LT(difference(gradient, other), 1e-4) << name << " " << slice.name;
      }
      ++compared;
    }
    EXPECT_EQ(compared, static_cast<int>(golden.entries().size()) - 10)
        << "gradients in the file that were not compared";
  }
}

TEST(Goldens, PreNormWithLearnedPositions) {
  Rig rig;
  const SafetensorsFile golden(goldens() + "layers.safetensors");
  TransformerConfig c;
  c.encoder_layers = 1, c.decoder_layers = 2, c.d_model = 16, c.encoder_heads = c.decoder_heads = 2;
  c.encoder_ffn_dim = c.decoder_ffn_dim = 24, c.source_vocab = 31, c.target_vocab = 29, c.max_positions = 12;
  c.activation = Activation::kGelu, c.pre_norm = true, c.positions = Positions::kLearned, c.share_embeddings = false;
  c.pad_id = c.start_id = 28, c.eos_id = 0;
  Transformer model(without_dropout(c), {.training = true});
  for (const auto& slice : model.workspace().layout().slices())
    model.workspace().set(slice.name, floats(golden, "model_pre." + slice.name).data(), slice.shape.numel());
  model.set_logits_bias(floats(golden, "model_pre.final_logits_bias"));
  const TestBatch batch = {ints(golden, "model_pre.src_ids"), ints(golden, "model_pre.src_offsets"),
                           ints(golden, "model_pre.tgt_ids"), ints(golden, "model_pre.labels"),
                           ints(golden, "model_pre.tgt_offsets")};
  const BatchView view = BatchView::of(batch);
  EXPECT_LT(difference(values_of(model.encode(rig.context, view.source_ids, view.source_offsets)),
                       floats(golden, "model_pre.encoder_output")),
            1e-5);
  EXPECT_LT(difference(values_of(model.logits(rig.context, view)), floats(golden, "model_pre.logits")), 1e-5);
  const Loss loss = step(rig, model, batch, smoothed(), 1.0f / static_cast<float>(batch.labels.size()));
  EXPECT_NEAR(loss.loss / static_cast<double>(loss.tokens), floats(golden, "model_pre.loss")[0], 1e-5);
  for (const auto& slice : model.workspace().layout().slices()) {
    const std::vector<float> gradient = values_of(model.workspace().gradient(slice.name)),
                             other = floats(golden, "model_pre.d" + slice.name);
    const double scale = norm_of(other.data(), slice.shape.numel());
    EXPECT_LT(difference(gradient, other) * scale, 1e-4 * scale + 1e-6) << slice.name;
  }
}

}  // namespace
}  // namespace frit
