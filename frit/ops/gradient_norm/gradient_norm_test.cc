// What the case table cannot say: gradients that are not finite, and blocks of more than 2^31 elements.
#include "frit/ops/gradient_norm/gradient_norm.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <memory>

namespace frit {
namespace {

struct Norm {
  double sum = -1;
  int32_t not_finite = -1;
};
Norm norm_of(const Tensor& gradients) {
  ThreadPool pool(2);
  Memory memory;
  Context context(pool, memory);
  Norm norm;
  gradient_norm(context, gradients, Tensor(&norm.sum, DType::kF64, {1}), Tensor(&norm.not_finite, DType::kI32, {1}));
  return norm;
}

TEST(GradientNorm, SeesNotFiniteAnywhere) {
  constexpr int64_t kN = 70003;
  std::vector<float> g(kN, 1.0f);
  std::vector<bfloat16> h(kN, bfloat16(1.0f));
  const Tensor f32(g.data(), DType::kF32, {kN}), bf16(h.data(), DType::kBF16, {kN});
  EXPECT_EQ(norm_of(f32).sum, kN);
  EXPECT_EQ(norm_of(f32).not_finite, 0);
  EXPECT_EQ(norm_of(bf16).sum, kN);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {infinity, -infinity, nan, -nan}) {
    for (const int64_t at : {int64_t{0}, int64_t{15}, int64_t{16384}, int64_t{33333}, kN - 4, kN - 1}) {
      g[at] = bad, h[at] = bfloat16(bad);
      for (const Tensor& t : {f32, bf16}) {
        const Norm norm = norm_of(t);
        EXPECT_EQ(norm.not_finite, 1) << bad << " at " << at;
        EXPECT_FALSE(std::isfinite(norm.sum));
      }
      g[at] = 1, h[at] = bfloat16(1);
    }
  }
  g[5] = infinity, g[6] = -infinity;  // they do not cancel
  EXPECT_EQ(norm_of(f32).not_finite, 1);
  g[5] = g[6] = std::numeric_limits<float>::max();  // finite, though its square is no fp32 number
  EXPECT_EQ(norm_of(f32).not_finite, 0);
}

TEST(GradientNorm, IndicesPast2To31) {
  constexpr int64_t kN = (int64_t{1} << 31) + 77;
  const size_t bytes = kN * sizeof(bfloat16);
  // Read alone, all pages but two are the kernel's one page of zeros.
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(p, MAP_FAILED);
  madvise(p, bytes, MADV_HUGEPAGE);
  const Tensor g(p, DType::kBF16, {kN});
  g.data<bfloat16>()[3] = bfloat16(2);
  g.data<bfloat16>()[kN - 1] = bfloat16(3);
  g.data<bfloat16>()[(int64_t{1} << 31) + 1] = bfloat16(-6);
  EXPECT_EQ(norm_of(g).sum, 4 + 9 + 36);
  munmap(p, bytes);
}

TEST(GradientNormGpu, SeesNotFiniteAnywhere) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool(1);
  Memory memory(gpu.get());
  Context context(pool, memory, gpu.get());
  constexpr int64_t kN = 20003;
  const Buffer sum = context.allocate({1}, DType::kF64, "sum"), flag = context.allocate({1}, DType::kI32, "flag"),
               g = context.allocate({kN}, DType::kBF16, "gradients");
  std::vector<bfloat16> host(kN, bfloat16(1.0f));
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {1.0f, infinity, -infinity, nan, -nan}) {
    for (const int64_t at : {int64_t{0}, int64_t{8191}, kN - 3, kN - 1}) {
      host[at] = bfloat16(bad);
      gpu->upload(g->raw(), host.data(), kN * sizeof(bfloat16));
      gradient_norm(context, g, sum, flag);
      gpu->synchronize();
      Norm norm;
      gpu->download(&norm.sum, sum->raw(), sizeof(double));
      gpu->download(&norm.not_finite, flag->raw(), sizeof(int32_t));
      EXPECT_EQ(norm.not_finite, bad != 1.0f) << bad << " at " << at;
      EXPECT_EQ(std::isfinite(norm.sum), bad == 1.0f);
      host[at] = bfloat16(1.0f);
    }
  }
}

TEST(GradientNorm, Errors) {
  ThreadPool pool(1);
  Memory memory;
  Context context(pool, memory);
  double sum;
  int32_t flag;
  float g[4] = {};
  const Tensor gradients(g, DType::kF32, {4}), sum_tensor(&sum, DType::kF64, {1}), flag_tensor(&flag, DType::kI32, {1});
  EXPECT_THROW(gradient_norm(context, Tensor(), sum_tensor, flag_tensor), std::invalid_argument);
  EXPECT_THROW(gradient_norm(context, gradients, flag_tensor, flag_tensor), std::invalid_argument);
  EXPECT_THROW(gradient_norm(context, gradients, sum_tensor, sum_tensor), std::invalid_argument);
  EXPECT_THROW(gradient_norm(context, gradients, sum_tensor, Tensor()), std::invalid_argument);
  EXPECT_THROW(gradient_norm(context, Tensor(g, DType::kF16, {4}), sum_tensor, flag_tensor), std::invalid_argument);
}

}  // namespace
}  // namespace frit
