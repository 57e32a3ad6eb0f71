// Planted bugs of memory that the simulator must catch, naming kernel, block and thread: bounds, alignment, unwritten
// elements. The mistakes are those that famous kernels made.
#include <cmath>
#include <vector>

#include "frit/simt/test_kernels.h"

namespace frit {
namespace {

using namespace simt;

// ---- Tails and bounds ----

// Doubles x; `extra` elements past the end are treated too, and threads past `last_thread` do nothing.
FRIT_KERNEL(256, 1) double_kernel(Global<const float> x, Global<float> y, int64_t read_end, int64_t write_end) {
  wait_for_previous();
  const int64_t i = block_index() * thread_count() + thread_index();
  const float value = i < read_end ? load(x, i) : 0.0f;
  if (i < write_end) store(y, i, 2 * value);
}

TEST(SimulatorBounds, OffByOneTail) {
  SimTest t;
  const int64_t n = 1025;
  auto x = t.tensor<float>(n), y = t.tensor<float>(n);
  t.fill_with(x, [](int64_t i) { return i; });
  t.launch("double", double_kernel, {9, 128, 0}, x.constant(), y.global(), n, n);
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(y.p[i], 2.0f * static_cast<float>(i));
  t.expect_fault(
      "[kernel double, block 8, thread 1] out of bounds: reads 4 bytes at element 1025 of a tensor of 1025 f32 "
      "elements",
      [&] {
        t.launch("double", double_kernel, {9, 128, 0}, x.constant(), y.global(), n + 1, n);
      });
  t.expect_fault(
      "[kernel double, block 8, thread 1] out of bounds: writes 4 bytes at element 1025 of a tensor of 1025 f32 "
      "elements",
      [&] {
        t.launch("double", double_kernel, {9, 128, 0}, x.constant(), y.global(), n, n + 1);
      });
  // The machine works on after a fault.
  t.launch("double", double_kernel, {9, 128, 0}, x.constant(), y.global(), n, n);
}

// A pointer beyond its tensor is not taken for one to the neighbour that lives there.
TEST(SimulatorBounds, NeighbourIsOutOfBounds) {
  SimTest t;
  float* p = static_cast<float*>(t.gpu.allocate(512));
  t.gpu.born(p, 256, DType::kF32);
  t.gpu.born(p + 64, 256, DType::kF32);
  t.made.push_back(p);
  const float zeros[128] = {};
  t.gpu.upload(p, zeros, sizeof(zeros));
  auto y = t.tensor<float>(65);
  t.expect_fault(
      "[kernel double, block 0, thread 64] out of bounds: reads 4 bytes at element 64 of a tensor of 64 f32 elements",
      [&] {
        t.launch("double", double_kernel, {1, 65, 0}, Global<const float>(p), y.global(), 65, 65);
      });
  t.gpu.died(p + 64);
}

TEST(SimulatorBounds, DeadMemory) {
  SimTest t;
  auto x = t.tensor<float>(64), y = t.tensor<float>(64);
  t.fill_with(x, [](int64_t) { return 1; });
  t.gpu.died(x.p);
  t.expect_fault("[kernel double, block 0, thread 0] reads 4 bytes at 0x", [&] {
    t.launch("double", double_kernel, {1, 64, 0}, x.constant(), y.global(), 64, 64);
  });
}

FRIT_KERNEL(32, 1) vector_at_kernel(Global<float> x, int64_t first) {
  wait_for_previous();
  Vec<float, 4> v = {};
  if (thread_index() == 3) store_vec<4>(x, first, v);
}
TEST(SimulatorBounds, MisalignedVector) {
  SimTest t;
  auto x = t.tensor<float>(64);
  t.launch("vector_at", vector_at_kernel, {1, 32, 0}, x.global(), 4);
  t.expect_fault(
      "[kernel vector_at, block 0, thread 3] misaligned: writes 16 bytes at element 5 of a tensor of 64 f32 elements, "
      "4 bytes past a multiple of 16",
      [&] {
        t.launch("vector_at", vector_at_kernel, {1, 32, 0}, x.global(), 5);
      });
  t.expect_fault("[kernel vector_at, block 0, thread 3] out of bounds: writes 16 bytes at element 64", [&] {
    t.launch("vector_at", vector_at_kernel, {1, 32, 0}, x.global(), 64);
  });
  t.expect_fault("out of bounds: writes 16 bytes at element -4", [&] {
    t.launch("vector_at", vector_at_kernel, {1, 32, 0}, x.global(), -4);
  });
}

FRIT_KERNEL(32, 1) halves_kernel(Global<uint16_t> x) {
  wait_for_previous();
  store(x, thread_index(), static_cast<uint16_t>(1));
}
TEST(SimulatorBounds, PiecesOfElements) {
  SimTest t;
  auto x = t.tensor<float>(64);
  t.expect_fault("[kernel halves, block 0, thread 0] writes 2 bytes inside element 0 of a tensor of 64 f32 elements",
                 [&] {
                   t.launch("halves", halves_kernel, {1, 32, 0}, Global<uint16_t>(reinterpret_cast<uint16_t*>(x.p)));
                 });
}

FRIT_KERNEL(32, 1) shared_at_kernel(int64_t i) {
  wait_for_previous();
  store(shared_array<float>(0), i, 1.0f);
}
FRIT_KERNEL(32, 1) shared_vector_kernel(int64_t offset) {
  wait_for_previous();
  store_vec<2>(shared_array<float>(offset), 0, Vec<float, 2>{});
}
TEST(SimulatorBounds, SharedMemory) {
  SimTest t;
  t.launch("shared_at", shared_at_kernel, {1, 1, 128}, 31);
  t.expect_fault(
      "[kernel shared_at, block 0, thread 0] out of bounds: writes 4 bytes at byte 128 of 128 bytes of shared memory",
      [&] {
        t.launch("shared_at", shared_at_kernel, {1, 1, 128}, 32);
      });
  t.expect_fault("out of bounds: writes 4 bytes at byte -4", [&] {
    t.launch("shared_at", shared_at_kernel, {1, 1, 128}, -1);
  });
  t.expect_fault("misaligned: writes 8 bytes at byte 4 of shared memory", [&] {
    t.launch("shared_vector", shared_vector_kernel, {1, 1, 128}, 4);
  });
}

TEST(SimulatorBounds, LaunchLimits) {
  SimTest t;
  const auto refused = [&](SimTest::Grid grid) {
    EXPECT_THROW(t.launch("shared_at", shared_at_kernel, grid, 0), std::invalid_argument);
  };
  refused({1, 1025, 4}), refused({1, 0, 4}), refused({1, 1, 227 * 1024 + 1}), refused({int64_t{1} << 31, 1, 4}),
      refused({0, 1, 4});
  t.launch("shared_at", shared_at_kernel, {1, 1, 227 * 1024}, 0);
}

// ---- Unwritten memory ----

TEST(SimulatorUnwritten, ReadsOfUnwrittenMemory) {
  SimTest t;
  auto x = t.tensor<float>(64), y = t.tensor<float>(64);
  const auto run = [&] { t.launch("double", double_kernel, {1, 64, 0}, x.constant(), y.global(), 64, 64); };
  const char* unwritten =
      "[kernel double, block 0, thread 0] reads element 0 of a tensor of 64 f32 elements, which nothing has written";
  t.expect_fault(unwritten, run);
  float values[64] = {};
  t.gpu.upload(x.p, values, 4 * 40);
  t.expect_fault("thread 40] reads element 40 of a tensor of 64 f32 elements, which nothing has written", run);
  t.gpu.fill(x.p, 0, 256);
  run();
  t.gpu.poison(x.p + 8, 4);
  t.expect_fault("thread 8] reads element 8 of a tensor", run);
  t.gpu.poison(x.p, 256);
  EXPECT_TRUE(std::isnan(x.p[5]));
  t.expect_fault(unwritten, run);
}

FRIT_KERNEL(64, 1) read_shared_kernel(Global<float> y, int written) {
  wait_for_previous();
  const Shared<float> s = shared_array<float>(0);
  if (block_index() == 0 && thread_index() < written) store(s, thread_index(), 1.0f);
  barrier();
  store(y, block_index() * thread_count() + thread_index(), load(s, thread_index()));
}
TEST(SimulatorUnwritten, SharedMemoryStartsUnwrittenInEachBlock) {
  SimTest t;
  auto y = t.tensor<float>(128);
  t.launch("read_shared", read_shared_kernel, {1, 64, 256}, y.global(), 64);
  t.expect_fault(
      "[kernel read_shared, block 0, thread 63] reads 4 bytes at byte 252 of shared memory, which nothing has written",
      [&] {
        t.launch("read_shared", read_shared_kernel, {1, 64, 256}, y.global(), 63);
      });
  t.expect_fault(
      "[kernel read_shared, block 1, thread 63] reads 4 bytes at byte 252 of shared memory, which nothing has written",
      [&] {
        t.launch("read_shared", read_shared_kernel, {2, 64, 256}, y.global(), 64);
      });
}

// The grid is rounded down, so that the last elements are never written: they stay NaN, and a kernel that reads them
// throws.
TEST(SimulatorUnwritten, GridRoundedDown) {
  SimTest t;
  const int64_t n = 1000;
  auto x = t.tensor<float>(n), y = t.tensor<float>(n), z = t.tensor<float>(n);
  t.fill_with(x, [](int64_t i) { return i; });
  t.gpu.poison(y.p, n * 4);
  t.launch("double", double_kernel, {n / 128, 128, 0}, x.constant(), y.global(), n, n);
  std::vector<float> result(n);
  t.gpu.download(result.data(), y.p, n * 4);
  EXPECT_EQ(result[895], 1790.0f);
  for (int64_t i = 896; i < n; ++i) EXPECT_TRUE(std::isnan(result[static_cast<size_t>(i)])) << i;
  t.expect_fault(
      "[kernel double, block 7, thread 0] reads element 896 of a tensor of 1000 f32 elements, which nothing has "
      "written",
      [&] {
        t.launch("double", double_kernel, {8, 128, 0}, y.constant(), z.global(), n, n);
      });
}

FRIT_KERNEL(64, 1) skip_one_kernel(Global<float> y, int skipped) {
  wait_for_previous();
  if (thread_index() != skipped) store(y, thread_index(), 1.0f);
}
TEST(SimulatorUnwritten, OutputElementNeverWritten) {
  SimTest t;
  auto y = t.tensor<float>(64);
  t.gpu.poison(y.p, 256);
  t.launch("skip_one", skip_one_kernel, {1, 64, 0}, y.global(), 17);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(std::isnan(y.p[i]), i == 17) << i;
}

FRIT_KERNEL(64, 1) too_early_kernel(Global<const float> x, int early) {
  if (thread_index() != early) wait_for_previous();
  load(x, thread_index());
}
TEST(SimulatorUnwritten, MissingWaitForPrevious) {
  SimTest t;
  auto x = t.tensor<float>(64);
  t.fill_with(x, [](int64_t i) { return i; });
  t.launch("too_early", too_early_kernel, {1, 64, 0}, x.constant(), -1);
  t.expect_fault("[kernel too_early, block 0, thread 33] reads global memory before wait_for_previous()", [&] {
    t.launch("too_early", too_early_kernel, {1, 64, 0}, x.constant(), 33);
  });
}

// Two simulators do not know of each other.
TEST(SimulatorOrder, TwoMachines) {
  SimTest a, b;
  auto x = a.tensor<float>(64), y = b.tensor<float>(64), z = a.tensor<float>(64);
  a.fill_with(x, [](int64_t i) { return i; });
  b.expect_fault("where no tensor lives", [&] {
    b.launch("double", double_kernel, {1, 64, 0}, x.constant(), y.global(), 64, 64);
  });
  a.launch("double", double_kernel, {1, 64, 0}, x.constant(), z.global(), 64, 64);
  EXPECT_EQ(z.p[63], 126.0f);
}

}  // namespace
}  // namespace frit
