// beam_select against a full sort over thousands of rows, and its errors.
#include "frit/ops/beam_select/beam_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

namespace frit {
namespace {

struct Bench {
  ThreadPool pool{3};
  Memory memory;
  Context context{pool, memory};
};

uint64_t next(uint64_t& state) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return state >> 33;
}

TEST(BeamSelect, EqualsFullSortOverThousandsOfRows) {
  Bench b;
  uint64_t state = 42;
  int64_t rows_seen = 0, collected = 0, wanted = 0;
  for (int round = 0; round < 60; ++round) {
    const int64_t rows = 64, vocabulary = 1 + static_cast<int64_t>(next(state) % 3000);
    const int64_t count =
        1 + static_cast<int64_t>(next(state) % static_cast<uint64_t>(std::min<int64_t>(vocabulary, 40)));
    // From many ties (few levels) to none; every third round has forbidden tokens.
    const uint64_t levels = uint64_t{2} << (next(state) % 24);
    std::vector<float> x(rows * vocabulary);
    for (float& v : x) {
      v = static_cast<float>(next(state) % levels) / static_cast<float>(levels) * 20 - 10;
      if (round % 3 == 0 && next(state) % 2) v = -std::numeric_limits<float>::infinity();
    }
    std::vector<float> values(rows * count), lse(rows);
    std::vector<int32_t> columns(rows * count), survivors(rows);
    beam_select(b.context, Tensor(x.data(), DType::kF32, {rows, vocabulary}), count,
                Tensor(values.data(), DType::kF32, {rows, count}), Tensor(columns.data(), DType::kI32, {rows, count}),
                Tensor(lse.data(), DType::kF32, {rows}), Tensor(survivors.data(), DType::kI32, {rows}));
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = x.data() + r * vocabulary;
      std::vector<int32_t> order(vocabulary);
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(),
                [&](int32_t i, int32_t j) { return row[i] != row[j] ? row[i] > row[j] : i < j; });
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(columns[r * count + i], order[i])
            << "row " << r << " of [" << rows << ", " << vocabulary << "], rank " << i;
        ASSERT_EQ(values[r * count + i], row[order[i]]);
      }
      double sum = 0;
      for (int64_t i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<double>(row[i]));
      if (sum > 0) {
        ASSERT_NEAR(lse[r], std::log(sum), 4e-6);
      } else {
        ASSERT_EQ(lse[r], -std::numeric_limits<float>::infinity());
      }
      ASSERT_GE(survivors[r], count);
      ++rows_seen;
      if (levels > 100000 && round % 3 != 0) collected += survivors[r], wanted += count;
    }
  }
  EXPECT_EQ(rows_seen, 3840);
  // Without ties few more are collected than asked for: what the method is for.
  ASSERT_GT(wanted, 0);
  EXPECT_LT(static_cast<double>(collected), 1.5 * static_cast<double>(wanted));
}

// The GPU of this build, and tensors on it.
struct GpuBench {
  std::unique_ptr<Gpu> gpu = make_gpu();
  ThreadPool pool{1};
  Memory memory{gpu.get()};
  Context context{pool, memory, gpu.get()};
  std::vector<void*> made;

  ~GpuBench() { clear(); }
  void clear() {
    for (void* p : made) gpu->died(p), gpu->release(p);
    made.clear();
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

// Both forms against the CPU: the same values and columns, bit for bit. 10,000 rows on a GPU, a few dozen in the
// simulator.
TEST(BeamSelect, EqualsTheCpuOnAGpu) {
  GpuBench b;
  Bench cpu;
  uint64_t state = 43;
  int64_t rows_seen = 0;
  for (int round = 0; round < (built_with_cuda() ? 160 : 18); ++round) {
    const int64_t rows = built_with_cuda() ? 64 : 2,
                  vocabulary = 1 + static_cast<int64_t>(next(state) % (built_with_cuda() ? 60000 : 3000));
    const int64_t count =
        1 + static_cast<int64_t>(next(state) % static_cast<uint64_t>(std::min<int64_t>(vocabulary, 140)));
    const uint64_t levels = uint64_t{2} << (next(state) % 24);
    std::vector<float> x(rows * vocabulary);
    for (float& v : x) {
      v = static_cast<float>(next(state) % levels) / static_cast<float>(levels) * 20 - 10;
      if (round % 3 == 0 && next(state) % 2) v = -std::numeric_limits<float>::infinity();
    }
    std::vector<float> values(rows * count), lse(rows);
    std::vector<int32_t> columns(rows * count);
    beam_select(cpu.context, Tensor(x.data(), DType::kF32, {rows, vocabulary}), count,
                Tensor(values.data(), DType::kF32, {rows, count}), Tensor(columns.data(), DType::kI32, {rows, count}),
                Tensor(lse.data(), DType::kF32, {rows}), Tensor());
    b.context.force("beam_select_forward", count > 128 || round % 4 == 0 ? "radix" : "groups");
    const Tensor v = b.tensor(std::vector<float>(rows * count), DType::kF32, {rows, count}),
                 c = b.tensor(std::vector<int32_t>(rows * count), DType::kI32, {rows, count}),
                 l = b.tensor(std::vector<float>(rows), DType::kF32, {rows}),
                 s = b.tensor(std::vector<int32_t>(rows), DType::kI32, {rows});
    beam_select(b.context, b.tensor(x, DType::kF32, {rows, vocabulary}), count, v, c, l, s);
    EXPECT_EQ(b.values<float>(v), values)
        << "round " << round << ": " << rows << "x" << vocabulary << " best " << count;
    EXPECT_EQ(b.values<int32_t>(c), columns) << "round " << round << ": " << rows << "x" << vocabulary;
    const std::vector<float> got = b.values<float>(l);
    const std::vector<int32_t> survivors = b.values<int32_t>(s);
    for (int64_t r = 0; r < rows; ++r, ++rows_seen) {
      if (std::isinf(lse[r])) {
        EXPECT_EQ(got[r], lse[r]);
      } else {
        EXPECT_NEAR(got[r], lse[r], 4e-6);
      }
      EXPECT_GE(survivors[r], count);
    }
    b.clear();
  }
  EXPECT_GE(rows_seen, built_with_cuda() ? 10000 : 36);
}

// A row gives the same bits wherever it lies: rows of 4099 elements begin at every alignment.
TEST(BeamSelect, BitsDoNotDependOnWhereARowLiesOnAGpu) {
  for (const char* instance : {"groups", "radix"})
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      GpuBench b;
      b.context.force("beam_select_forward", instance);
      const int64_t rows = 8, vocabulary = 4099, count = 8;
      std::vector<float> x(rows * vocabulary);
      std::vector<uint16_t> x16(x.size());
      uint64_t state = 7;
      for (int64_t i = 0; i < vocabulary; ++i) {
        const float value = static_cast<float>(next(state) % 1000003) / 1000003.0f * 9 - 3;
        for (int64_t r = 0; r < rows; ++r)
          x[r * vocabulary + i] = value, x16[r * vocabulary + i] = bfloat16(value).bits;
      }
      const Tensor v = b.tensor(std::vector<float>(rows * count), DType::kF32, {rows, count}),
                   c = b.tensor(std::vector<int32_t>(rows * count), DType::kI32, {rows, count}),
                   l = b.tensor(std::vector<float>(rows), DType::kF32, {rows});
      const Shape shape{rows, vocabulary};
      beam_select(b.context, dtype == DType::kF32 ? b.tensor(x, dtype, shape) : b.tensor(x16, dtype, shape), count, v,
                  c, l, Tensor());
      const auto values = b.values<uint32_t>(v);
      const auto columns = b.values<int32_t>(c);
      const auto lse = b.values<uint32_t>(l);
      for (int64_t r = 1; r < rows; ++r) {
        EXPECT_EQ(lse[r], lse[0]) << instance << " row " << r;
        for (int64_t i = 0; i < count; ++i) {
          EXPECT_EQ(values[r * count + i], values[i]);
          EXPECT_EQ(columns[r * count + i], columns[i]);
        }
      }
    }
}

// How many blocks a row gets depends on how many rows there are; its bits must not. Rows of any alignment against one
// in parts; lengths about the ends of parts.
TEST(BeamSelect, BitsDoNotDependOnHowARowIsCutOnAGpu) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (DType dtype : {DType::kF32, DType::kBF16})
    for (int64_t vocabulary :
         {int64_t{5}, int64_t{2049}, int64_t{8192}, int64_t{8193}, int64_t{16389}, int64_t{-40003}}) {
      // One of the sums that a row is made of counts alone, so that the order in it shows.
      const bool sparse = vocabulary < 0;
      if (sparse) vocabulary = -vocabulary;
      const int64_t apart = sparse ? 256 * (dtype == DType::kF32 ? 4 : 8) : 1;
      GpuBench b;
      const int64_t stride = vocabulary + 8 - vocabulary % 8 + 1, rows = 5, count = 5;
      uint64_t state = 11;
      std::vector<float> x(rows * stride);
      std::vector<uint16_t> x16(x.size());
      for (int64_t i = 0; i < vocabulary; ++i) {
        const float value = i % apart == 0 ? static_cast<float>(next(state) % 1000003) / 1000003.0f * 9 - 3 : -infinity;
        for (int64_t r = 0; r < rows; ++r) x[r * stride + i] = value, x16[r * stride + i] = bfloat16(value).bits;
      }
      const Shape shape{rows, stride};
      const Tensor logits =
          (dtype == DType::kF32 ? b.tensor(x, dtype, shape) : b.tensor(x16, dtype, shape)).columns(0, vocabulary);
      std::vector<std::vector<uint32_t>> found;
      const auto select = [&](const char* instance, const Tensor& from) {
        b.context.force("beam_select_forward", instance);
        const int64_t n = from.dim(0);
        const Tensor v = b.tensor(std::vector<float>(n * count), DType::kF32, {n, count}),
                     c = b.tensor(std::vector<int32_t>(n * count), DType::kI32, {n, count}),
                     l = b.tensor(std::vector<float>(n), DType::kF32, {n});
        beam_select(b.context, from, count, v, c, l, Tensor());
        for (uint32_t lse : b.values<uint32_t>(l)) found.push_back({lse});
        const auto values = b.values<uint32_t>(v), columns = b.values<uint32_t>(c);
        for (int64_t r = 0; r < n; ++r) {
          auto& row = found[found.size() - static_cast<size_t>(n - r)];
          row.insert(row.end(), values.begin() + r * count, values.begin() + (r + 1) * count);
          row.insert(row.end(), columns.begin() + r * count, columns.begin() + (r + 1) * count);
        }
      };
      select("parts", logits.rows(0, 1));
      select("groups", logits);
      ASSERT_EQ(found.size(), 6u);
      for (const auto& row : found) EXPECT_EQ(row, found[0]) << name_of(dtype) << " " << vocabulary;
    }
}

TEST(BeamSelect, InfinitiesAndNanOnAGpu) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const char* instance : {"groups", "radix"}) {
    GpuBench b;
    b.context.force("beam_select_forward", instance);
    const std::vector<float> x{0.0f, -0.0f, infinity, -1.0f, -0.0f, 0.0f, nan, 1.0f, 2.0f, -infinity, 2.0f, 0.0f};
    const Tensor v = b.tensor(std::vector<float>(12), DType::kF32, {2, 6}),
                 c = b.tensor(std::vector<int32_t>(12), DType::kI32, {2, 6}),
                 l = b.tensor(std::vector<float>(2), DType::kF32, {2});
    beam_select(b.context, b.tensor(x, DType::kF32, {2, 6}), 6, v, c, l, Tensor());
    // +0 and -0 are equal, a NaN counts as -inf: the smaller column first.
    EXPECT_EQ(b.values<int32_t>(c), (std::vector<int32_t>{2, 0, 1, 4, 5, 3, 2, 4, 1, 5, 0, 3})) << instance;
    EXPECT_EQ(b.values<float>(v)[10], -infinity);
    EXPECT_EQ(b.values<float>(l)[0], infinity) << instance;
    EXPECT_TRUE(std::isnan(b.values<float>(l)[1])) << instance;
  }
}

TEST(BeamSelect, InfinityAndZeroSigns) {
  Bench b;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> x{0.0f, -0.0f, infinity, -1.0f, -0.0f, 0.0f};
  std::vector<float> values(5), lse(1);
  std::vector<int32_t> columns(5);
  beam_select(b.context, Tensor(x.data(), DType::kF32, {1, 6}), 5, Tensor(values.data(), DType::kF32, {1, 5}),
              Tensor(columns.data(), DType::kI32, {1, 5}), Tensor(lse.data(), DType::kF32, {1}), Tensor());
  EXPECT_EQ(columns, (std::vector<int32_t>{2, 0, 1, 4, 5}));  // +0 and -0 are equal: the smaller column first
  EXPECT_EQ(lse[0], infinity);
}

TEST(BeamSelect, Errors) {
  Bench b;
  std::vector<float> x(2 * 700, 1.0f), values(2 * 3);
  std::vector<int32_t> columns(2 * 3);
  const Tensor logits(x.data(), DType::kF32, {2, 700}), v(values.data(), DType::kF32, {2, 3}),
      c(columns.data(), DType::kI32, {2, 3});
  for (size_t at : {size_t{0}, size_t{699}, size_t{700 + 63}, size_t{1399}}) {
    x[at] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_THROW(beam_select(b.context, logits, 3, v, c, Tensor(), Tensor()), Error) << at;
    x[at] = 1.0f;
  }
  EXPECT_NO_THROW(beam_select(b.context, logits, 3, v, c, Tensor(), Tensor()));
  EXPECT_THROW(beam_select(b.context, logits, 0, v, c, Tensor(), Tensor()), std::invalid_argument);
  EXPECT_THROW(beam_select(b.context, logits, 701, v, c, Tensor(), Tensor()), std::invalid_argument);
  EXPECT_THROW(beam_select(b.context, logits, 2, v, c, Tensor(), Tensor()), std::invalid_argument);
}

}  // namespace
}  // namespace frit
