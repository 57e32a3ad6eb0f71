// Products on an NVIDIA GPU that gemm's case table does not reach: algorithms found by timing, kept as text, in graphs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "frit/backend/gpu.h"
#include "frit/core/error.h"

namespace frit {
namespace {

// Values in [-1, 1) that depend on the seed alone.
std::vector<float> some(uint32_t seed, int64_t n) {
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) {
    seed = seed * 1664525u + 1013904223u;
    x = static_cast<float>(seed >> 16) / 32768.0f - 1;
  }
  return v;
}

// A product with operands of its own on the GPU. c begins as zeros.
class OnGpu {
 public:
  OnGpu(Gpu& gpu, const GpuProduct& shape) : product(shape), gpu_(gpu), n_(shape.m * shape.n) {
    GpuProduct& p = product;
    a_ = some(1, p.m * p.k), b_ = some(2, p.k * p.n), bias_ = some(3, p.n);
    p.a_stride = p.transpose_a ? p.m : p.k, p.b_stride = p.transpose_b ? p.k : p.n, p.c_stride = p.n;
    p.a = place(a_, p.dtype), p.b = place(b_, p.dtype), p.bias = shape.bias ? place(bias_, p.c_dtype) : nullptr;
    p.bias_dtype = p.c_dtype;
    std::vector<float> zeros(static_cast<size_t>(n_));
    p.c = place(zeros, p.c_dtype);
  }
  ~OnGpu() {
    for (void* p : blocks_) gpu_.release(p);
  }
  OnGpu(const OnGpu&) = delete;

  std::vector<char> bits() const {
    std::vector<char> v(static_cast<size_t>(n_ * size_of(product.c_dtype)));
    gpu_.synchronize();
    gpu_.download(v.data(), product.c, v.size());
    return v;
  }
  // Largest distance from the product in double precision, done `times` times where it accumulates.
  double error(int times = 1) const {
    const std::vector<char> got = bits();
    const GpuProduct& p = product;
    double worst = 0;
    for (int64_t i = 0; i < p.m; ++i)
      for (int64_t j = 0; j < p.n; ++j) {
        double sum = p.bias ? bias_[static_cast<size_t>(j)] : 0;
        for (int64_t k = 0; k < p.k; ++k)
          sum += static_cast<double>(a_[static_cast<size_t>(p.transpose_a ? k * p.m + i : i * p.k + k)]) *
                 b_[static_cast<size_t>(p.transpose_b ? j * p.k + k : k * p.n + j)];
        const void* at = got.data() + (i * p.n + j) * size_of(p.c_dtype);
        const double value = p.c_dtype == DType::kF32 ? static_cast<double>(*static_cast<const float*>(at))
                                                      : static_cast<float>(*static_cast<const bfloat16*>(at));
        worst = std::max(worst, std::abs(value - times * sum));
      }
    return worst;
  }

  // Of op(a), over its depth.
  std::vector<double> sums_of_a() const {
    std::vector<double> sums(static_cast<size_t>(product.m));
    for (int64_t i = 0; i < product.m; ++i)
      for (int64_t k = 0; k < product.k; ++k)
        sums[static_cast<size_t>(i)] +=
            a_[static_cast<size_t>(product.transpose_a ? k * product.m + i : i * product.k + k)];
    return sums;
  }

  GpuProduct product;

 private:
  void* place(std::vector<float>& values, DType dtype) {
    std::vector<bfloat16> halves;
    for (float& x : values) {
      if (dtype == DType::kF32) break;
      halves.emplace_back(x);
      x = static_cast<float>(halves.back());
    }
    const size_t bytes = values.size() * static_cast<size_t>(size_of(dtype));
    blocks_.push_back(gpu_.allocate(bytes));
    gpu_.upload(blocks_.back(), halves.empty() ? static_cast<const void*>(values.data()) : halves.data(), bytes);
    return blocks_.back();
  }

  Gpu& gpu_;
  int64_t n_;
  std::vector<float> a_, b_, bias_;
  std::vector<void*> blocks_;
};

GpuProduct shape(int64_t m, int64_t n, int64_t k, DType dtype, DType c_dtype, const char* how) {
  GpuProduct p;
  p.m = m, p.n = n, p.k = k, p.dtype = dtype, p.c_dtype = c_dtype;
  p.transpose_a = std::strchr(how, 'a'), p.transpose_b = std::strchr(how, 'b');
  p.accumulate = std::strchr(how, '+');
  p.bias = std::strchr(how, '1') ? how : nullptr;  // OnGpu gives it its place
  return p;
}

std::vector<GpuProduct> shapes() {
  const DType f32 = DType::kF32, bf16 = DType::kBF16;
  return {shape(64, 48, 200, f32, f32, "b1"),   shape(256, 512, 128, bf16, bf16, "b1"),
          shape(128, 64, 512, bf16, f32, "a"),  shape(33, 31, 65, bf16, bf16, "1"),
          shape(64, 128, 1024, f32, f32, "a+"), shape(512, 256, 4096, bf16, f32, "a+")};
}

TEST(Products, AlgorithmsAreTimedOnceAndGiveTheSameBitsAgain) {
  Tuning tuning;
  std::vector<std::vector<char>> want;
  {
    const std::unique_ptr<Gpu> gpu = make_gpu();
    for (const GpuProduct& s : shapes()) {
      const OnGpu one(*gpu, s);
      gpu->note_product(one.product);
      gpu->note_product(one.product);
    }
    EXPECT_EQ(gpu->tune_products(tuning), static_cast<int>(shapes().size()));
    EXPECT_EQ(tuning.size(), shapes().size());
    EXPECT_EQ(gpu->tune_products(tuning), 0);
    EXPECT_GT(gpu->library_bytes(), 0u);
    for (const GpuProduct& s : shapes()) {
      OnGpu one(*gpu, s);
      gpu->product(one.product);
      // In 16 bits: rounded before the bias is added, and behind it.
      EXPECT_LT(one.error(), (s.c_dtype == DType::kF32 ? 2e-5 : 0x1p-7) * std::sqrt(static_cast<double>(s.k)) + 0x1p-8)
          << s.m << "x" << s.n << "x" << s.k;
      want.push_back(one.bits());
    }
  }
  // Another life with what the first found: no timing, the same bits.
  const std::unique_ptr<Gpu> gpu = make_gpu();
  for (const GpuProduct& s : shapes()) gpu->note_product(OnGpu(*gpu, s).product);
  EXPECT_EQ(gpu->tune_products(tuning), 0);
  for (size_t i = 0; i < want.size(); ++i) {
    OnGpu one(*gpu, shapes()[i]);
    gpu->product(one.product);
    EXPECT_EQ(one.bits(), want[i]) << i;
  }
}

TEST(Products, NeighboursInRowsAreTimedToo) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Tuning tuning;
  // Rows, or a weight's gradient's depth, that lie near each other and far apart, not in their order.
  const int64_t extents[] = {300, 256, 320, 1000, 264};
  for (const char* how : {"b1", "a"})
    for (int64_t extent : extents) {
      const bool depth = how[0] == 'a';
      OnGpu one(*gpu, shape(depth ? 128 : extent, 64, depth ? extent : 128, DType::kBF16, DType::kBF16, how));
      gpu->note_product(one.product);
    }
  EXPECT_EQ(gpu->tune_products(tuning), 10);
  EXPECT_EQ(tuning.size(), 10u);
  for (const char* how : {"b1", "a"})
    for (int64_t extent : extents) {
      const bool depth = how[0] == 'a';
      OnGpu one(*gpu, shape(depth ? 128 : extent, 64, depth ? extent : 128, DType::kBF16, DType::kBF16, how));
      gpu->product(one.product);
      EXPECT_LT(one.error(), 0x1p-7 * std::sqrt(static_cast<double>(one.product.k)) + 0x1p-8) << how << " " << extent;
    }
}

TEST(Products, TextsThatNameNoAlgorithmAreTimedAgain) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  const std::string key = "256x512x128 nt bf16->bf16 bias";
  OnGpu one(*gpu, shapes()[1]);
  gpu->note_product(one.product);
  Tuning tuning;
  ASSERT_EQ(gpu->tune_products(tuning), 1);
  const std::string good(tuning.find("product", key));
  ASSERT_NE(good, "");
  for (const std::string& bad : {std::string("fastest"), "1 " + good, good + " ", good.substr(0, good.size() - 1),
                                 good.substr(0, good.size() - 1) + "x"}) {
    tuning.set("product", key, bad);
    EXPECT_EQ(gpu->tune_products(tuning), 1) << bad;
    EXPECT_NE(tuning.find("product", key), bad);
  }
}

TEST(Products, CanBeRecorded) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  for (const GpuProduct& s : shapes()) {  // the library is opened, and kernels are loaded, while recording
    OnGpu one(*gpu, s), other(*gpu, s);
    const std::unique_ptr<GpuGraph> graph = gpu->record([&] { gpu->product(one.product); });
    gpu->synchronize();
    EXPECT_EQ(one.bits(), std::vector<char>(one.bits().size()));
    graph->launch();
    graph->launch();
    EXPECT_LT(one.error(s.accumulate ? 2 : 1), 0.1);
    EXPECT_TRUE(gpu->rerecord(*graph, [&] { gpu->product(one.product); }));
    EXPECT_FALSE(gpu->rerecord(*graph, [&] { gpu->product(other.product); }));
    EXPECT_EQ(other.bits(), std::vector<char>(other.bits().size()));
  }
}

TEST(Products, SumTheBiasGradientWhereTheySay) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  Tuning tuning;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    OnGpu one(*gpu, shape(128, 64, 512, dtype, dtype, "a"));
    GpuProduct p = one.product;
    std::vector<float> poison(128, std::nanf(""));
    p.bias_gradient = gpu->allocate(512);
    gpu->upload(p.bias_gradient, poison.data(), 512);
    if (gpu->sums_bias_gradient(p)) {
      gpu->note_product(p);
      EXPECT_EQ(gpu->tune_products(tuning), 1);
      gpu->product(p);
      EXPECT_LT(one.error(), 0.3);
      std::vector<char> got(512);
      gpu->synchronize();
      gpu->download(got.data(), p.bias_gradient, 512);
      const std::vector<double> want = one.sums_of_a();
      for (size_t i = 0; i < 128; ++i) {
        const double value = dtype == DType::kF32
                                 ? static_cast<double>(reinterpret_cast<const float*>(got.data())[i])
                                 : static_cast<float>(reinterpret_cast<const bfloat16*>(got.data())[i]);
        EXPECT_NEAR(value, want[i], dtype == DType::kF32 ? 1e-3 : 0.2) << i;
      }
    } else {
      EXPECT_THROW(gpu->product(p), Error);
    }
    p.accumulate = true;
    EXPECT_FALSE(gpu->sums_bias_gradient(p));
    EXPECT_THROW(gpu->product(p), Error);
    gpu->release(p.bias_gradient);
  }
}

TEST(Products, WithoutDepthClearOrKeep) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  OnGpu one(*gpu, shape(5, 7, 3, DType::kF32, DType::kF32, ""));
  gpu->product(one.product);
  const std::vector<char> before = one.bits();
  GpuProduct p = one.product;
  p.k = 0, p.accumulate = true;
  gpu->product(p);
  EXPECT_EQ(one.bits(), before);
  p.accumulate = false, p.n = 6;  // the last column is none of its business
  gpu->product(p);
  std::vector<char> want(before.size());
  for (size_t r = 0; r < 5; ++r) std::memcpy(&want[(r * 7 + 6) * 4], &before[(r * 7 + 6) * 4], 4);
  EXPECT_EQ(one.bits(), want);
  p.bias = p.c;
  EXPECT_THROW(gpu->product(p), Error);
}

TEST(Products, RefusesABiasOfAnotherType) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  OnGpu one(*gpu, shapes()[1]);
  GpuProduct p = one.product;
  p.bias_dtype = DType::kF32;
  EXPECT_THROW(gpu->product(p), Error);
  EXPECT_THROW(gpu->note_product(p), Error);
}

}  // namespace
}  // namespace frit
