// What the case table cannot hold: values that are not finite, and errors.
#include "frit/ops/criterion/criterion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string_view>
#include <tuple>
#include <vector>

namespace frit {
namespace {

struct Bench {
  ThreadPool pool{2};
  Memory memory;
  Context context{pool, memory};
};

TEST(Criterion, LossOfLogitsThatAreNotFiniteIsNotFinite) {
  Bench b;
  for (int64_t at : {0, 5, 511, 512, 1299})
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> x(2 * 1300, 0.5f), loss(2), nll(2), scale{1.0f};
      std::vector<int32_t> labels{7, 7};
      x[at] = bad;
      criterion_forward_backward(b.context, Tensor(x.data(), DType::kF32, {2, 1300}), Tensor(),
                                 Tensor(labels.data(), DType::kI32, {2}), 0.1f, Tensor(scale.data(), DType::kF32, {1}),
                                 Tensor(loss.data(), DType::kF32, {2}), Tensor(nll.data(), DType::kF32, {2}));
      EXPECT_FALSE(std::isfinite(loss[0])) << at << " " << bad;
      EXPECT_TRUE(std::isfinite(loss[1]));
      EXPECT_NEAR(loss[1], std::log(1300.0), 1e-5);
    }
}

// The GPU of this build, and tensors on it.
struct GpuBench {
  std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool{1};
  Memory memory{gpu.get()};
  Context context{pool, memory, gpu.get()};
  std::vector<void*> made;

  ~GpuBench() {
    for (void* p : made) gpu->died(p), gpu->release(p);
  }
  template <typename T>
  Tensor tensor(const std::vector<T>& x, DType dtype, Shape shape) {
    void* p = gpu->allocate(x.size() * sizeof(T));
    made.push_back(p);
    gpu->born(p, x.size() * sizeof(T), dtype);
    gpu->upload(p, x.data(), x.size() * sizeof(T));
    return Tensor(p, dtype, shape, gpu->device());
  }
  template <typename T>
  std::vector<T> values(const Tensor& t) {
    std::vector<T> x(static_cast<size_t>(t.numel()));
    gpu->download(x.data(), t.raw(), x.size() * sizeof(T));
    return x;
  }
};

// Logits in chunks of rows, each in the same buffer: what a caller does who never holds them all. Rows of 1025 and 2051
// elements begin at every alignment, and at another one in the chunk than in the whole.
TEST(Criterion, ChunksOfRowsGiveTheBitsOfTheWholeOnAGpu) {
  for (const char* instance : {"warp", "shared", "two_pass"})
    for (int64_t vocabulary : {1025, 2051}) {
      if (std::string_view(instance) == "warp" && vocabulary > 2041) continue;
      GpuBench b;
      b.context.force("criterion_forward", instance);
      const int64_t rows = 11;
      std::vector<uint16_t> x(rows * vocabulary);
      uint32_t state = 1;
      for (uint16_t& v : x)
        state = state * 1664525u + 1013904223u, v = bfloat16(static_cast<float>(state >> 8) * 0x1p-24f * 12 - 6).bits;
      std::vector<int32_t> labels(rows);
      for (int64_t r = 0; r < rows; ++r) labels[r] = r == 4 ? -1 : static_cast<int32_t>(r * 37 % vocabulary);
      const Tensor scale = b.tensor(std::vector<float>{0.5f}, DType::kF32, {1});
      const auto run = [&](int64_t begin, int64_t end) {
        const int64_t n = end - begin;
        const Tensor logits =
            b.tensor(std::vector<uint16_t>(x.begin() + begin * vocabulary, x.begin() + end * vocabulary), DType::kBF16,
                     {n, vocabulary});
        const Tensor l = b.tensor(std::vector<int32_t>(labels.begin() + begin, labels.begin() + end), DType::kI32, {n});
        const Tensor loss = b.tensor(std::vector<float>(n), DType::kF32, {n}),
                     nll = b.tensor(std::vector<float>(n), DType::kF32, {n});
        criterion_forward_backward(b.context, logits, Tensor(), l, 0.1f, scale, loss, nll);
        return std::tuple(b.values<uint16_t>(logits), b.values<uint32_t>(loss), b.values<uint32_t>(nll));
      };
      const auto [gradient, loss, nll] = run(0, rows);
      for (int64_t step : {1, 3, 5})
        for (int64_t begin = 0; begin < rows; begin += step) {
          const int64_t end = std::min(rows, begin + step);
          const auto [part_gradient, part_loss, part_nll] = run(begin, end);
          EXPECT_TRUE(std::equal(part_gradient.begin(), part_gradient.end(), gradient.begin() + begin * vocabulary))
              << instance << " rows " << begin << " to " << end << " of " << vocabulary;
          EXPECT_TRUE(std::equal(part_loss.begin(), part_loss.end(), loss.begin() + begin)) << instance << " " << begin;
          EXPECT_TRUE(std::equal(part_nll.begin(), part_nll.end(), nll.begin() + begin)) << instance << " " << begin;
        }
    }
}

TEST(Criterion, WhatAGpuCannotThrowForShowsInTheLoss) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const char* instance : {"warp", "shared", "two_pass"}) {
    GpuBench b;
    b.context.force("criterion_forward", instance);
    // Row 0: a label that is no column. 1: a NaN. 2: an infinity. 3: a -inf, at which smoothing makes the loss
    // infinite. 4: sound.
    const int64_t rows = 5, vocabulary = 700;
    std::vector<float> x(rows * vocabulary, 0.5f);
    x[1 * vocabulary + 3] = nan, x[2 * vocabulary + 699] = infinity, x[3 * vocabulary + 50] = -infinity;
    const Tensor logits = b.tensor(x, DType::kF32, {rows, vocabulary}),
                 labels = b.tensor(std::vector<int32_t>{700, 7, 7, 7, 7}, DType::kI32, {rows}),
                 scale = b.tensor(std::vector<float>{1.0f}, DType::kF32, {1}),
                 loss = b.tensor(std::vector<float>(rows), DType::kF32, {rows}),
                 nll = b.tensor(std::vector<float>(rows), DType::kF32, {rows});
    criterion_forward_backward(b.context, logits, Tensor(), labels, 0.1f, scale, loss, nll);
    const std::vector<float> l = b.values<float>(loss), n = b.values<float>(nll), g = b.values<float>(logits);
    EXPECT_TRUE(std::isnan(l[0]) && std::isnan(n[0])) << instance << " " << l[0] << " " << n[0];
    for (int64_t i = 0; i < vocabulary; ++i) ASSERT_EQ(g[i], 0) << instance << " " << i;
    EXPECT_FALSE(std::isfinite(l[1])) << instance;
    EXPECT_FALSE(std::isfinite(l[2])) << instance;
    EXPECT_EQ(l[3], infinity) << instance;
    EXPECT_NEAR(n[3], std::log(699.0), 1e-5) << instance;
    EXPECT_NEAR(l[4], std::log(700.0), 1e-5) << instance;
    EXPECT_NEAR(g[4 * vocabulary + 7], 1.0 / 700 - 0.9 - 0.1 / 700, 1e-6) << instance;
  }
}

// The largest logit times log2(e) is rounded by whole units there, so that exponentials are far above 1, or below: the
// loss is right, or a NaN, and never another number.
TEST(Criterion, HugeTiedLogitsOnAGpu) {
  for (const char* instance : {"shared", "two_pass"})
    for (const float size : {4.7e7f, 9.44e7f, 2e8f})
      for (const int64_t vocabulary : {8000, 32768}) {
        GpuBench b;
        b.context.force("criterion_forward", instance);
        const Tensor logits = b.tensor(std::vector<float>(vocabulary, size), DType::kF32, {1, vocabulary}),
                     labels = b.tensor(std::vector<int32_t>{7}, DType::kI32, {1}),
                     scale = b.tensor(std::vector<float>{1.0f}, DType::kF32, {1}),
                     loss = b.tensor(std::vector<float>(1), DType::kF32, {1}),
                     nll = b.tensor(std::vector<float>(1), DType::kF32, {1});
        criterion_forward_backward(b.context, logits, Tensor(), labels, 0.0f, scale, loss, nll);
        const float l = b.values<float>(loss)[0], g = b.values<float>(logits)[8];
        const double wanted = std::log(static_cast<double>(vocabulary));
        // A gradient is a difference of large numbers: as good as exp2_fast of what is rounded.
        if (size < 1e8f) EXPECT_NEAR(l, wanted, 1e-3) << instance << " " << size << " " << vocabulary;
        if (std::isfinite(l)) {
          EXPECT_NEAR(l, wanted, 1e-3) << instance << " " << size << " " << vocabulary;
          EXPECT_NEAR(g * static_cast<double>(vocabulary), 1, 1e-3) << instance << " " << size << " " << vocabulary;
        }
      }
}

TEST(Criterion, Errors) {
  Bench b;
  std::vector<float> x(2 * 5), loss(2);
  std::vector<int32_t> labels{0, 5};
  const Tensor logits(x.data(), DType::kF32, {2, 5}), l(labels.data(), DType::kI32, {2}),
      out(loss.data(), DType::kF32, {2});
  EXPECT_THROW(criterion_forward_backward(b.context, logits, Tensor(), l, 0, Tensor(), out, out),
               std::invalid_argument);
  labels[1] = 4;
  EXPECT_NO_THROW(criterion_forward_backward(b.context, logits, Tensor(), l, 0, Tensor(), out, out));
  EXPECT_THROW(criterion_forward_backward(b.context, logits, Tensor(), l, -0.1f, Tensor(), out, out),
               std::invalid_argument);
  EXPECT_THROW(criterion_forward_backward(b.context, logits, out, l, 0, Tensor(), out, out), std::invalid_argument);
}

}  // namespace
}  // namespace frit
