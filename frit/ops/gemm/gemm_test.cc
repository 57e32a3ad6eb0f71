// What the case table cannot say about gemm: rows are independent of their neighbours bit for bit, packed weights give
// the same bits, choices are honoured, and errors name what is wrong.
#include "frit/ops/gemm/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "frit/ops/case.h"

namespace frit {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_values(uint64_t seed, int64_t n) {
  CaseRandom random{seed};
  std::vector<float> v(n);
  for (float& x : v) x = static_cast<float>(random.normal());
  return v;
}
template <typename T>
std::vector<T> as(const std::vector<float>& v) {
  std::vector<T> result;
  for (float x : v) result.push_back(T(x));
  return result;
}
template <typename T>
Tensor matrix(std::vector<T>& v, int64_t rows, int64_t cols) {
  return Tensor(v.data(), DTypeOf<T>::value, {rows, cols});
}

struct Runner {
  ThreadPool pool;
  Memory memory;
  Context context{pool, memory};
  explicit Runner(int threads = 2) : pool(threads) {}
};

// The bits of one row, alone and at every kind of place among other rows, which hold NaN, infinities and huge numbers.
template <typename T>
void check_rows(int64_t n, int64_t k, bool transpose_b, bool bias, bool accumulate) {
  SCOPED_TRACE(fmt::format("n {} k {} {} bias {} accumulate {}", n, k, name_of(DTypeOf<T>::value), bias, accumulate));
  Runner one(1), two(2), three(3);
  const std::vector<float> row = random_values(1, k), start = random_values(4, n);
  std::vector<T> b = as<T>(random_values(2, n * k));
  std::vector<float> bias_values = random_values(3, n);
  const Tensor tb = transpose_b ? matrix(b, n, k) : matrix(b, k, n);
  const auto run = [&](Context& context, int64_t m, int64_t place) {
    std::vector<float> all(m * k), before(m * n, kNaN);
    const float others[] = {kNaN, std::numeric_limits<float>::infinity(), 3e38f, -3e38f};
    for (int64_t i = 0; i < m * k; ++i) all[i] = others[i / std::max<int64_t>(k, 1) % 4];
    std::copy(row.begin(), row.end(), all.begin() + place * k);
    std::copy(start.begin(), start.end(), before.begin() + place * n);
    std::vector<T> a = as<T>(all), c = as<T>(before);
    gemm(context, {.a = matrix(a, m, k),
                   .b = tb,
                   .c = matrix(c, m, n),
                   .transpose_a = false,
                   .transpose_b = transpose_b,
                   .accumulate = accumulate,
                   .bias = bias ? Tensor(bias_values.data(), DType::kF32, {n}) : Tensor()});
    EXPECT_EQ(context.used("gemm"), "packed");
    return std::vector<T>(c.begin() + place * n, c.begin() + (place + 1) * n);
  };
  const std::vector<T> alone = run(one.context, 1, 0);
  for (const T x : alone) ASSERT_TRUE(std::isfinite(static_cast<float>(x)));
  for (const int64_t m : {2, 3, 5, 6, 7, 12, 13, 33, 96, 97, 130, 300})
    for (const int64_t place : {int64_t{0}, int64_t{1}, m / 2, m - 2, m - 1})
      for (Runner* runner : {&one, &two, &three}) {
        const std::vector<T> got = run(runner->context, m, place);
        ASSERT_EQ(std::memcmp(got.data(), alone.data(), n * sizeof(T)), 0) << "row " << place << " of " << m;
      }
}

TEST(Gemm, RowsDoNotDependOnTheirNeighbours) {
  for (const bool transpose_b : {false, true}) {
    check_rows<float>(70, 33, transpose_b, false, false);
    check_rows<float>(33, 300, transpose_b, true, true);
    check_rows<float>(17, 700, transpose_b, false, true);
    check_rows<bfloat16>(70, 33, transpose_b, true, false);
    check_rows<bfloat16>(33, 300, transpose_b, true, true);
  }
  check_rows<float>(2100, 40, true, true, false);  // several slabs of columns
}

// A row's bits do not depend on which of the columns are computed with it, nor on rows being apart.
TEST(Gemm, ColumnsDoNotDependOnTheirNeighbours) {
  Runner runner;
  const int64_t m = 50, n = 200, k = 300;
  std::vector<float> a = random_values(1, m * k), b = random_values(2, n * k), whole(m * n), part(m * n);
  linear(runner.context, matrix(a, m, k), matrix(b, n, k), {}, matrix(whole, m, n));
  for (const auto& [from, to] : {std::pair{0, 1}, {0, 16}, {3, 20}, {7, 133}, {199, 200}}) {
    linear(runner.context, matrix(a, m, k), matrix(b, n, k).rows(from, to), {}, matrix(part, m, n).columns(from, to));
    for (int64_t i = 0; i < m; ++i)
      ASSERT_EQ(std::memcmp(&part[i * n + from], &whole[i * n + from], (to - from) * sizeof(float)), 0)
          << i << " " << from << " " << to;
  }
}

// A batch gives the bits of its products done one by one.
TEST(Gemm, BatchEqualsItsProducts) {
  Runner runner;
  const int64_t batch = 5, m = 37, n = 41, k = 290;
  std::vector<float> a = random_values(1, batch * m * k), b = random_values(2, batch * n * k), c(batch * m * n),
                     one(m * n);
  for (const bool transpose_a : {false, true}) {
    const Shape shape = transpose_a ? Shape{batch, k, m} : Shape{batch, m, k};
    gemm(runner.context, {.a = Tensor(a.data(), DType::kF32, shape),
                          .b = Tensor(b.data(), DType::kF32, {batch, n, k}),
                          .c = Tensor(c.data(), DType::kF32, {batch, m, n}),
                          .transpose_a = transpose_a,
                          .transpose_b = true,
                          .accumulate = false,
                          .bias = {}});
    for (int64_t i = 0; i < batch; ++i) {
      gemm(runner.context, {.a = Tensor(a.data() + i * m * k, DType::kF32, {shape[1], shape[2]}),
                            .b = Tensor(b.data() + i * n * k, DType::kF32, {n, k}),
                            .c = matrix(one, m, n),
                            .transpose_a = transpose_a,
                            .transpose_b = true,
                            .accumulate = false,
                            .bias = {}});
      ASSERT_EQ(std::memcmp(one.data(), &c[i * m * n], m * n * sizeof(float)), 0) << i;
    }
  }
}

TEST(LinearPacked, SameBitsAsGemm) {
  for (const int threads : {1, 3}) {
    Runner runner(threads);
    for (const int64_t n : {1, 15, 64, 65, 1000})
      for (const int64_t k : {0, 1, 33, 256, 600})
        for (const int64_t m : {0, 1, 2, 3, 4, 5, 6, 7, 64, 128, 200}) {
          std::vector<float> x = random_values(m, m * k), w = random_values(n, n * k), bias = random_values(k, n);
          std::vector<float> want(m * n, kNaN), got(m * n, kNaN);
          const Tensor tw = matrix(w, n, k), tb = m % 2 ? Tensor(bias.data(), DType::kF32, {n}) : Tensor();
          PackedWeight packed(runner.context, tw);
          EXPECT_EQ(packed.rows(), n);
          EXPECT_EQ(packed.cols(), k);
          linear(runner.context, matrix(x, m, k), tw, tb, matrix(want, m, n));
          linear_packed(runner.context, matrix(x, m, k), packed, tb, matrix(got, m, n));
          ASSERT_EQ(std::memcmp(want.data(), got.data(), m * n * sizeof(float)), 0) << m << "x" << n << "x" << k;
          if (m * n > 0) {
            ASSERT_TRUE(std::isfinite(got.back()));
          }
        }
  }
}

TEST(LinearPacked, Bf16WeightsAndRowsApart) {
  Runner runner;
  const int64_t m = 9, n = 70, k = 40;
  std::vector<bfloat16> w = as<bfloat16>(random_values(1, n * k));
  std::vector<float> w32, x = random_values(2, m * 50), want(m * n), got(m * 80, -7.0f);
  for (bfloat16 v : w) w32.push_back(static_cast<float>(v));
  const PackedWeight packed(runner.context, matrix(w, n, k));
  linear(runner.context, matrix(x, m, 50).columns(5, 45), matrix(w32, n, k), {}, matrix(want, m, n));
  linear_packed(runner.context, matrix(x, m, 50).columns(5, 45), packed, {}, matrix(got, m, 80).columns(3, 73));
  for (int64_t i = 0; i < m; ++i) {
    EXPECT_EQ(std::memcmp(&want[i * n], &got[i * 80 + 3], n * sizeof(float)), 0);
    EXPECT_EQ(got[i * 80 + 2], -7.0f);
    EXPECT_EQ(got[i * 80 + 73], -7.0f);
  }
}

TEST(LinearPacked, MovesAndChecks) {
  Runner runner;
  std::vector<float> w = random_values(1, 12), x = random_values(2, 8), y(6);
  PackedWeight first(runner.context, matrix(w, 3, 4)), second;
  EXPECT_FALSE(second.defined());
  EXPECT_THROW(linear_packed(runner.context, matrix(x, 2, 4), second, {}, matrix(y, 2, 3)), std::invalid_argument);
  second = std::move(first);
  PackedWeight third(std::move(second));
  EXPECT_TRUE(third.defined());
  linear_packed(runner.context, matrix(x, 2, 4), third, {}, matrix(y, 2, 3));
  EXPECT_NEAR(y[0], x[0] * w[0] + x[1] * w[1] + x[2] * w[2] + x[3] * w[3], 1e-5);
  EXPECT_THROW(linear_packed(runner.context, matrix(x, 4, 2), third, {}, matrix(y, 2, 3)), std::invalid_argument);
  EXPECT_THROW(linear_packed(runner.context, matrix(x, 2, 4), third, {}, matrix(y, 3, 2)), std::invalid_argument);
  EXPECT_THROW(linear_packed(runner.context, matrix(x, 2, 4), third, matrix(x, 1, 3), matrix(y, 2, 3)),
               std::invalid_argument);
}

std::string message_of(Context& context, const GemmArgs& args) {
  try {
    gemm(context, args);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

TEST(Gemm, RefusesWhatDoesNotFit) {
  Runner runner;
  std::vector<float> v(64);
  std::vector<bfloat16> h(64);
  const GemmArgs fits{.a = matrix(v, 2, 3),
                      .b = matrix(v, 3, 4),
                      .c = matrix(v, 2, 4),
                      .transpose_a = false,
                      .transpose_b = false,
                      .accumulate = false,
                      .bias = {}};
  const auto with = [&](auto&& change) {
    GemmArgs args = fits;
    change(args);
    return message_of(runner.context, args);
  };
  EXPECT_EQ(with([&](GemmArgs& g) { g.b = matrix(v, 5, 4); }),
            "[gemm] op(a) of f32[2, 3] has depth 3, op(b) of f32[5, 4] has 5");
  EXPECT_EQ(with([&](GemmArgs& g) { g.c = matrix(v, 4, 2); }), "[gemm] c is f32[4, 2], expected [2, 4]");
  EXPECT_EQ(with([&](GemmArgs& g) { g.b = matrix(h, 3, 4); }), "[gemm] b is bf16[3, 4], expected f32 as a is");
  EXPECT_EQ(with([&](GemmArgs& g) { g.c = matrix(h, 2, 4); }), "[gemm] c is bf16[2, 4], expected f32 or f32");
  EXPECT_EQ(with([&](GemmArgs& g) { g.bias = matrix(v, 1, 4); }), "[gemm] bias is f32[1, 4], expected [4]");
  EXPECT_EQ(with([&](GemmArgs& g) { g.a = Tensor(v.data(), DType::kF32, {6}); }),
            "[gemm] a is f32[6], expected two or three dimensions");
  EXPECT_EQ(with([&](GemmArgs& g) { g.bias_gradient = Tensor(v.data(), DType::kF32, {2}); }),
            "[gemm] a bias' gradient of f32[2, 3], expected a transposed a of two dimensions");
  EXPECT_EQ(with([&](GemmArgs& g) {
              g.a = matrix(v, 3, 2), g.transpose_a = true;
              g.bias_gradient = Tensor(v.data(), DType::kF32, {3});
            }),
            "[gemm] bias_gradient is f32[3], expected [2]");
  std::vector<float16> f16(64);
  EXPECT_EQ(with([&](GemmArgs& g) { g.a = matrix(f16, 2, 3); }),
            "[gemm] a is f16[2, 3], expected f32 or bf16 (f16 needs a GPU)");
  EXPECT_NE(with([&](GemmArgs& g) { g.a = Tensor(v.data(), DType::kF32, {2, 2, 3}); }), "");
  EXPECT_EQ(with([&](GemmArgs& g) {
              g.a = Tensor(v.data(), DType::kF32, {2, 2, 3});
              g.b = Tensor(v.data(), DType::kF32, {3, 3, 4});
              g.c = Tensor(v.data(), DType::kF32, {2, 2, 4});
            }),
            "[gemm] a batch of 2 in a, 3 in b, 2 in c");
}

TEST(Gemm, ForcedImplementations) {
  Runner runner;
  std::vector<float> v(64, 1.0f), c(64);
  std::vector<bfloat16> h(64);
  const GemmArgs f32{.a = matrix(v, 2, 3),
                     .b = matrix(v, 3, 4),
                     .c = matrix(c, 2, 4),
                     .transpose_a = false,
                     .transpose_b = false,
                     .accumulate = false,
                     .bias = {}};
  for (const char* name : gemm_implementations()) {
    runner.context.force("gemm", name);
    gemm(runner.context, f32);
    EXPECT_EQ(runner.context.used("gemm"), name);
    EXPECT_EQ(c[7], 3.0f);
  }
  runner.context.force("gemm", "onednn");
  EXPECT_EQ(message_of(runner.context, {.a = matrix(h, 2, 3),
                                        .b = matrix(h, 3, 4),
                                        .c = matrix(h, 2, 4),
                                        .transpose_a = false,
                                        .transpose_b = false,
                                        .accumulate = false,
                                        .bias = {}}),
            gemm_implementations().size() == 1
                ? "[gemm] onednn was forced, but this build has no oneDNN; a is bf16[2, 3]"
                : "[gemm] onednn was forced, but it multiplies f32 only; a is bf16[2, 3]");
  runner.context.force("gemm", "mkl");
  EXPECT_EQ(message_of(runner.context, f32), "[gemm] no implementation is called mkl, expected packed or onednn");
  runner.context.force("gemm", "");
  gemm(runner.context, f32);
  EXPECT_EQ(runner.context.used("gemm"), "packed");
}

// A matrix in the memory of this build's GPU.
class OnGpu {
 public:
  template <typename T>
  OnGpu(Gpu& gpu, const std::vector<T>& values, Shape shape) : gpu_(gpu), bytes_(values.size() * sizeof(T)) {
    data_ = gpu.allocate(bytes_);
    gpu.born(data_, bytes_, DTypeOf<T>::value);
    gpu.upload(data_, values.data(), bytes_);
    tensor_ = Tensor(data_, DTypeOf<T>::value, shape, gpu.device());
  }
  ~OnGpu() {
    gpu_.died(data_);
    gpu_.release(data_);
  }
  OnGpu(const OnGpu&) = delete;
  operator const Tensor&() const { return tensor_; }
  std::vector<float> values() const {
    std::vector<float> v(bytes_ / sizeof(float));
    gpu_.download(v.data(), data_, bytes_);
    return v;
  }

 private:
  Gpu& gpu_;
  size_t bytes_;
  void* data_;
  Tensor tensor_;
};

TEST(GemmGpu, IsTheLibrarysAndComputesNothingWhilePlanning) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool(1);
  Memory memory(gpu.get());
  Context context(pool, memory, gpu.get());
  const OnGpu a(*gpu, std::vector<float>(6, 1.0f), {2, 3}), b(*gpu, std::vector<float>(12, 2.0f), {3, 4}),
      c(*gpu, std::vector<float>(8, -1.0f), {2, 4}), bias(*gpu, std::vector<float>{0, 1, 2, 3}, {4});
  const GemmArgs args{
      .a = a, .b = b, .c = c, .transpose_a = false, .transpose_b = false, .accumulate = false, .bias = bias};
  memory.begin_recording();
  gemm(context, args);
  const Buffer planned = context.allocate({2, 3}, DType::kF32, "planned"),
               planned_bias = context.allocate({4}, DType::kF32, "bias");
  GemmArgs of_planned = args;
  of_planned.a = planned, of_planned.bias = planned_bias;
  gemm(context, of_planned);
  EXPECT_EQ(memory.end_recording().size(), 2u);  // gemm took nothing
  EXPECT_EQ(c.values(), std::vector<float>(8, -1.0f));
  context.force("gemm", "library");
  gemm(context, args);
  EXPECT_EQ(context.used("gemm"), "library");
  EXPECT_EQ(c.values(), (std::vector<float>{6, 7, 8, 9, 6, 7, 8, 9}));
  EXPECT_EQ(gpu->launches(), 0);
}

TEST(GemmGpu, RefusesWhatTheLibraryCannotDo) {
  const std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool(1);
  Memory memory(gpu.get());
  Context context(pool, memory, gpu.get());
  const OnGpu v(*gpu, std::vector<float>(64), {64}), h(*gpu, std::vector<bfloat16>(64), {64});
  const auto shaped = [](const Tensor& t, Shape shape) { return Tensor(t.raw(), t.dtype(), shape, t.device()); };
  const GemmArgs fits{.a = shaped(h, {2, 3}),
                      .b = shaped(h, {3, 4}),
                      .c = shaped(h, {2, 4}),
                      .transpose_a = false,
                      .transpose_b = false,
                      .accumulate = false,
                      .bias = {}};
  GemmArgs args = fits;
  args.bias = shaped(v, {4});
  EXPECT_EQ(message_of(context, args), "[gemm] bias is f32[4], expected bf16 as c is on a GPU");
  args.c = shaped(v, {2, 4}), args.bias = shaped(h, {4});
  EXPECT_EQ(message_of(context, args), "[gemm] bias is bf16[4], expected f32 as c is on a GPU");
  args = fits;
  args.a = shaped(h, {2, 0}), args.b = shaped(h, {0, 4}), args.bias = shaped(h, {4});
  EXPECT_EQ(message_of(context, args), "[gemm] op(a) of bf16[2, 0] has no depth: on a GPU there is no bias then");
  args = fits;
  args.bias = shaped(h, {5}).rows(1, 5);
  EXPECT_NE(message_of(context, args).find("expected a multiple of 16 bytes on a GPU"), std::string::npos);
  context.force("gemm", "packed");
  EXPECT_EQ(message_of(context, fits), "[gemm] no implementation on a GPU is called packed, expected library");
  EXPECT_THROW(PackedWeight(context, shaped(v, {4, 4})), std::invalid_argument);
}

}  // namespace
}  // namespace frit
