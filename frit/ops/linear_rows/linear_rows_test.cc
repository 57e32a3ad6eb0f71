// A row's bits do not depend on the rows beside it, on the instance that runs or on addresses; and errors.
#include "frit/ops/linear_rows/linear_rows.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "frit/ops/linear_rows/gpu.h"

namespace frit {
namespace {

struct GpuBench {
  std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool{1};
  Memory memory{gpu.get()};
  Context context{pool, memory, gpu.get()};
  std::vector<void*> made;

  ~GpuBench() {
    for (void* p : made) gpu->died(p), gpu->release(p);
  }
  // Numbers of that dtype, whole sixty-fourths, the same for the same seed; `skip` of them lie before the first.
  Tensor numbers(DType dtype, Shape shape, uint64_t seed, int64_t skip = 0) {
    const int64_t count = shape.numel() + skip;
    std::vector<char> bytes(static_cast<size_t>(count * size_of(dtype)));
    for (int64_t i = 0; i < count; ++i) {
      uint64_t state = (seed << 32) + static_cast<uint64_t>(i < skip ? 0 : i - skip);
      state = (state ^ state >> 29) * 0xbf58476d1ce4e5b9ull;
      state = (state ^ state >> 32) * 0x94d049bb133111ebull;
      const float x = static_cast<float>(static_cast<int64_t>(state >> 57) - 64) / 64.0f;
      if (dtype == DType::kF32) reinterpret_cast<float*>(bytes.data())[i] = x * 1.01f;
      if (dtype == DType::kBF16) reinterpret_cast<bfloat16*>(bytes.data())[i] = bfloat16(x);
      if (dtype == DType::kF16) reinterpret_cast<float16*>(bytes.data())[i] = float16(x);
    }
    char* p = static_cast<char*>(gpu->allocate(bytes.size()));
    made.push_back(p);
    gpu->born(p, bytes.size(), dtype);
    gpu->upload(p, bytes.data(), bytes.size());
    return Tensor(p + skip * size_of(dtype), dtype, shape, gpu->device());
  }
  std::vector<char> bytes(const Tensor& t) {
    std::vector<char> x(static_cast<size_t>(t.bytes()));
    gpu->download(x.data(), t.raw(), x.size());
    return x;
  }
};

TEST(LinearRows, ARowHasTheSameBitsWhateverIsBesideItAndWhicheverInstanceRuns) {
  GpuBench b;
  constexpr int64_t n = 35, most = 70;
  struct Call {
    int64_t k;
    bool norm;
  };
  // Pieces of one step, and of three.
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
    for (auto [k, norm] : {Call{200, false}, {200, true}, {520, true}}) {
      const Tensor x = b.numbers(dtype, {most, k}, 1), w = b.numbers(dtype, {n, k}, 2), bias = b.numbers(dtype, {n}, 3),
                   gamma = b.numbers(dtype, {k}, 4), beta = b.numbers(dtype, {k}, 5);
      const auto run = [&](const Tensor& rows, const char* instance) {
        const Tensor y = b.numbers(DType::kF32, {rows.dim(0), n}, 6);
        b.context.force("linear_rows_forward", instance);
        linear_rows(b.context,
                    {.x = rows,
                     .w = w,
                     .bias = bias,
                     .activation = Activation::kGelu,
                     .residual = {},
                     .gamma = norm ? gamma : Tensor(),
                     .beta = norm ? beta : Tensor(),
                     .normed = {}},
                    y);
        if (instance[0] != 0) {
          EXPECT_EQ(b.context.used("linear_rows_forward"), instance);
        }
        return b.bytes(y);
      };
      const std::vector<char> all = run(x, "");
      const size_t row_bytes = n * sizeof(float);
      for (int i = 0; i <= kLinearRowsAny; ++i)
        if (linear_rows_takes(i, dtype)) {
          EXPECT_EQ(run(x, kLinearRowsNames[i]), all) << kLinearRowsNames[i] << " " << name_of(dtype);
        }
      for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {5, 6}, {69, 70}, {3, 12}, {40, 57}}) {
        const std::vector<char> some = run(x.rows(begin, end), "");
        EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + static_cast<int64_t>(row_bytes) * begin))
            << "rows " << begin << " to " << end << " " << name_of(dtype);
      }
      // The same numbers at an odd address.
      const std::vector<char> odd = run(b.numbers(dtype, {9, k}, 1, 1), "");
      EXPECT_EQ(b.context.used("linear_rows_forward"), kLinearRowsNames[kLinearRowsAny]);
      EXPECT_TRUE(std::equal(odd.begin(), odd.end(), all.begin())) << name_of(dtype);
    }
}

TEST(LinearRows, FillsTheMultiprocessors) {
  // The tiles of mt-base's and mt-big's products: rows, n.
  const auto tile = [](int64_t rows, int64_t n, bool normed = false) {
    return std::string(kLinearRowsNames[linear_rows_choice(rows, n, DType::kF16, normed)]);
  };
  EXPECT_EQ(tile(4, 512), "16x8");
  EXPECT_EQ(tile(4, 1536, true), "16x16");
  EXPECT_EQ(tile(4, 32768), "16x32");
  EXPECT_EQ(tile(32, 512), "16x16");
  EXPECT_EQ(tile(32, 2048, true), "16x32");
  EXPECT_EQ(tile(32, 32768), "32x32");
  EXPECT_EQ(tile(128, 512), "16x32");
  EXPECT_EQ(tile(128, 2048, true), "16x32");
  EXPECT_EQ(tile(128, 4096, true), "64x64");
  EXPECT_EQ(tile(128, 32768), "64x64");
  EXPECT_EQ(tile(512, 512), "32x32");
  EXPECT_EQ(tile(512, 512, true), "16x32");
  EXPECT_EQ(tile(512, 4096), "64x64");
  // fp32 has tiles of 256 elements at most.
  EXPECT_EQ(kLinearRowsNames[linear_rows_choice(32, 1536, DType::kF32, false)], std::string("16x16"));
  EXPECT_EQ(kLinearRowsNames[linear_rows_choice(32, 32768, DType::kF32, false)], std::string("32x8"));
}

TEST(LinearRows, Errors) {
  ThreadPool pool{1};
  Memory memory;
  Context context{pool, memory};
  std::vector<float> v(64);
  const auto of = [&](Shape shape) { return Tensor(v.data(), DType::kF32, shape); };
  EXPECT_THROW(linear_rows(context, {.x = of({2, 4}), .w = of({3, 5})}, of({2, 3})), std::invalid_argument);
  EXPECT_THROW(linear_rows(context, {.x = of({2, 4}), .w = of({3, 4}), .bias = of({4})}, of({2, 3})),
               std::invalid_argument);
  EXPECT_THROW(linear_rows(context, {.x = of({2, 4}), .w = of({3, 4}), .gamma = of({4})}, of({2, 3})),
               std::invalid_argument);
  EXPECT_THROW(linear_rows(context, {.x = of({2, 4}), .w = of({3, 4}), .normed = of({2, 4})}, of({2, 3})),
               std::invalid_argument);
  EXPECT_THROW(linear_rows(context, {.x = of({2, 4}), .w = of({4, 4})}, of({2, 4})), std::invalid_argument);
}

}  // namespace
}  // namespace frit
