// The simulator counts exactly what kernels request.
#include "frit/simt/test_kernels.h"

namespace frit {
namespace {

using namespace simt;

FRIT_KERNEL(256, 1) copy_kernel(Global<const float> x, Global<float> y, int64_t n) {
  wait_for_previous();
  const int64_t i = (block_index() * thread_count() + thread_index()) * 4;
  store_span<4>(y, i, n, load_span<4>(x, i, n, 0.0f));
}
TEST(SimulatorCounts, Copy) {
  for (int64_t n : {1, 31, 32, 33, 1023, 1024, 1025, 4096}) {
    SimTest t;
    auto x = t.tensor<float>(n), y = t.tensor<float>(n);
    t.fill_with(x, [](int64_t i) { return i; });
    const int64_t blocks = (n + 1023) / 1024;
    t.launch("copy", copy_kernel, {blocks, 256, 0}, x.constant(), y.global(), n);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(y.p[i], static_cast<float>(i));
    const sim::Counts& c = t.gpu.counts();
    EXPECT_EQ(c.launches, 1);
    EXPECT_EQ(c.blocks, blocks);
    EXPECT_EQ(c.barriers, 0);
    EXPECT_EQ(c.read_bytes, n * 4);
    EXPECT_EQ(c.written_bytes, n * 4);
    if (n % 32 == 0) {
      EXPECT_EQ(c.read_sectors, n / 8);
      EXPECT_EQ(c.written_sectors, n / 8);
    }
    t.launch("copy", copy_kernel, {blocks, 256, 0}, x.constant(), y.global(), n);
    EXPECT_EQ(c.launches, 2);
    EXPECT_EQ(c.read_bytes, n * 8);
    t.gpu.reset_counts();
    EXPECT_EQ(c.read_bytes + c.launches + c.blocks, 0);
  }
}

// Element i * stride for thread i, `repeats` times, all lanes the same one if stride is 0.
FRIT_KERNEL(64, 1) strided_kernel(Global<const float> x, int stride, int repeats, bool with_barrier) {
  wait_for_previous();
  for (int r = 0; r < repeats; ++r) {
    load(x, thread_index() * stride);
    if (with_barrier) barrier();
  }
}
TEST(SimulatorCounts, Sectors) {
  SimTest t;
  auto x = t.tensor<float>(64 * 64);
  t.gpu.fill(x.p, 0, 64 * 64 * 4);
  const auto sectors = [&](int threads, int stride, int repeats, bool with_barrier) {
    t.gpu.reset_counts();
    t.launch("strided", strided_kernel, {1, threads, 0}, x.constant(), stride, repeats, with_barrier);
    EXPECT_EQ(t.gpu.counts().read_bytes, threads * repeats * 4);
    EXPECT_EQ(t.gpu.counts().barriers, with_barrier ? repeats : 0);
    return t.gpu.counts().read_sectors;
  };
  EXPECT_EQ(sectors(32, 1, 1, false), 4);
  EXPECT_EQ(sectors(64, 1, 1, false), 8);
  EXPECT_EQ(sectors(32, 0, 1, false), 1);
  EXPECT_EQ(sectors(32, 2, 1, false), 8);
  EXPECT_EQ(sectors(32, 8, 1, false), 32);
  EXPECT_EQ(sectors(32, 33, 1, false), 32);
  EXPECT_EQ(sectors(33, 8, 1, false), 33);
  for (bool with_barrier : {false, true}) EXPECT_EQ(sectors(64, 1, 10, with_barrier), 80);
  t.gpu.set_detailed_counts(false);
  EXPECT_EQ(sectors(32, 1, 1, false), 0);
}

// A [32][pitch] matrix in shared memory, written by rows, read by columns.
FRIT_KERNEL(32, 1) transposed_kernel(int pitch) {
  wait_for_previous();
  const Shared<float> s = shared_array<float>(0);
  for (int row = 0; row < 32; ++row) store(s, row * pitch + thread_index(), 1.0f);
  barrier();
  for (int row = 0; row < 32; ++row) load(s, thread_index() * pitch + row);
}
TEST(SimulatorCounts, BankConflictsOfATransposition) {
  SimTest t;
  for (int pitch : {32, 33}) {
    t.gpu.reset_counts();
    t.launch("transposed", transposed_kernel, {1, 32, 32 * 33 * 4}, pitch);
    EXPECT_EQ(t.gpu.counts().shared_accesses, 64);
    EXPECT_EQ(t.gpu.counts().shared_rounds, 32 + 32 * (pitch == 32 ? 32 : 1));
  }
}

// One vector of N floats a lane from byte lane * step.
template <int N>
FRIT_KERNEL(32, 1)
shared_vectors_kernel(int step) {
  wait_for_previous();
  const Shared<float> s = shared_array<float>(0);
  for (int i = thread_index(); i < 2048; i += 32) store(s, i, 0.0f);
  barrier();
  load_vec<N>(s, thread_index() * step);
}
TEST(SimulatorCounts, BankConflictsOfVectors) {
  SimTest t;
  const auto rounds = [&](auto kernel, int step) {
    t.gpu.reset_counts();
    t.launch("shared_vectors", kernel, {1, 32, 8192}, step);
    return std::pair(t.gpu.counts().shared_accesses - 64, t.gpu.counts().shared_rounds - 64);
  };
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_EQ(rounds(shared_vectors_kernel<1>, 1), Pair(1, 1));
  EXPECT_EQ(rounds(shared_vectors_kernel<1>, 0), Pair(1, 1));  // one word for all: a broadcast
  EXPECT_EQ(rounds(shared_vectors_kernel<1>, 2), Pair(1, 2));
  EXPECT_EQ(rounds(shared_vectors_kernel<1>, 32), Pair(1, 32));
  EXPECT_EQ(rounds(shared_vectors_kernel<2>, 2), Pair(2, 2));
  EXPECT_EQ(rounds(shared_vectors_kernel<2>, 4), Pair(2, 4));
  EXPECT_EQ(rounds(shared_vectors_kernel<4>, 4), Pair(4, 4));
  EXPECT_EQ(rounds(shared_vectors_kernel<4>, 32), Pair(4, 32));
  EXPECT_EQ(rounds(shared_vectors_kernel<4>, 36),
            Pair(4, 4));  // rows of 32 and a pad of 4: 8 lanes, 8 different bank groups
}

// Half a mean and a maximum a row: 2 reductions, 1 atomic, 1 element in and out a thread.
FRIT_KERNEL(64, 1) known_kernel(Global<const float> x, Global<float> y, Global<float> total) {
  wait_for_previous();
  const int64_t i = block_index() * thread_count() + thread_index();
  const float value = load(x, i), sum = block_sum(value, shared_array<float>(0));
  const float maximum = block_max(value, shared_array<float>(128));
  store(y, i, value - sum / 64 - maximum);
  if (thread_index() == 0) atomic_add(total, 0, sum);
}
TEST(SimulatorCounts, KnownKernel) {
  SimTest t;
  const int64_t blocks = 7, n = blocks * 64;
  auto x = t.tensor<float>(n), y = t.tensor<float>(n), total = t.tensor<float>(1);
  t.fill_with(x, [](int64_t i) { return i % 5; });
  t.gpu.fill(total.p, 0, 4);
  t.launch("known", known_kernel, {blocks, 64, 256}, x.constant(), y.global(), total.global());
  const sim::Counts& c = t.gpu.counts();
  EXPECT_EQ(c.launches, 1);
  EXPECT_EQ(c.blocks, blocks);
  EXPECT_EQ(c.barriers, 2);  // of one block
  EXPECT_EQ(c.collectives, blocks * 2 * (4 * 5));
  EXPECT_EQ(c.read_bytes, n * 4);
  EXPECT_EQ(c.written_bytes, n * 4);
  EXPECT_EQ(c.read_sectors, n / 8);
  EXPECT_EQ(c.written_sectors, n / 8);
  EXPECT_EQ(c.atomics, blocks);
  EXPECT_EQ(c.shared_accesses, blocks * 2 * 4);  // each warp stores and loads once a reduction
  EXPECT_EQ(c.shared_rounds, blocks * 2 * 4);
}

// More elements than 32 bits count, without the memory for them.
FRIT_KERNEL(32, 1) sparse_kernel(Global<const uint16_t> x, Global<uint16_t> y, int64_t last) {
  wait_for_previous();
  if (thread_index() == 0) store(y, last, static_cast<uint16_t>(load(x, last) + 7));
}
TEST(SimulatorCounts, MoreThanTwoToThe31Elements) {
  SimTest t;
  const int64_t n = (int64_t{1} << 31) + 100;
  auto x = t.tensor<uint16_t>(n), y = t.tensor<uint16_t>(n);
  t.gpu.fill(x.p, 0, static_cast<size_t>(n) * 2);
  t.launch("sparse", sparse_kernel, {1, 32, 0}, x.constant(), y.global(), n - 1);
  EXPECT_EQ(y.p[n - 1], 7);
  t.expect_fault("out of bounds: reads 2 bytes at element 2147483748 of a tensor of 2147483748 bf16 elements", [&] {
    t.launch("sparse", sparse_kernel, {1, 32, 0}, x.constant(), y.global(), n);
  });
}

}  // namespace
}  // namespace frit
