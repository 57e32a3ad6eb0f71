// What the case table cannot say: NaN, rows at addresses that no vector begins at, the same bits on CPU and GPU,
// errors.
#include "frit/ops/loss_total/loss_total.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

namespace frit {
namespace {

struct Losses {
  std::vector<float> loss, nll;
  std::vector<int32_t> labels;
  explicit Losses(int64_t tokens, uint32_t seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < tokens; ++i) {
      loss.push_back(3 + normal(random)), nll.push_back(4 * normal(random));
      labels.push_back(static_cast<int32_t>(random() % 5) - 1);
    }
  }
  int64_t tokens() const { return static_cast<int64_t>(loss.size()); }
};

struct Totals {
  double v[3];
  bool operator==(const Totals& other) const { return std::memcmp(v, other.v, sizeof(v)) == 0; }
};
Totals on_cpu(Losses& x, const Totals* before = nullptr, int threads = 1) {
  ThreadPool pool(threads);
  Memory memory;
  Context context(pool, memory);
  Totals totals = before ? *before : Totals{{NAN, NAN, NAN}};
  const Shape shape{x.tokens()};
  loss_total(context, Tensor(x.loss.data(), DType::kF32, shape), Tensor(x.nll.data(), DType::kF32, shape),
             Tensor(x.labels.data(), DType::kI32, shape), before != nullptr, Tensor(totals.v, DType::kF64, {3}));
  return totals;
}
// shift: elements by which the tensors lie past an aligned address.
Totals on_gpu(const Losses& x, const Totals* before = nullptr, int64_t shift = 0) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool(1);
  Memory memory(gpu.get());
  Context context(pool, memory, gpu.get());
  const int64_t n = x.tokens();
  const Buffer loss = context.allocate({n + shift}, DType::kF32, "loss"),
               nll = context.allocate({n + shift}, DType::kF32, "nll"),
               labels = context.allocate({n + shift}, DType::kI32, "labels"),
               totals = context.allocate({3}, DType::kF64, "totals");
  const auto from = [&](const Buffer& b, const void* values) {
    const Tensor t = b->rows(shift, n + shift);
    gpu->upload(t.raw(), values, static_cast<size_t>(4 * n));
    return t;
  };
  Totals result = before ? *before : Totals{};
  if (before) gpu->upload(totals->raw(), result.v, sizeof(result.v));
  loss_total(context, from(loss, x.loss.data()), from(nll, x.nll.data()), from(labels, x.labels.data()),
             before != nullptr, totals);
  gpu->synchronize();
  gpu->download(result.v, totals->raw(), sizeof(result.v));
  return result;
}

TEST(LossTotal, CpuAndGpuHaveTheSameBits) {
  for (const int64_t tokens : {1, 37, 4096, 9999}) {
    Losses x(tokens, static_cast<uint32_t>(tokens));
    const Totals cpu = on_cpu(x);
    EXPECT_EQ(on_cpu(x, nullptr, 3), cpu);
    EXPECT_EQ(on_gpu(x), cpu) << tokens;
    for (const int64_t shift : {1, 2, 3}) EXPECT_EQ(on_gpu(x, nullptr, shift), cpu) << tokens << " shifted " << shift;
    const Totals before{{0.1, -7.3, 12}};
    const Totals more = on_cpu(x, &before);
    for (int k = 0; k < 3; ++k) EXPECT_EQ(more.v[k], before.v[k] + cpu.v[k]);
    EXPECT_EQ(on_gpu(x, &before), more);
  }
}

TEST(LossTotal, NanShows) {
  for (const int64_t at : {0, 31, 4095, 4998}) {
    Losses x(4999);
    x.loss[at] = std::numeric_limits<float>::quiet_NaN();
    for (const Totals& totals : {on_cpu(x), on_gpu(x)}) {
      EXPECT_TRUE(std::isnan(totals.v[0])) << at;
      EXPECT_TRUE(std::isfinite(totals.v[1]));
      EXPECT_GT(totals.v[2], 3000);
    }
  }
}

TEST(LossTotal, PlanningComputesNothing) {
  ThreadPool pool(1);
  Memory memory;
  Context context(pool, memory);
  memory.begin_recording();
  {
    // As in a step: the losses are temporaries, which have no memory while their lifetimes are recorded.
    const Buffer loss = context.allocate({50}, DType::kF32, "loss"), nll = context.allocate({50}, DType::kF32, "nll");
    int32_t labels[50] = {};
    double totals[3] = {1, 2, 3};
    loss_total(context, loss, nll, Tensor(labels, DType::kI32, {50}), false, Tensor(totals, DType::kF64, {3}));
    EXPECT_EQ(totals[0], 1);
    EXPECT_EQ(totals[2], 3);
  }
  EXPECT_EQ(memory.end_recording().size(), 2u);
}

TEST(LossTotal, Errors) {
  ThreadPool pool(1);
  Memory memory;
  Context context(pool, memory);
  float values[4] = {};
  int32_t labels[4] = {};
  double totals[3];
  const Tensor loss(values, DType::kF32, {4}), label(labels, DType::kI32, {4}), total(totals, DType::kF64, {3});
  EXPECT_NO_THROW(loss_total(context, loss, loss, label, false, total));
  EXPECT_THROW(loss_total(context, loss.rows(0, 3), loss, label, false, total), std::invalid_argument);
  EXPECT_THROW(loss_total(context, loss, Tensor(), label, false, total), std::invalid_argument);
  EXPECT_THROW(loss_total(context, loss, label, label, false, total), std::invalid_argument);
  EXPECT_THROW(loss_total(context, loss, loss, loss, false, total), std::invalid_argument);
  EXPECT_THROW(loss_total(context, loss, loss, label, false, loss), std::invalid_argument);
  EXPECT_THROW(loss_total(context, loss, loss, label, false, total.rows(0, 2)), std::invalid_argument);
}

}  // namespace
}  // namespace frit
