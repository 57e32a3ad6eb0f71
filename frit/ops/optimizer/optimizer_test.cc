#include "frit/ops/optimizer/optimizer.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

namespace frit {
namespace {

constexpr Precision kPrecisions[] = {Precision::kF32, Precision::kBF16Master, Precision::kBF16Stochastic,
                                     Precision::kBF16Residual};
constexpr OptimizerKind kKinds[] = {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kSgd};

struct Runner {
  explicit Runner(int threads = 1) : pool(threads), context(pool, memory) {}
  ThreadPool pool;
  Memory memory;
  Context context;
};

// A workspace of one matrix and one vector, n elements together, filled from a seed.
std::unique_ptr<Workspace> make_workspace(Precision precision, DType gradient_dtype, int64_t n, uint32_t seed = 1) {
  ParameterLayout layout;
  const int64_t matrix = std::max<int64_t>(1, n / 2);
  layout.add("matrix", {1, matrix});
  if (n > matrix) layout.add("vector", {n - matrix});
  auto workspace = std::make_unique<Workspace>(std::move(layout), precision, true, 2, gradient_dtype);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (const auto& slice : workspace->layout().slices()) {
    std::vector<float> values(slice.shape.numel());
    for (float& x : values) x = normal(random);
    workspace->set(slice.name, values.data(), static_cast<int64_t>(values.size()));
  }
  return workspace;
}

void set_gradients(Workspace& workspace, uint32_t seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (const auto& slice : workspace.layout().slices()) {
    const Tensor g = workspace.gradient(slice.name);
    for (int64_t i = 0; i < g.numel(); ++i) {
      const bfloat16 value(scale * normal(random));  // the same numbers whatever the dtype
      if (g.dtype() == DType::kF32)
        g.data<float>()[i] = static_cast<float>(value);
      else
        g.data<bfloat16>()[i] = value;
    }
  }
}

std::vector<char> bits_of(const Workspace& workspace) {
  std::vector<char> bits;
  for (const Tensor& block :
       {workspace.parameters(), workspace.moment1(), workspace.moment2(), workspace.master(), workspace.residual()}) {
    if (!block.defined()) continue;
    const char* p = static_cast<const char*>(block.raw());
    bits.insert(bits.end(), p, p + block.bytes());
  }
  return bits;
}

std::vector<float> values_of(const Workspace& workspace) {
  std::vector<float> all;
  for (const auto& slice : workspace.layout().slices()) {
    std::vector<float> values(slice.shape.numel());
    workspace.get(slice.name, values.data(), static_cast<int64_t>(values.size()));
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

float value_at(const Tensor& t, int64_t i) {
  return t.dtype() == DType::kF32 ? t.data<float>()[i] : static_cast<float>(t.data<bfloat16>()[i]);
}

// The update written element by element, from the definition; fp32 with every operation rounded.
void reference_step(const OptimizerArgs& a, const OptimizerStep& s, Workspace& w) {
  const double lr = s.learning_rate;
  for (int64_t i = 0; i < w.layout().elements(); ++i) {
    const double decay = i < a.decay_end ? a.weight_decay : 0;
    float p = w.precision() == Precision::kBF16Master ? w.master().data<float>()[i] : value_at(w.parameters(), i);
    if (w.precision() == Precision::kBF16Residual)
      p = join_float({w.parameters().data<bfloat16>()[i].bits, w.residual().data<bfloat16>()[i].bits});
    float g = s.gradient_scale * value_at(w.gradients(), i);
    if (a.kind != OptimizerKind::kAdamW) g = g + static_cast<float>(decay) * p;
    float& m = w.moment1().data<float>()[i];
    if (a.kind == OptimizerKind::kSgd) {
      if (a.momentum != 0) {
        m = m * static_cast<float>(a.momentum) + g;
        g = m;
      }
      p = p + static_cast<float>(-lr) * g;
    } else {
      if (a.kind == OptimizerKind::kAdamW) p = p * static_cast<float>(1 - lr * decay);
      float& v = w.moment2().data<float>()[i];
      m = 1 - a.beta1 < 0.5 ? m + static_cast<float>(1 - a.beta1) * (g - m) : g - static_cast<float>(a.beta1) * (g - m);
      v = v * static_cast<float>(a.beta2) + static_cast<float>(1 - a.beta2) * g * g;
      const double bias1 = 1 - std::pow(a.beta1, s.step), bias2 = 1 - std::pow(a.beta2, s.step);
      const float denominator = std::sqrt(v) / static_cast<float>(std::sqrt(bias2)) + static_cast<float>(a.eps);
      p = p + static_cast<float>(-lr / bias1) * m / denominator;
    }
    switch (w.precision()) {
      case Precision::kF32:
        w.parameters().data<float>()[i] = p;
        break;
      case Precision::kBF16Master:
        w.master().data<float>()[i] = p;
        w.parameters().data<bfloat16>()[i] = bfloat16(p);
        break;
      case Precision::kBF16Stochastic: {
        const PhiloxBlock block =
            philox({a.seed, static_cast<uint32_t>(s.step)}, static_cast<uint32_t>(i / 8), 0, 0, kRoundingSite);
        const uint32_t random = block.v[i % 8 / 2] >> (16 * (i % 2)) & 0xffffu;
        w.parameters().data<bfloat16>()[i] =
            bfloat16::from_bits(static_cast<uint16_t>((std::bit_cast<uint32_t>(p) + random) >> 16));
        break;
      }
      case Precision::kF16Master:
      case Precision::kF16Stochastic:
        FAIL() << "the CPU has no fp16";
      case Precision::kBF16Residual: {
        const SplitFloat split = split_float(p);
        w.parameters().data<bfloat16>()[i] = bfloat16::from_bits(split.high);
        w.residual().data<bfloat16>()[i] = bfloat16::from_bits(split.low);
        break;
      }
    }
  }
}

TEST(Optimizer, EqualsTheDefinitionBitForBit) {
  Runner runner(2);
  for (const OptimizerKind kind : kKinds) {
    for (const Precision precision : kPrecisions) {
      for (const DType gradient_dtype : {DType::kF32, DType::kBF16}) {
        if (precision == Precision::kF32 && gradient_dtype == DType::kBF16) continue;
        for (const int64_t n : {1, 31, 64, 1000, 50001}) {
          for (const bool plain : {true, false}) {
            if (plain && n > 1000) continue;
            auto ours = make_workspace(precision, gradient_dtype, n),
                 theirs = make_workspace(precision, gradient_dtype, n);
            OptimizerArgs args{.kind = kind, .seed = 42};
            if (!plain) {
              args.beta1 = 0.3, args.momentum = 0.5, args.weight_decay = 0.1;
              args.decay_end = n == 1000 ? 333 : ours->layout().decay_end();
            } else {
              args.momentum = 0;
            }
            for (int64_t step = 1; step <= 4; ++step) {
              const OptimizerStep now{.learning_rate = 0.01 / static_cast<double>(step),
                                      .step = step,
                                      .gradient_scale = plain ? 1.0f : 0.37f};
              for (Workspace* w : {ours.get(), theirs.get()}) set_gradients(*w, static_cast<uint32_t>(step));
              optimizer_step(runner.context, args, now, *ours);
              reference_step(args, now, *theirs);
              ASSERT_EQ(bits_of(*ours) == bits_of(*theirs), true)
                  << name_of(kind) << " " << name_of(precision) << " " << n << " step " << step << " plain " << plain;
            }
          }
        }
      }
    }
  }
}

TEST(Optimizer, EqualsTorch) {
  const char* root = std::getenv("FRIT_SOURCE_DIR");
  std::ifstream file(std::string(root ? root : ".") + "/frit/ops/optimizer/torch_golden.json");
  ASSERT_TRUE(file) << "torch_golden.json is not found: set FRIT_SOURCE_DIR to the repository's root";
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_EQ(golden["cases"].size(), 16u);
  Runner runner;
  int64_t compared = 0, same = 0;
  for (const auto& c : golden["cases"]) {
    const std::vector<float> start = c["start"];
    const int64_t n = static_cast<int64_t>(start.size());
    ParameterLayout layout;
    layout.add("p", {1, n});
    Workspace w(std::move(layout), Precision::kF32, true);
    w.set("p", start.data(), n);
    OptimizerArgs args{.kind = parse_optimizer(c["kind"].get<std::string>()), .decay_end = w.layout().decay_end()};
    args.weight_decay = c["options"]["weight_decay"];
    if (args.kind == OptimizerKind::kSgd) {
      args.momentum = c["options"]["momentum"];
    } else {
      args.beta1 = c["options"]["betas"][0], args.beta2 = c["options"]["betas"][1], args.eps = c["options"]["eps"];
    }
    for (size_t step = 0; step < c["results"].size(); ++step) {
      const std::vector<float> gradient = c["gradients"][step], expected = c["results"][step];
      std::memcpy(w.gradient("p").raw(), gradient.data(), n * sizeof(float));
      optimizer_step(runner.context, args, {.learning_rate = c["rates"][step], .step = static_cast<int64_t>(step) + 1},
                     w);
      for (int64_t i = 0; i < n; ++i) {
        const float got = w.parameter("p").data<float>()[i];
        // Two units in the last place of the parameter or of the update (the compiler fuses some of torch's
        // operations).
        EXPECT_NEAR(got, expected[i], 2.4e-7 * std::max(std::abs(expected[i]), 0.01f))
            << c["kind"] << c["options"] << " step " << step + 1;
        ++compared, same += got == expected[i];
      }
    }
  }
  EXPECT_GE(same, compared * 9 / 10);
}

TEST(Optimizer, SliceBySliceIsTheWhole) {
  for (const OptimizerKind kind : kKinds) {
    for (const Precision precision : kPrecisions) {
      const OptimizerArgs args{.kind = kind, .weight_decay = 0.01, .decay_end = 3000, .seed = 9};
      std::vector<std::vector<char>> results;
      for (const int way : {0, 1, 2, 3}) {
        Runner runner(way == 3 ? 3 : 1);
        auto w = make_workspace(precision, compute_dtype(precision), 40000);
        const int64_t n = w->layout().elements();
        for (int64_t step = 1; step <= 2; ++step) {
          set_gradients(*w, static_cast<uint32_t>(step));
          const OptimizerStep now{.learning_rate = 1e-3, .step = step};
          if (way == 0 || way == 3) optimizer_step(runner.context, args, now, *w);
          if (way == 1)
            for (int64_t at = 0, size = 1; at < n; at += size, size = size * 3 + 1)  // odd cuts
              optimizer_step(runner.context, args, now, *w, at, std::min(n, at + size));
          if (way == 2) {  // from the end, ranges that touch in the middle of everything
            optimizer_step(runner.context, args, now, *w, 20011, n);
            optimizer_step(runner.context, args, now, *w, 17, 20011);
            optimizer_step(runner.context, args, now, *w, 17, 17);
            optimizer_step(runner.context, args, now, *w, 0, 17);
          }
        }
        results.push_back(bits_of(*w));
      }
      for (int way = 1; way < 4; ++way) EXPECT_TRUE(results[way] == results[0]) << name_of(precision) << " " << way;
    }
  }
}

TEST(Optimizer, RangeLeavesTheRestAlone) {
  Runner runner;
  auto w = make_workspace(Precision::kBF16Residual, DType::kBF16, 500);
  set_gradients(*w, 1);
  const std::vector<float> before = values_of(*w);
  optimizer_step(runner.context, {}, {.learning_rate = 1e-2}, *w, 5, 38);
  const std::vector<float> after = values_of(*w);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(before[i] != after[i], 5 <= i && i < 38) << i;
}

TEST(Optimizer, ResidualIsTheFp32MasterBitForBit) {
  for (const OptimizerKind kind : kKinds) {
    Runner runner;
    auto master = make_workspace(Precision::kBF16Master, DType::kBF16, 5000);
    auto residual = make_workspace(Precision::kBF16Residual, DType::kBF16, 5000);
    auto fp32 = make_workspace(Precision::kF32, DType::kF32, 5000);
    const OptimizerArgs args{.kind = kind, .weight_decay = 0.01, .decay_end = 1000};
    for (int64_t step = 1; step <= 60; ++step) {
      for (Workspace* w : {master.get(), residual.get(), fp32.get()}) {
        set_gradients(*w, static_cast<uint32_t>(step), step % 5 ? 1e-3f : 10.0f);
        optimizer_step(runner.context, args, {.learning_rate = 1e-3, .step = step}, *w);
      }
      const std::vector<float> expected = values_of(*fp32);
      ASSERT_EQ(values_of(*master), expected) << step;
      ASSERT_EQ(values_of(*residual), expected) << step;
    }
    // The bf16 parameters differ at exact halves alone.
    const bfloat16 *a = master->parameters().data<bfloat16>(), *b = residual->parameters().data<bfloat16>();
    const bfloat16* low = residual->residual().data<bfloat16>();
    for (int64_t i = 0; i < master->layout().elements(); ++i) {
      if (low[i].bits != 0x8000) {
        ASSERT_EQ(a[i].bits, b[i].bits);
      }
    }
  }
}

TEST(Optimizer, StochasticRoundingIsUnbiasedAndIndependent) {
  Runner runner;
  constexpr int64_t kN = 1 << 18;
  ParameterLayout layout;
  layout.add("p", {kN});
  Workspace w(std::move(layout), Precision::kBF16Stochastic, true, 0);
  const bfloat16* p = w.parameters().data<bfloat16>();
  // p = start - lr * g: an exact fp32 number at a known share of the way from one bf16 number to the next.
  for (const float start : {1.0f, -3.0f}) {
    for (const double share : {1.0 / 65536, 0.1, 0.5, 0.75, 65535.0 / 65536}) {
      const float spacing = std::abs(start) * 0x1p-7f / (start < 0 ? 1.5f : 1);
      std::vector<float> values(kN, start), gradients(kN);
      w.set("p", values.data(), kN);
      const float exact_share = static_cast<float>(std::round(share * 65536) / 65536);
      for (int64_t i = 0; i < kN; ++i) w.gradient("p").data<float>()[i] = -std::copysign(exact_share * spacing, start);
      optimizer_step(runner.context, {.kind = OptimizerKind::kSgd, .momentum = 0, .seed = 3},
                     {.learning_rate = 1, .step = 5}, w);
      int64_t up = 0, pairs = 0, eighths = 0;
      for (int64_t i = 0; i < kN; ++i) {
        const float value = static_cast<float>(p[i]);
        ASSERT_TRUE(value == start || value == start + std::copysign(spacing, start)) << value;
        up += value != start;
        if (i + 8 < kN) pairs += value != start && p[i + 1].bits == p[i].bits;
        if (i + 8 < kN) eighths += value != start && p[i + 8].bits == p[i].bits;
      }
      const double q = exact_share, deviation = std::sqrt(q * (1 - q) * kN);
      EXPECT_NEAR(up, q * kN, 4.5 * deviation) << start << " " << share;
      const double pair_deviation = std::sqrt(3 * q * q * (1 - q * q) * kN) + 3;
      EXPECT_NEAR(pairs, q * q * kN, 4.5 * pair_deviation) << "neighbours";
      EXPECT_NEAR(eighths, q * q * kN, 4.5 * pair_deviation) << "same place of two blocks";
    }
  }
}

TEST(Optimizer, StochasticRoundingHangsOnSeedAndStep) {
  Runner runner;
  std::vector<std::vector<char>> results;
  for (const auto& [seed, step] : {std::pair<uint32_t, int64_t>{1, 1}, {2, 1}, {1, 2}, {1, 1}}) {
    auto w = make_workspace(Precision::kBF16Stochastic, DType::kBF16, 1000);
    set_gradients(*w, 1);
    optimizer_step(runner.context, {.kind = OptimizerKind::kSgd, .momentum = 0, .seed = seed},
                   {.learning_rate = 1e-3, .step = step}, *w);
    results.push_back(bits_of(*w));
  }
  EXPECT_NE(results[0], results[1]);
  EXPECT_NE(results[0], results[2]);
  EXPECT_EQ(results[0], results[3]);
}

// 2000 gammas at 1 with targets 1 + U(-0.05, 0.05), squared error, Adam at 1e-3, 1000 steps. The gradient is taken from
// the parameter that the model sees. Returns the errors of the fp32 values.
struct Learnt {
  double mean_error, worst_error;  // of the parameter the model sees
  int64_t unmoved;
  std::vector<float> values;
};
Learnt learn_gammas(Precision precision, bool forget_master) {
  Runner runner;
  constexpr int64_t kN = 2000;
  ParameterLayout layout;
  layout.add("gamma", {kN});
  Workspace w(std::move(layout), precision, true);
  std::vector<float> ones(kN, 1.0f), targets(kN);
  w.set("gamma", ones.data(), kN);
  std::mt19937 random(11);
  for (float& t : targets) t = 1 + std::uniform_real_distribution<float>(-0.05f, 0.05f)(random);
  const Tensor p = w.parameter("gamma"), g = w.gradient("gamma");
  for (int64_t step = 1; step <= 1000; ++step) {
    for (int64_t i = 0; i < kN; ++i) g.data<float>()[i] = 2 * (value_at(p, i) - targets[i]);
    optimizer_step(runner.context, {.seed = 1}, {.learning_rate = 1e-3, .step = step}, w);
    if (forget_master)  // bf16 alone: what was rounded away is lost
      for (int64_t i = 0; i < kN; ++i) w.master().data<float>()[i] = value_at(p, i);
  }
  Learnt result{0, 0, 0, std::vector<float>(kN)};
  w.get("gamma", result.values.data(), kN);
  for (int64_t i = 0; i < kN; ++i) {
    const double error = std::abs(value_at(p, i) - targets[i]);
    result.mean_error += error / kN;
    result.worst_error = std::max(result.worst_error, error);
    result.unmoved += value_at(p, i) == 1.0f;
  }
  return result;
}

TEST(Optimizer, UpdatesBelowHalfASpacingAreLostInBf16AloneAndKeptByTheRemedies) {
  const Learnt alone = learn_gammas(Precision::kBF16Master, true), fp32 = learn_gammas(Precision::kF32, false),
               master = learn_gammas(Precision::kBF16Master, false),
               residual = learn_gammas(Precision::kBF16Residual, false),
               stochastic = learn_gammas(Precision::kBF16Stochastic, false);
  EXPECT_EQ(alone.unmoved, 2000);  // the spacing below 1 is 2^-8: 1e-3 is under half of it
  EXPECT_LT(fp32.worst_error, 2e-3);
  // The remedies arrive within a spacing (2^-7 above 1), where bf16 alone stays 0.025 off on average.
  EXPECT_NEAR(alone.mean_error, 0.025, 0.001);
  EXPECT_LT(master.worst_error, 0x1p-7);
  EXPECT_LT(master.mean_error, 0x1p-8);
  EXPECT_LT(stochastic.mean_error, 0x1p-7);
  EXPECT_LT(stochastic.worst_error, 4 * 0x1p-7);
  // Halves are rounded differently, so the residual run sees other gradients there; it arrives as well.
  EXPECT_LT(residual.worst_error, 0x1p-7);
  EXPECT_LT(residual.mean_error, 0x1p-8);
  RecordProperty("mean_error_fp32", std::to_string(fp32.mean_error));
  RecordProperty("mean_error_master", std::to_string(master.mean_error));
  RecordProperty("mean_error_stochastic", std::to_string(stochastic.mean_error));
  RecordProperty("worst_error_stochastic", std::to_string(stochastic.worst_error));
  RecordProperty("worst_error_fp32", std::to_string(fp32.worst_error));
}

TEST(Optimizer, PaddingStaysZero) {
  for (const Precision precision : kPrecisions) {
    for (const OptimizerKind kind : kKinds) {
      Runner runner;
      auto w = make_workspace(precision, compute_dtype(precision), 77);
      const OptimizerArgs args{.kind = kind, .weight_decay = 0.1, .decay_end = w->layout().elements()};
      for (int64_t step = 1; step <= 3; ++step) {
        set_gradients(*w, static_cast<uint32_t>(step));
        optimizer_step(runner.context, args, {.learning_rate = 0.1, .step = step}, *w);
      }
      std::vector<char> used(w->layout().elements());
      for (const auto& s : w->layout().slices()) std::fill_n(used.begin() + s.offset, s.shape.numel(), 1);
      int64_t padding = 0;
      for (int64_t i = 0; i < w->layout().elements(); ++i) {
        if (used[i]) continue;
        ++padding;
        EXPECT_EQ(value_at(w->parameters(), i), 0);
        EXPECT_EQ(value_at(w->moment1(), i), 0);
        EXPECT_EQ(value_at(w->moment2(), i), 0);
      }
      EXPECT_EQ(padding, 128 - 77);
    }
  }
}

TEST(Optimizer, NotFiniteStaysNotFinite) {
  // Rounding works on the bits: adding to a NaN's must not run over into the sign and make a number of it.
  Runner runner;
  for (const Precision precision : kPrecisions) {
    for (const uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7fc00000u, 0x7f800001u, 0x7f800000u, 0xff800000u}) {
      auto w = make_workspace(precision, DType::kF32, 128);
      const Tensor g = w->gradient("matrix");
      for (int64_t i = 0; i < g.numel(); ++i) std::memcpy(g.data<float>() + i, &bits, sizeof(bits));
      optimizer_step(runner.context, {.kind = OptimizerKind::kSgd, .momentum = 0}, {.learning_rate = 1}, *w);
      const bool infinite = (bits & 0x7fffffff) == 0x7f800000u;
      std::vector<float> values(g.numel());
      w->get("matrix", values.data(), g.numel());
      for (int64_t i = 0; i < g.numel(); ++i) {
        const float seen = value_at(w->parameter("matrix"), i);
        EXPECT_TRUE(infinite ? std::isinf(seen) : std::isnan(seen)) << name_of(precision) << " " << std::hex << bits;
        EXPECT_TRUE(infinite ? std::isinf(values[i]) : std::isnan(values[i])) << name_of(precision);
      }
    }
  }
}

// A copy of a tensor in a GPU's memory.
class OnGpu {
 public:
  OnGpu(Gpu& gpu, const Tensor& host) : gpu_(gpu), host_(host) {
    if (!host.defined()) return;
    p_ = gpu.allocate(static_cast<size_t>(host.bytes()));
    gpu.born(p_, static_cast<size_t>(host.bytes()), host.dtype());
    gpu.upload(p_, host.raw(), static_cast<size_t>(host.bytes()));
  }
  ~OnGpu() {
    if (!p_) return;
    gpu_.died(p_);
    gpu_.release(p_);
  }
  OnGpu(const OnGpu&) = delete;
  Tensor tensor() const { return p_ ? Tensor(p_, host_.dtype(), host_.shape(), gpu_.device()) : Tensor(); }
  std::vector<char> bits() const {
    std::vector<char> result(p_ ? host_.bytes() : 0);
    if (p_) gpu_.download(result.data(), p_, result.size());
    return result;
  }

 private:
  Gpu& gpu_;
  Tensor host_;
  void* p_ = nullptr;
};
// The blocks of a workspace, copied to a GPU.
struct BlocksOnGpu {
  OnGpu parameters, gradients, moment1, moment2, master, residual;
  BlocksOnGpu(Gpu& gpu, const Workspace& w)
      : parameters(gpu, w.parameters()),
        gradients(gpu, w.gradients()),
        moment1(gpu, w.moment1()),
        moment2(gpu, w.moment2()),
        master(gpu, w.master()),
        residual(gpu, w.residual()) {}
  OptimizerBlocks blocks(Precision precision) const {
    return {precision,        parameters.tensor(), gradients.tensor(), moment1.tensor(),
            moment2.tensor(), master.tensor(),     residual.tensor()};
  }
  std::vector<char> bits() const {
    std::vector<char> all;
    for (const OnGpu* block : {&parameters, &moment1, &moment2, &master, &residual}) {
      const std::vector<char> bits = block->bits();
      all.insert(all.end(), bits.begin(), bits.end());
    }
    return all;
  }
};

TEST(OptimizerGpu, HasTheBitsOfTheCpu) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu;
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  for (const OptimizerKind kind : kKinds) {
    for (const Precision precision : kPrecisions) {
      for (const DType gradient_dtype : {DType::kF32, compute_dtype(precision)}) {
        auto w = make_workspace(precision, gradient_dtype, 900);
        set_gradients(*w, 3, 0.1f);
        BlocksOnGpu whole(*gpu, *w), slices(*gpu, *w);
        const int64_t n = w->layout().elements();
        const OptimizerArgs args{.kind = kind, .beta1 = 0.7, .weight_decay = 0.01, .decay_end = 333, .seed = 9};
        for (int64_t step = 1; step <= 3; ++step) {
          const OptimizerStep now{.learning_rate = 1e-2, .step = step, .gradient_scale = 0.37f};
          optimizer_step(cpu.context, args, now, *w);
          optimizer_step(context, args, now, whole.blocks(precision));
          for (int64_t at = 0, size = 1; at < n; at += size, size = size * 3 + 1)
            optimizer_step(context, args, now, slices.blocks(precision), at, std::min(n, at + size));
        }
        gpu->synchronize();
        EXPECT_TRUE(whole.bits() == bits_of(*w)) << name_of(kind) << " " << name_of(precision);
        EXPECT_TRUE(slices.bits() == bits_of(*w)) << name_of(kind) << " " << name_of(precision) << " by slices";
      }
    }
  }
}

// 16 bits alone, rounded to nearest: from the same start, the first step is that of an fp32 master; and small updates
// are lost.
TEST(OptimizerGpu, NearestIsSixteenBitsAlone) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu;
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  const OptimizerArgs args{.weight_decay = 0.01, .decay_end = 100, .nearest = true};
  const OptimizerStep now{.learning_rate = 1e-2};
  for (const auto& [alone, master] : {std::pair{Precision::kBF16Stochastic, Precision::kBF16Master},
                                      std::pair{Precision::kF16Stochastic, Precision::kF16Master}}) {
    const DType dtype = compute_dtype(alone);
    auto narrow = make_workspace(alone, DType::kF32, 500), wide = make_workspace(master, DType::kF32, 500);
    for (const auto& slice : wide->layout().slices()) {
      std::vector<float> values(slice.shape.numel());
      narrow->get(slice.name, values.data(), slice.shape.numel());
      wide->set(slice.name, values.data(), slice.shape.numel());
    }
    for (Workspace* w : {narrow.get(), wide.get()}) set_gradients(*w, 2);
    BlocksOnGpu a(*gpu, *narrow), b(*gpu, *wide);
    optimizer_step(context, args, now, a.blocks(alone));
    optimizer_step(context, args, now, b.blocks(master));
    gpu->synchronize();
    EXPECT_TRUE(a.parameters.bits() == b.parameters.bits()) << name_of(alone);
    if (dtype == DType::kBF16) {
      optimizer_step(cpu.context, args, now, *narrow);
      EXPECT_TRUE(a.bits() == bits_of(*narrow));
    }
    // At 1, half a spacing is 2^-11 in fp16 and 2^-8 in bf16.
    for (const double rate : {1e-4, 1e-2}) {
      const std::vector<float> ones(250, 1.0f);
      narrow->set("matrix", ones.data(), 250);
      for (int64_t i = 0; i < 250; ++i) narrow->gradient("matrix").data<float>()[i] = -1;
      BlocksOnGpu fresh(*gpu, *narrow);
      const std::vector<char> before = fresh.parameters.bits();
      optimizer_step(context, {.kind = OptimizerKind::kSgd, .momentum = 0, .nearest = true}, {.learning_rate = rate},
                     fresh.blocks(alone), 0, 250);
      gpu->synchronize();
      EXPECT_EQ(fresh.parameters.bits() == before, rate < 1e-3) << name_of(alone) << " " << rate;
    }
  }
}

TEST(OptimizerGpu, StochasticFp16IsUnbiasedAndKeepsFiniteNumbersFinite) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu;
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  constexpr int64_t kN = 1 << 14;
  ParameterLayout layout;
  layout.add("p", {kN});
  // A number, the fp16 number above it in magnitude, and how far the new value is on the way.
  struct Way {
    float start, next;
    double share;
  };
  for (const Way way : {Way{1.0f, 1.0f + 0x1p-10f, 0.1},
                        {-3.0f, -3.0f - 0x1p-9f, 0.75},
                        {0x1p-14f, 0x1.004p-14f, 0.5},
                        {0x1p-20f, 0x1.1p-20f, 0.3},
                        {0.0f, 0x1p-24f, 0.25},
                        {0.0f, -0x1p-24f, 0.6},
                        {0x1.ff8p-15f, 0x1p-14f, 0.4}}) {
    const float next = way.next;
    Workspace w(layout, Precision::kF16Stochastic, true, 0);
    const std::vector<float> values(kN, way.start);
    w.set("p", values.data(), kN);
    for (int64_t i = 0; i < kN; ++i)
      w.gradient("p").data<float>()[i] = static_cast<float>(-way.share * (static_cast<double>(next) - way.start));
    BlocksOnGpu on_gpu(*gpu, w);
    optimizer_step(context, {.kind = OptimizerKind::kSgd, .momentum = 0, .seed = 3}, {.learning_rate = 1, .step = 5},
                   on_gpu.blocks(w.precision()));
    gpu->synchronize();
    const std::vector<char> bits = on_gpu.parameters.bits();
    int64_t up = 0;
    for (int64_t i = 0; i < kN; ++i) {
      uint16_t b;
      std::memcpy(&b, bits.data() + 2 * i, 2);
      const float value = static_cast<float>(float16::from_bits(b));
      ASSERT_TRUE(value == way.start || value == next) << value << " from " << way.start;
      up += value != way.start;
    }
    EXPECT_NEAR(up, way.share * kN, 4.5 * std::sqrt(way.share * (1 - way.share) * kN)) << way.start;
  }
  // Between 65504 and 65520 rounding to nearest stays finite, and so does this; behind it both end.
  for (const auto& [value, expected] : {std::pair{65519.0f, 65504.0f},
                                        {-65519.0f, -65504.0f},
                                        {65520.0f, INFINITY},
                                        {-1e30f, -INFINITY},
                                        {INFINITY, INFINITY}}) {
    Workspace w(layout, Precision::kF16Stochastic, true, 0);
    for (int64_t i = 0; i < kN; ++i) w.gradient("p").data<float>()[i] = -value;
    BlocksOnGpu on_gpu(*gpu, w);
    optimizer_step(context, {.kind = OptimizerKind::kSgd, .momentum = 0}, {.learning_rate = 1},
                   on_gpu.blocks(w.precision()));
    gpu->synchronize();
    const std::vector<char> bits = on_gpu.parameters.bits();
    for (int64_t i = 0; i < kN; ++i) {
      uint16_t b;
      std::memcpy(&b, bits.data() + 2 * i, 2);
      ASSERT_EQ(static_cast<float>(float16::from_bits(b)), expected) << value;
    }
  }
}

TEST(OptimizerGpu, IndicesPast2To31) {
  // Blocks of 2^31 + 96 elements, of which a few are touched.
  constexpr int64_t kN = (int64_t{1} << 31) + 96, kBegin = (int64_t{1} << 31) - 32;
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu;
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  std::vector<bfloat16> zeros(kN - kBegin), got(kN - kBegin);
  std::vector<float> gradients(kN - kBegin);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = static_cast<float>(i + 1);
  const auto block = [&](DType dtype, const void* values) {
    const int64_t bytes = kN * size_of(dtype), skipped = kBegin * size_of(dtype);
    char* p = static_cast<char*>(gpu->allocate(static_cast<size_t>(bytes)));
    gpu->born(p, static_cast<size_t>(bytes), dtype);
    gpu->upload(p + skipped, values, static_cast<size_t>(bytes - skipped));
    return Tensor(p, dtype, Shape{kN}, gpu->device());
  };
  const OptimizerBlocks blocks{.precision = Precision::kBF16Stochastic,
                               .parameters = block(DType::kBF16, zeros.data()),
                               .gradients = block(DType::kF32, gradients.data()),
                               .moment1 = {},
                               .moment2 = {},
                               .master = {},
                               .residual = {}};
  optimizer_step(context, {.kind = OptimizerKind::kSgd, .momentum = 0, .decay_end = kN}, {.learning_rate = 1}, blocks,
                 kBegin, kN);
  gpu->synchronize();
  gpu->download(got.data(), blocks.parameters.data<bfloat16>() + kBegin, got.size() * sizeof(bfloat16));
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(static_cast<float>(got[i]), -gradients[i]) << i;
  for (const Tensor& t : {blocks.parameters, blocks.gradients}) {
    gpu->died(t.raw());
    gpu->release(t.raw());
  }
}

TEST(Optimizer, Fp16NeedsAGpu) {
  Runner runner;
  for (const Precision precision : {Precision::kF16Master, Precision::kF16Stochastic}) {
    ParameterLayout layout;
    layout.add("p", {8});
    Workspace w(std::move(layout), precision, true);
    EXPECT_THROW(optimizer_step(runner.context, {}, {.learning_rate = 0.1}, w), std::invalid_argument);
  }
}

TEST(Optimizer, PreparedIsWhatTheHostReckons) {
  Runner runner;
  auto ours = make_workspace(Precision::kBF16Stochastic, DType::kBF16, 500),
       theirs = make_workspace(Precision::kBF16Stochastic, DType::kBF16, 500);
  const OptimizerArgs args{.weight_decay = 0.1, .decay_end = 200, .seed = 4};
  double numbers[kOptimizerNumbers] = {}, squares = 0;
  float prepared[kOptimizerConstants], loss_scale = 8;
  int32_t not_finite = 0;
  const OptimizerState state{Tensor(numbers, DType::kF64, {kOptimizerNumbers}), Tensor(&loss_scale, DType::kF32, {1}),
                             Tensor(prepared, DType::kF32, {kOptimizerConstants})};
  const Tensor squares_tensor(&squares, DType::kF64, {1}), flag(&not_finite, DType::kI32, {1});
  int64_t updates = 0;
  for (int64_t attempt = 1; attempt <= 6; ++attempt) {
    for (Workspace* w : {ours.get(), theirs.get()}) set_gradients(*w, static_cast<uint32_t>(attempt));
    numbers[kLearningRate] = 0.01 / static_cast<double>(attempt);
    not_finite = attempt == 3;
    squares = attempt == 5 ? 0.01 : 1e6;
    const float scale_now = loss_scale;
    optimizer_prepare(runner.context, args, {.max_norm = 2, .growth_interval = 2}, squares_tensor, flag, state);
    optimizer_step(runner.context, args, {.prepared = state.prepared}, *ours);
    if (attempt != 3) {
      const double norm = std::sqrt(squares) / scale_now;
      optimizer_step(runner.context, args,
                     {.learning_rate = 0.01 / static_cast<double>(attempt),
                      .step = ++updates,
                      .gradient_scale = static_cast<float>((norm > 2 ? 2 / norm : 1) / scale_now)},
                     *theirs);
    }
    ASSERT_TRUE(bits_of(*ours) == bits_of(*theirs)) << attempt;
    const float scales[] = {8, 16, 8, 8, 16, 16};  // doubled by the second of two good steps, halved by the third step
    EXPECT_EQ(loss_scale, scales[attempt - 1]) << attempt;
  }
  EXPECT_EQ(numbers[kUpdates], 5);
  EXPECT_EQ(numbers[kSkipped], 1);
  EXPECT_THROW(optimizer_prepare(runner.context, args, {.max_norm = 2}, Tensor(), flag, state), std::invalid_argument);
  EXPECT_THROW(optimizer_prepare(runner.context, args, {.max_norm = -1}, squares_tensor, flag, state),
               std::invalid_argument);
  EXPECT_THROW(optimizer_step(runner.context, args, {.prepared = squares_tensor}, *ours), std::invalid_argument);
}

TEST(Optimizer, Errors) {
  Runner runner;
  const auto message_of = [&](const OptimizerArgs& args, const OptimizerStep& step, Workspace& w, int64_t begin = 0,
                              int64_t end = -1) -> std::string {
    try {
      optimizer_step(runner.context, args, step, w, begin, end);
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "no error";
  };
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  ParameterLayout layout;
  layout.add("p", {8});
  Workspace inference(layout, Precision::kF32, false), one(layout, Precision::kF32, true, 1),
      none(layout, Precision::kF32, true, 0), full(layout, Precision::kF32, true);
  const OptimizerStep step{.learning_rate = 0.1};
  EXPECT_PRED2(contains, message_of({}, step, inference), "without training");
  EXPECT_PRED2(contains, message_of({}, step, one), "moment2 is missing");
  EXPECT_PRED2(contains, message_of({.kind = OptimizerKind::kSgd}, step, none), "moment1 is missing");
  EXPECT_EQ(message_of({.kind = OptimizerKind::kSgd}, step, one), "no error");
  EXPECT_EQ(message_of({.kind = OptimizerKind::kSgd, .momentum = 0}, step, none), "no error");
  EXPECT_PRED2(contains, message_of({}, step, full, 3, 65), "elements 3 to 65 of 64");
  EXPECT_PRED2(contains, message_of({}, step, full, 4, 3), "elements 4 to 3");
  EXPECT_PRED2(contains, message_of({.beta1 = 1}, step, full), "beta1");
  EXPECT_PRED2(contains, message_of({.eps = 0}, step, full), "eps is 0");
  EXPECT_PRED2(contains, message_of({}, {.learning_rate = 0.1, .step = 0}, full), "step is 0");
  EXPECT_PRED2(contains, message_of({}, {.learning_rate = NAN}, full), "learning rate is nan");
  EXPECT_PRED2(contains, message_of({.weight_decay = -1}, step, full), "weight decay is -1");
  EXPECT_THROW(parse_optimizer("adagrad"), Error);
  for (const OptimizerKind kind : kKinds) EXPECT_EQ(parse_optimizer(name_of(kind)), kind);
}

TEST(Optimizer, PlanningComputesNothing) {
  Runner runner;
  auto w = make_workspace(Precision::kF32, DType::kF32, 100);
  set_gradients(*w, 1);
  const std::vector<char> before = bits_of(*w);
  runner.memory.begin_recording();
  optimizer_step(runner.context, {}, {.learning_rate = 0.1}, *w);
  EXPECT_TRUE(runner.memory.end_recording().empty());  // and needs no scratch
  EXPECT_EQ(bits_of(*w), before);
}

TEST(Optimizer, OneParallelRegion) {
  Runner runner(2);
  auto w = make_workspace(Precision::kF32, DType::kF32, 100000);
  const int64_t before = runner.pool.regions();
  optimizer_step(runner.context, {.weight_decay = 0.1, .decay_end = 50000}, {.learning_rate = 0.1}, *w);
  EXPECT_EQ(runner.pool.regions(), before + 1);
}

TEST(Optimizer, IndicesPast2To31) {
  // Blocks of 2^32 + 96 elements in memory that is only mapped; the range touches a few pages.
  constexpr int64_t kN = (int64_t{1} << 32) + 96, kBegin = (int64_t{1} << 32) - 32;
  std::vector<std::pair<void*, size_t>> mapped;
  const auto block = [&](DType dtype) {
    const size_t bytes = static_cast<size_t>(kN * size_of(dtype));
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(p, MAP_FAILED);
    mapped.emplace_back(p, bytes);
    return Tensor(p, dtype, Shape{kN});
  };
  Runner runner;
  for (const Precision precision : {Precision::kF32, Precision::kBF16Stochastic}) {
    OptimizerBlocks blocks{.precision = precision,
                           .parameters = block(compute_dtype(precision)),
                           .gradients = block(DType::kF32),
                           .moment1 = block(DType::kF32),
                           .moment2 = {},
                           .master = {},
                           .residual = {}};
    for (int64_t i = kBegin; i < kN; ++i) blocks.gradients.data<float>()[i] = static_cast<float>(i - kBegin + 1);
    optimizer_step(runner.context, {.kind = OptimizerKind::kSgd, .decay_end = kN}, {.learning_rate = 1}, blocks, kBegin,
                   kN);
    for (int64_t i = kBegin; i < kN; ++i) {
      const float exact = -static_cast<float>(i - kBegin + 1);
      ASSERT_EQ(value_at(blocks.parameters, i), exact) << i;  // up to 128: exact in bf16
      ASSERT_EQ(value_at(blocks.moment1, i), -exact);
    }
    ASSERT_EQ(value_at(blocks.parameters, 0), 0);
    ASSERT_EQ(value_at(blocks.parameters, 96), 0);
  }
  for (const auto& [p, bytes] : mapped) munmap(p, bytes);
}

// What the host would do if it waited for each update, against what runs ahead of the updates' fate.
TEST(Optimizer, BeginTakesTheNextUpdatesRateAndASkippedUpdateShiftsIt) {
  Runner runner;
  double numbers[kOptimizerNumbers] = {}, first;
  float prepared[kOptimizerConstants], loss_scale = 512, inverse_tokens = 1.0f / 77, scale = 0;
  int32_t not_finite = 0;
  const OptimizerState state{Tensor(numbers, DType::kF64, {kOptimizerNumbers}), Tensor(&loss_scale, DType::kF32, {1}),
                             Tensor(prepared, DType::kF32, {kOptimizerConstants})};
  const auto rate_of = [](int64_t update) { return 1e-3 / static_cast<double>(update); };
  double window[4];
  const Tensor rates(window, DType::kF64, {4}), first_tensor(&first, DType::kF64, {1}),
      inverse(&inverse_tokens, DType::kF32, {1}), factor(&scale, DType::kF32, {1}), flag(&not_finite, DType::kI32, {1});
  int64_t updates = 0;
  for (int64_t attempt = 1; attempt <= 9; ++attempt) {
    // The host knows of the updates two attempts late.
    static_assert(std::size(window) >= 3);
    first = static_cast<double>(std::max<int64_t>(1, attempt - 2 - (attempt > 5) - (attempt > 6)));
    for (int i = 0; i < 4; ++i) window[i] = rate_of(static_cast<int64_t>(first) + i);
    const float scale_now = loss_scale;
    optimizer_begin(runner.context, rates, first_tensor, inverse, state, factor);
    EXPECT_EQ(numbers[kLearningRate], rate_of(updates + 1)) << attempt;
    EXPECT_EQ(scale, inverse_tokens * scale_now);
    not_finite = attempt == 3 || attempt == 4;
    updates += !not_finite;
    optimizer_prepare(runner.context, {}, {}, Tensor(), flag, state);
    EXPECT_EQ(loss_scale, not_finite ? scale_now / 2 : scale_now);
  }
  EXPECT_EQ(updates, 7);
  optimizer_begin(runner.context, rates, first_tensor, inverse, {state.numbers, {}, {}}, factor);
  EXPECT_EQ(scale, inverse_tokens);
  EXPECT_THROW(optimizer_begin(runner.context, rates.rows(0, 0), first_tensor, inverse, state, factor),
               std::invalid_argument);
  EXPECT_THROW(optimizer_begin(runner.context, inverse, first_tensor, inverse, state, factor), std::invalid_argument);
  EXPECT_THROW(optimizer_begin(runner.context, rates, inverse, inverse, state, factor), std::invalid_argument);
  EXPECT_THROW(optimizer_begin(runner.context, rates, first_tensor, inverse, {}, factor), std::invalid_argument);
  EXPECT_THROW(optimizer_begin(runner.context, rates, first_tensor, inverse, state, rates), std::invalid_argument);
}

OptimizerBlocks blocks_of(const Workspace& w) {
  return {w.precision(), w.parameters(), w.gradients(), w.moment1(), w.moment2(), w.master(), w.residual()};
}
// The values a workspace keeps, padding and all: the 16-bit ones where there is nothing else.
std::vector<float> kept_values(const Workspace& w) {
  std::vector<float> values(w.layout().elements());
  for (int64_t i = 0; i < w.layout().elements(); ++i) {
    if (keeps_master(w.precision()))
      values[i] = w.master().data<float>()[i];
    else if (w.precision() == Precision::kBF16Residual)
      values[i] = join_float({w.parameters().data<bfloat16>()[i].bits, w.residual().data<bfloat16>()[i].bits});
    else if (w.precision() == Precision::kF16Stochastic)
      values[i] = static_cast<float>(w.parameters().data<float16>()[i]);
    else
      values[i] = value_at(w.parameters(), i);
  }
  return values;
}

constexpr Precision kAllPrecisions[] = {Precision::kF32,          Precision::kBF16Master, Precision::kBF16Stochastic,
                                        Precision::kBF16Residual, Precision::kF16Master,  Precision::kF16Stochastic};

TEST(Ema, HasTheBitsOfTheDefinitionOnCpuAndGpu) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu(3);
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  for (const Precision precision : kAllPrecisions) {
    for (const int64_t n : {100, 140000}) {  // the second: several pieces on the CPU
      if (n > 100 && compute_dtype(precision) == DType::kF16) continue;
      const auto w = make_workspace(precision, DType::kF32, n);
      const std::vector<float> values = kept_values(*w);
      const int64_t elements = w->layout().elements();
      std::vector<float> average(elements), expected(elements);
      for (int64_t i = 0; i < elements; ++i) average[i] = 1.5f * values[(i + 13) % elements];
      const Tensor ema(average.data(), DType::kF32, {elements});
      BlocksOnGpu blocks(*gpu, *w);
      OnGpu ema_on_gpu(*gpu, ema);
      const double decay = 0.9371;
      for (int64_t i = 0; i < elements; ++i) {
        const double e = average[i], moved = (1 - decay) * (static_cast<double>(values[i]) - e);
        expected[i] = static_cast<float>(e + moved);
      }
      if (compute_dtype(precision) != DType::kF16) {
        ema_update(cpu.context, decay, blocks_of(*w), ema);
        EXPECT_EQ(average, expected) << name_of(precision);
      }
      if (n > 1000) continue;
      ema_update(context, decay, blocks.blocks(precision), ema_on_gpu.tensor());
      gpu->synchronize();
      std::vector<float> got(elements);
      gpu->download(got.data(), ema_on_gpu.tensor().raw(), elements * sizeof(float));
      EXPECT_EQ(got, expected) << name_of(precision);
    }
  }
}

// Updates are skipped, the first among them, and nobody tells the host: the average is that of the updates that were.
TEST(Ema, FollowsTheUpdatesThatWereMade) {
  Runner runner;
  auto w = make_workspace(Precision::kF32, DType::kF32, 300);
  const int64_t n = w->layout().elements();
  double numbers[kOptimizerNumbers] = {};
  numbers[kLearningRate] = 0.05;
  float prepared[kOptimizerConstants];
  int32_t not_finite = 0;
  const OptimizerState state{
      Tensor(numbers, DType::kF64, {kOptimizerNumbers}), {}, Tensor(prepared, DType::kF32, {kOptimizerConstants})};
  std::vector<float> average(n, 12345.0f);
  const Tensor ema(average.data(), DType::kF32, {n});
  constexpr double kDecay = 0.8;
  std::vector<double> sum(n);
  double weights = 0;
  for (int64_t attempt = 1; attempt <= 8; ++attempt) {
    set_gradients(*w, static_cast<uint32_t>(attempt));
    not_finite = attempt == 1 || attempt == 4 || attempt == 5;
    optimizer_prepare(runner.context, {}, {.ema_decay = kDecay}, Tensor(), Tensor(&not_finite, DType::kI32, {1}),
                      state);
    optimizer_step(runner.context, {}, {.prepared = state.prepared}, *w);
    const std::vector<float> before = average;
    ema_update(runner.context, kDecay, blocks_of(*w), ema, state.numbers);
    if (not_finite) {
      EXPECT_EQ(average, before) << attempt;
      continue;
    }
    const std::vector<float> values = kept_values(*w);
    weights = kDecay * weights + 1;
    for (int64_t i = 0; i < n; ++i) sum[i] = kDecay * sum[i] + values[i];
    for (int64_t i = 0; i < n; ++i) ASSERT_NEAR(average[i], sum[i] / weights, 1e-6) << attempt;
    if (attempt == 2) {
      EXPECT_EQ(average, values);  // the first update's average is its parameters
    }
  }
  EXPECT_THROW(optimizer_prepare(runner.context, {}, {.ema_decay = 1}, Tensor(), Tensor(), state),
               std::invalid_argument);
  EXPECT_THROW(ema_update(runner.context, 1.5, blocks_of(*w), ema), std::invalid_argument);
  EXPECT_THROW(ema_update(runner.context, 0.5, blocks_of(*w), ema.rows(0, n - 1)), std::invalid_argument);
  EXPECT_THROW(ema_update(runner.context, 0.5, blocks_of(*w), ema, state.prepared), std::invalid_argument);
  const auto narrow = make_workspace(Precision::kBF16Residual, DType::kF32, 300);
  EXPECT_THROW(ema_exchange(runner.context, true, blocks_of(*narrow), ema, ema), std::invalid_argument);
  EXPECT_THROW(ema_exchange(runner.context, true, blocks_of(*narrow), ema, {}), std::invalid_argument);
}

TEST(Ema, GoesIntoTheModelAndComesOut) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu(2);
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  for (const Precision precision : kAllPrecisions) {
    const auto w = make_workspace(precision, DType::kF32, 800);
    const int64_t n = w->layout().elements();
    const DType dtype = compute_dtype(precision);
    const std::vector<char> before = bits_of(*w);
    std::vector<float> average(n);
    for (int64_t i = 0; i < n; ++i) average[i] = std::ldexp(static_cast<float>(i) - 300.7f, static_cast<int>(i % 9));
    const std::vector<float> start = average;
    std::vector<uint16_t> room(n);
    const Tensor ema(average.data(), DType::kF32, {n}),
        aside = dtype == DType::kF32 ? Tensor() : Tensor(room.data(), dtype, {n});
    BlocksOnGpu blocks(*gpu, *w);
    OnGpu ema_on_gpu(*gpu, ema), aside_on_gpu(*gpu, aside);
    for (const bool in : {true, false}) {
      ema_exchange(context, in, blocks.blocks(precision), ema_on_gpu.tensor(), aside_on_gpu.tensor());
      gpu->synchronize();
      if (dtype == DType::kF16) {
        std::vector<float16> got(n);
        gpu->download(got.data(), blocks.parameters.tensor().raw(), n * sizeof(float16));
        for (int64_t i = 0; in && i < n; ++i) ASSERT_EQ(got[i].bits, float16(start[i]).bits) << i;
      } else {
        ema_exchange(cpu.context, in, blocks_of(*w), ema, aside);
        for (int64_t i = 0; in && i < n; ++i)
          ASSERT_EQ(value_at(w->parameters(), i),
                    dtype == DType::kF32 ? start[i] : static_cast<float>(bfloat16(start[i])));
        EXPECT_TRUE(blocks.bits() == bits_of(*w)) << name_of(precision) << in;
      }
    }
    EXPECT_TRUE(blocks.bits() == before) << name_of(precision);
    EXPECT_TRUE(bits_of(*w) == before) << name_of(precision);
    EXPECT_EQ(average, start) << name_of(precision);
    EXPECT_TRUE(ema_on_gpu.bits() == OnGpu(*gpu, ema).bits()) << name_of(precision);
  }
}

// The counts of each slice are those of the update that follows.
TEST(Swallowed, IsWhatTheUpdateDoes) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu(3);
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  for (const OptimizerKind kind : kKinds) {
    for (const Precision precision : kAllPrecisions) {
      for (const bool nearest : {false, true}) {
        const bool fp16 = compute_dtype(precision) == DType::kF16;
        const auto w = make_workspace(precision, fp16 ? DType::kF32 : compute_dtype(precision), 1900);
        const int64_t n = w->layout().elements();
        const OptimizerArgs args{.kind = kind, .weight_decay = 1e-4, .decay_end = 700, .seed = 3, .nearest = nearest};
        std::vector<int64_t> ends = {0, 5, 300, 1024, n};
        const int64_t slices = static_cast<int64_t>(ends.size());
        const Tensor ends_tensor(ends.data(), DType::kI64, {slices});
        OnGpu ends_on_gpu(*gpu, ends_tensor);
        for (int64_t step = 1; step <= 2; ++step) {
          set_gradients(*w, static_cast<uint32_t>(step) + 20, 1e-3f);  // not the parameters' own random numbers
          for (int64_t i = 0; i < n; i += 3) {  // the first step does not move these, but for their decay
            if (w->gradients().dtype() == DType::kF32)
              w->gradients().data<float>()[i] = 0;
            else
              w->gradients().data<bfloat16>()[i] = bfloat16(0.0f);
          }
          const OptimizerStep now{.learning_rate = kind == OptimizerKind::kSgd ? 1.0 : 2e-3, .step = step};
          std::vector<int64_t> counts(2 * slices, 1000), counts_gpu(2 * slices), expected(2 * slices, 1000);
          const Tensor counts_tensor(counts.data(), DType::kI64, {slices, 2});
          BlocksOnGpu blocks(*gpu, *w);
          OnGpu counts_on_gpu(*gpu, counts_tensor);
          optimizer_swallowed(context, args, now, blocks.blocks(precision), ends_on_gpu.tensor(),
                              counts_on_gpu.tensor());
          const std::vector<char> untouched = blocks.bits();
          EXPECT_TRUE(untouched == bits_of(*w));
          if (!fp16) optimizer_swallowed(cpu.context, args, now, blocks_of(*w), ends_tensor, counts_tensor);
          EXPECT_TRUE(untouched == bits_of(*w));
          const std::vector<float> old = kept_values(*w);
          std::vector<float> moments(n);
          std::memcpy(moments.data(), w->moment1().raw(), n * sizeof(float));
          optimizer_step(context, args, now, blocks.blocks(precision));
          gpu->synchronize();
          gpu->download(counts_gpu.data(), counts_on_gpu.tensor().raw(), counts_gpu.size() * sizeof(int64_t));
          for (const auto& [to, from] : {std::pair{w->parameters(), &blocks.parameters},
                                         {w->moment1(), &blocks.moment1},
                                         {w->moment2(), &blocks.moment2},
                                         {w->master(), &blocks.master},
                                         {w->residual(), &blocks.residual}})
            if (to.defined()) std::memcpy(to.raw(), from->bits().data(), to.bytes());
          const std::vector<float> now_kept = kept_values(*w);
          int64_t total[2] = {};
          for (int64_t i = 0, slice = 0; i < n; ++i) {
            while (ends[slice] <= i) ++slice;
            const float g = value_at(w->gradients(), i);
            const bool moves = g != 0 || moments[i] != 0 || (i < args.decay_end && old[i] != 0);
            const bool lost = moves && now_kept[i] == old[i];
            expected[2 * slice] += moves, expected[2 * slice + 1] += lost;
            total[0] += moves, total[1] += lost;
          }
          EXPECT_EQ(counts_gpu, expected) << name_of(kind) << " " << name_of(precision) << nearest << step;
          if (!fp16) {
            EXPECT_EQ(counts, expected) << name_of(kind) << " " << name_of(precision) << nearest << step;
          }
          EXPECT_GT(total[0], n / 2);
          EXPECT_LT(total[0], n);  // padding at least
          if (precision == Precision::kBF16Stochastic) {
            EXPECT_GT(total[1], 0);
            EXPECT_LT(total[1], total[0]);
          }
        }
      }
    }
  }
}

// Parameters of 1, where half the spacing below is 2^-9 in bf16 and 2^-12 in fp16: Adam's first update is the learning
// rate.
TEST(Swallowed, AllOrNoneAroundHalfASpacing) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu;
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  constexpr int64_t kN = 2000;
  ParameterLayout layout;
  layout.add("gamma", {kN});
  for (const Precision precision : kAllPrecisions) {
    const double half = precision == Precision::kBF16Stochastic  ? 0x1p-9
                        : precision == Precision::kF16Stochastic ? 0x1p-12
                                                                 : 0x1p-25;  // fp32 below 1
    for (const double rate : {0.9 * half, 1.1 * half}) {
      Workspace w(layout, precision, true);
      const std::vector<float> ones(kN, 1.0f);
      w.set("gamma", ones.data(), kN);
      for (int64_t i = 0; i < kN; ++i) w.gradient("gamma").data<float>()[i] = 1;
      int64_t end = w.layout().elements(), counts[2] = {};
      const Tensor ends(&end, DType::kI64, {1}), found(counts, DType::kI64, {1, 2});
      BlocksOnGpu blocks(*gpu, w);
      OnGpu ends_on_gpu(*gpu, ends), counts_on_gpu(*gpu, found);
      optimizer_swallowed(context, {.nearest = true}, {.learning_rate = rate}, blocks.blocks(precision),
                          ends_on_gpu.tensor(), counts_on_gpu.tensor());
      gpu->synchronize();
      gpu->download(counts, counts_on_gpu.tensor().raw(), sizeof(counts));
      EXPECT_EQ(counts[0], kN) << name_of(precision);
      EXPECT_EQ(counts[1], rate < half ? kN : 0) << name_of(precision) << " " << rate;
    }
  }
}

TEST(Swallowed, CountsNothingForASkippedUpdateAndChecksItsArguments) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Runner cpu;
  Memory memory(gpu.get());
  Context context(cpu.pool, memory, gpu.get());
  const auto w = make_workspace(Precision::kBF16Stochastic, DType::kBF16, 500);
  set_gradients(*w, 1);
  const int64_t n = w->layout().elements();
  double numbers[kOptimizerNumbers] = {0.01, 3, 0, 0, 0, 0};
  float prepared[kOptimizerConstants];
  int32_t not_finite = 0;
  const OptimizerState state{
      Tensor(numbers, DType::kF64, {kOptimizerNumbers}), {}, Tensor(prepared, DType::kF32, {kOptimizerConstants})};
  const OptimizerArgs args{.seed = 5};
  int64_t ends[] = {200, n}, counts[2][4] = {};
  const Tensor ends_tensor(ends, DType::kI64, {2});
  const auto count = [&](const OptimizerStep& step, int64_t(&found)[4]) {
    const Tensor found_tensor(found, DType::kI64, {2, 2});
    BlocksOnGpu blocks(*gpu, *w);
    OnGpu ends_on_gpu(*gpu, ends_tensor), counts_on_gpu(*gpu, found_tensor), prepared_on_gpu(*gpu, step.prepared);
    OptimizerStep on_gpu = step;
    on_gpu.prepared = prepared_on_gpu.tensor();
    optimizer_swallowed(context, args, on_gpu, blocks.blocks(w->precision()), ends_on_gpu.tensor(),
                        counts_on_gpu.tensor());
    optimizer_swallowed(cpu.context, args, step, blocks_of(*w), ends_tensor, found_tensor);
    gpu->synchronize();
    EXPECT_TRUE(counts_on_gpu.bits() == OnGpu(*gpu, found_tensor).bits());
  };
  for (const int skipped : {1, 0}) {
    not_finite = skipped;
    optimizer_prepare(cpu.context, args, {}, Tensor(), Tensor(&not_finite, DType::kI32, {1}), state);
    count({.prepared = state.prepared}, counts[0]);
    if (skipped) {
      EXPECT_EQ(counts[0][0] + counts[0][1] + counts[0][2] + counts[0][3], 0);
    }
  }
  // The update that was prepared is number 4.
  count({.learning_rate = 0.01, .step = 4}, counts[1]);
  EXPECT_TRUE(std::equal(counts[0], counts[0] + 4, counts[1]));
  EXPECT_EQ(counts[0][0], 200);
  EXPECT_EQ(counts[0][2], 300);

  const auto refused = [&](const Tensor& slice_ends, const Tensor& found) {
    EXPECT_THROW(optimizer_swallowed(cpu.context, args, {.learning_rate = 0.01}, blocks_of(*w), slice_ends, found),
                 std::invalid_argument);
  };
  const Tensor found(counts[0], DType::kI64, {2, 2});
  refused({}, found);
  refused(ends_tensor, {});
  refused(ends_tensor, found.rows(0, 1));
  refused(ends_tensor, state.numbers);
  ends[0] = n, ends[1] = 200;
  refused(ends_tensor, found);
  ends[0] = 200, ends[1] = n + 1;
  refused(ends_tensor, found);
}

}  // namespace
}  // namespace frit
