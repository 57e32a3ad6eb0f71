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

}  // namespace
}  // namespace frit
