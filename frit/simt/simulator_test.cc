// Planted bugs of ordering that the simulator must catch, naming kernel, block and thread: races, barriers,
// collectives. The mistakes are those that famous kernels made.
#include <stdexcept>

#include "frit/simt/test_kernels.h"

namespace frit {
namespace {

using namespace simt;

// ---- Races ----

// Reverses a block's elements through shared memory.
FRIT_KERNEL(256, 1) reverse_kernel(Global<const float> x, Global<float> y, bool with_barrier) {
  wait_for_previous();
  const Shared<float> s = shared_array<float>(0);
  store(s, thread_index(), load(x, thread_index()));
  if (with_barrier) barrier();
  store(y, thread_index(), load(s, thread_count() - 1 - thread_index()));
}
TEST(SimulatorRaces, MissingBarrier) {
  SimTest t;
  auto x = t.tensor<float>(256), y = t.tensor<float>(256);
  t.fill_with(x, [](int64_t i) { return i; });
  t.launch("reverse", reverse_kernel, {1, 256, 1024}, x.constant(), y.global(), true);
  EXPECT_EQ(y.p[0], 255.0f);
  // The first thread that runs sees memory nobody wrote.
  t.expect_fault(
      "[kernel reverse, block 0, thread 0] reads 4 bytes at byte 1020 of shared memory, which nothing has written",
      [&] {
        t.launch("reverse", reverse_kernel, {1, 256, 1024}, x.constant(), y.global(), false);
      });
}

// Row sums with one scratch that is used again for the next row. Right as long as one warp does it all.
FRIT_KERNEL(256, 1) sums_kernel(Global<const float> x, Global<float> y, int rows, int columns, bool with_barrier) {
  wait_for_previous();
  const Shared<float> scratch = shared_array<float>(0);
  for (int row = 0; row < rows; ++row) {
    float sum = 0;
    for (int i = thread_index(); i < columns; i += thread_count()) sum += load(x, row * columns + i);
    sum = block_sum(sum, scratch);
    if (thread_index() == 0) store(y, row, sum);
    if (with_barrier) barrier();
  }
}
TEST(SimulatorRaces, ScratchUsedAgain) {
  SimTest t;
  auto x = t.tensor<float>(2 * 33), y = t.tensor<float>(2);
  t.fill_with(x, [](int64_t) { return 1; });
  // A block of a thread a column: 32 are one warp, where lane 0 alone uses the scratch; 33 are two.
  t.launch("sums", sums_kernel, {1, 32, 128}, x.constant(), y.global(), 2, 32, false);
  EXPECT_EQ(y.p[1], 32.0f);
  t.launch("sums", sums_kernel, {1, 64, 128}, x.constant(), y.global(), 2, 33, true);
  EXPECT_EQ(y.p[0], 33.0f);
  t.expect_fault(
      "[kernel sums, block 0, thread 0] race: writes 4 bytes at byte 0 of shared memory, which several threads, the "
      "last of block 0, read",
      [&] {
        t.launch("sums", sums_kernel, {1, 64, 128}, x.constant(), y.global(), 2, 33, false);
      });
}

FRIT_KERNEL(64, 1) neighbours_kernel(Global<float> x, int distance, bool over_blocks) {
  wait_for_previous();
  const int64_t base = over_blocks ? block_index() * thread_count() : 0;
  store(x, base + thread_index(), 1.0f);
  if (!over_blocks) barrier();
  store(x, base + thread_index() + distance, 2.0f);
}
TEST(SimulatorRaces, GlobalMemoryInsideABlock) {
  SimTest t;
  auto x = t.tensor<float>(128);
  t.launch("neighbours", neighbours_kernel, {1, 64, 0}, x.global(), 1,
           false);  // the barrier orders first and second store
  t.expect_fault(
      "[kernel neighbours, block 0, thread 1] race: writes element 1 of a tensor of 128 f32 elements, which thread 0 "
      "of "
      "block 0 wrote; no barrier orders the two",
      [&] {
        t.launch("neighbours", neighbours_kernel, {1, 64, 0}, x.global(), 1, true);
      });
}
TEST(SimulatorRaces, BetweenBlocks) {
  SimTest t;
  auto x = t.tensor<float>(256);
  for (sim::Order order : {sim::Order::kForward, sim::Order::kReversed}) {
    t.gpu.set_order(order);
    t.launch("neighbours", neighbours_kernel, {2, 64, 0}, x.global(), 0, true);
    // Barriers do not order blocks, and one block runs after the other here: found all the same.
    t.expect_fault(order == sim::Order::kForward ? "[kernel neighbours, block 1, thread 0] race: writes element 64"
                                                 : "[kernel neighbours, block 0, thread 0] race: writes element 64",
                   [&] {
                     t.launch("neighbours", neighbours_kernel, {2, 64, 0}, x.global(), 64, true);
                   });
  }
}

// Every block reads element 0; the last thread of block `writer` writes it.
FRIT_KERNEL(64, 1) read_and_write_kernel(Global<float> x, Global<float> y, int64_t writer) {
  wait_for_previous();
  store(y, block_index() * thread_count() + thread_index(), load(x, 0));
  if (block_index() == writer) {
    barrier();
    if (thread_index() == 63) store(x, 0, 2.0f);
  }
}
TEST(SimulatorRaces, WriteBehindManyReaders) {
  SimTest t;
  auto x = t.tensor<float>(1), y = t.tensor<float>(256);
  t.fill_with(x, [](int64_t) { return 1; });
  t.launch("read_and_write", read_and_write_kernel, {4, 64, 0}, x.global(), y.global(), -1);
  t.launch("read_and_write", read_and_write_kernel, {1, 64, 0}, x.global(), y.global(), 0);
  t.expect_fault(
      "[kernel read_and_write, block 3, thread 63] race: writes element 0 of a tensor of 1 f32 elements, which several "
      "threads, "
      "the last of block 3, read",
      [&] {
        t.launch("read_and_write", read_and_write_kernel, {4, 64, 0}, x.global(), y.global(), 3);
      });
  t.expect_fault(
      "[kernel read_and_write, block 1, thread 0] race: reads element 0 of a tensor of 1 f32 elements, which thread 63 "
      "of "
      "block 0 wrote",
      [&] {
        t.launch("read_and_write", read_and_write_kernel, {4, 64, 0}, x.global(), y.global(), 0);
      });
}

// Two threads read, and the second of them writes: the first reader is not forgotten.
FRIT_KERNEL(64, 1) two_readers_kernel(int first, int second) {
  wait_for_previous();
  const Shared<float> s = shared_array<float>(0);
  if (thread_index() == 0) store(s, 0, 1.0f);
  barrier();
  if (thread_index() == first || thread_index() == second) {
    const float x = load(s, 0);
    if (thread_index() == second) store(s, 0, x + 1);
  }
}
TEST(SimulatorRaces, FirstOfTwoReadersIsRemembered) {
  SimTest t;
  t.launch("two_readers", two_readers_kernel, {1, 64, 4}, 5, 5);
  t.expect_fault(
      "[kernel two_readers, block 0, thread 9] race: writes 4 bytes at byte 0 of shared memory, which several threads "
      "of "
      "warp 0 of block 0 read",
      [&] {
        t.launch("two_readers", two_readers_kernel, {1, 64, 4}, 5, 9);
      });
  t.expect_fault(
      "[kernel two_readers, block 0, thread 40] race: writes 4 bytes at byte 0 of shared memory, which several "
      "threads, the "
      "last of block 0, read",
      [&] {
        t.launch("two_readers", two_readers_kernel, {1, 64, 4}, 5, 40);
      });
}

// Lane 0 writes, the others read: ordered by a warp barrier over a mask that holds both, not by a shuffle.
FRIT_KERNEL(64, 1) warp_order_kernel(int how, uint32_t mask) {
  wait_for_previous();
  const Shared<float> s = shared_array<float>(0) + warp();
  const int me = lane();
  if (!(mask >> me & 1)) return;
  if (me == 0) store(s, 0, 1.0f);
  if (how == 1) warp_barrier(mask);
  if (how == 2) shuffle(1.0f, 0, mask);
  load(s, 0);
  if (how == 1) warp_barrier(mask);
  if (me == 1) store(s, 0, 2.0f);
}
TEST(SimulatorRaces, WarpBarrierOrdersItsLanes) {
  SimTest t;
  for (uint32_t mask : {kFullMask, 0x3u, 0xff0fu}) {
    t.launch("warp_order", warp_order_kernel, {1, 64, 8}, 1, mask);
    t.expect_fault("race: reads 4 bytes at byte 0 of shared memory, which thread 0 of block 0 wrote", [&] {
      t.launch("warp_order", warp_order_kernel, {1, 64, 8}, 2, mask);
    });
    t.expect_fault("[kernel warp_order, block 0, thread 1] race: reads", [&] {
      t.launch("warp_order", warp_order_kernel, {1, 64, 8}, 0, mask);
    });
  }
}
// 0 -> 1 by one pair, 1 -> 2 by another: 2 is ordered behind 0 by both, lane 3 by none.
FRIT_KERNEL(32, 1) chain_kernel(int reader) {
  wait_for_previous();
  const Shared<float> s = shared_array<float>(0);
  const int me = lane();
  if (me == 0) store(s, 0, 1.0f);
  if (me < 2) warp_barrier(0x3);
  if (me == 1 || me == 2) warp_barrier(0x6);
  if (me == 0 || me == 3) warp_barrier(me == 3 ? 0x8 : 0x1);
  if (me == reader) load(s, 0);
}
TEST(SimulatorRaces, WarpBarriersChain) {
  SimTest t;
  for (int reader : {0, 1, 2}) t.launch("chain", chain_kernel, {1, 32, 4}, reader);
  t.expect_fault("[kernel chain, block 0, thread 3] race: reads", [&] {
    t.launch("chain", chain_kernel, {1, 32, 4}, 3);
  });
}

FRIT_KERNEL(64, 1) atomics_kernel(Global<float> x, int64_t plain_writer, int64_t plain_reader) {
  wait_for_previous();
  const int64_t i = block_index() * thread_count() + thread_index();
  if (i == plain_writer)
    store(x, 0, 0.0f);
  else
    atomic_add(x, 0, 1.0f);
  if (i == plain_reader) load(x, 0);
}
TEST(SimulatorRaces, AtomicsAgainstPlainAccesses) {
  SimTest t;
  auto x = t.tensor<float>(1);
  const auto run = [&](int64_t writer, int64_t reader) {
    t.launch("atomics", atomics_kernel, {2, 64, 0}, x.global(), writer, reader);
  };
  t.expect_fault(
      "[kernel atomics, block 0, thread 0] updates element 0 of a tensor of 1 f32 elements, which nothing has written",
      [&] { run(-1, -1); });
  t.gpu.fill(x.p, 0, 4);
  run(-1, -1);
  EXPECT_EQ(x.p[0], 128.0f);
  t.expect_fault(
      "[kernel atomics, block 1, thread 6] race: writes element 0 of a tensor of 1 f32 elements, which several "
      "threads, the last "
      "of block 1, updated",
      [&] { run(70, -1); });
  t.expect_fault(
      "[kernel atomics, block 0, thread 1] race: updates element 0 of a tensor of 1 f32 elements, which thread 0 of "
      "block 0 wrote",
      [&] { run(0, -1); });
  // The last one to update is not ordered behind the updates before its own.
  t.expect_fault(
      "[kernel atomics, block 0, thread 5] race: reads element 0 of a tensor of 1 f32 elements, which several threads "
      "of warp 0 of "
      "block 0 updated",
      [&] { run(-1, 5); });
}

// ---- Last block ----

// Each block writes its partial sum; the last one adds them. mistake 1: others' partials are read without the join;
// 2: a block writes again after it has released.
FRIT_KERNEL(64, 1)
grid_sum_kernel(Global<const float> x, Global<float> partial, Global<float> y, Global<uint32_t> counter, int mistake) {
  wait_for_previous();
  const float sum = block_sum(load(x, block_index() * thread_count() + thread_index()), shared_array<float>(0));
  if (thread_index() == 0) store(partial, block_index(), sum);
  bool last;
  if (mistake == 1) {
    barrier();
    if (thread_index() == 0)
      store(shared_array<float>(128), 0, atomic_add(counter, 0, 1u) == block_count() - 1 ? 1.0f : 0.0f);
    barrier();
    last = load(shared_array<float>(128), 0) != 0;
  } else {
    last = last_block(counter, shared_array<uint32_t>(128));
  }
  if (mistake == 2 && !last && thread_index() == 0) store(partial, block_index(), sum);
  if (last && thread_index() == 0) {
    float total = 0;
    for (int64_t b = 0; b < block_count(); ++b) total += load(partial, b);
    store(y, 0, total);
    store(partial, 0, total);
  }
}
TEST(SimulatorRaces, LastBlock) {
  SimTest t;
  auto x = t.tensor<float>(5 * 64), partial = t.tensor<float>(5), y = t.tensor<float>(1);
  auto counter = t.tensor<uint32_t>(1);
  t.fill_with(x, [](int64_t) { return 1; });
  t.gpu.fill(counter.p, 0, 4);
  const auto run = [&](int mistake) {
    t.launch("grid_sum", grid_sum_kernel, {5, 64, 132}, x.constant(), partial.global(), y.global(), counter.global(),
             mistake);
  };
  for (sim::Order order : {sim::Order::kForward, sim::Order::kReversed}) {
    t.gpu.set_order(order);
    t.gpu.reset_counts();
    run(0);
    EXPECT_EQ(y.p[0], 320.0f);
    EXPECT_EQ(counter.p[0], 0u);
    EXPECT_EQ(t.gpu.counts().barriers, 3);
    EXPECT_EQ(t.gpu.counts().atomics, 5);
  }
  t.gpu.set_order(sim::Order::kForward);
  t.expect_fault(
      "[kernel grid_sum, block 4, thread 0] race: reads element 0 of a tensor of 5 f32 elements, which thread 0 of "
      "block 0 wrote",
      [&] { run(1); });
  t.gpu.fill(counter.p, 0, 4);
  t.expect_fault(
      "[kernel grid_sum, block 4, thread 0] race: reads element 0 of a tensor of 5 f32 elements, which thread 0 of "
      "block 0 wrote",
      [&] { run(2); });
}

// ---- Asynchronous copies ----

FRIT_KERNEL(64, 1) async_kernel(Global<const float> x, Global<float> y, int mistake) {
  wait_for_previous();
  const Shared<float> s = shared_array<float>(0);
  const int me = thread_index();
  if (mistake == 3) store_vec<4>(s, me * 4, Vec<float, 4>{});
  copy_async16(s, me * 4, x, me * 4, me != 63);
  if (mistake != 2) copy_async_commit();
  if (mistake == 0 || mistake == 4) copy_async_wait<0>();
  if (mistake == 1) copy_async_wait<1>();
  if (mistake == 2) copy_async_wait<0>();
  if (mistake != 4) barrier();
  store_vec<4>(y, me * 4, load_vec<4>(s, (63 - me) * 4));
}
TEST(SimulatorRaces, AsyncCopies) {
  SimTest t;
  auto x = t.tensor<float>(256), y = t.tensor<float>(256);
  t.fill_with(x, [](int64_t i) { return i + 1; });
  const auto run = [&](int mistake) {
    t.launch("async", async_kernel, {1, 64, 1024}, x.constant(), y.global(), mistake);
  };
  run(0);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(y.p[i], i < 4 ? 0.0f : static_cast<float>(252 - i / 4 * 4 + i % 4 + 1)) << i;
  const char* in_flight =
      "[kernel async, block 0, thread 63] reads 16 bytes at byte 0 of shared memory, where a copy_async of thread 0 of "
      "block 0 has not been waited for";
  for (int mistake : {1, 2, 3})
    t.expect_fault(in_flight, [&] { run(mistake); });  // 1: wrong group, 2: no commit, 3: no wait
  t.expect_fault(
      "[kernel async, block 0, thread 0] reads 16 bytes at byte 1008 of shared memory, which nothing has written",
      [&] { run(4); });
}

// ---- Barriers and collectives ----

FRIT_KERNEL(96, 1) early_return_kernel(int threads) {
  wait_for_previous();
  if (thread_index() >= threads) return;
  barrier();
}
TEST(SimulatorBarriers, EarlyReturnBeforeBarrier) {
  SimTest t;
  t.launch("early_return", early_return_kernel, {1, 96, 0}, 96);
  t.expect_fault(
      "[kernel early_return, block 0, thread 65] ends, while 65 of 96 threads wait at the barrier() of "
      "frit/simt/simulator_test.cc line",
      [&] {
        t.launch("early_return", early_return_kernel, {1, 96, 0}, 65);
      });
}
FRIT_KERNEL(96, 1) early_return_first_kernel() {
  wait_for_previous();
  if (thread_index() < 3) return;
  barrier();
}
FRIT_KERNEL(96, 1) barrier_in_branch_kernel() {
  wait_for_previous();
  if (warp() == 1)
    barrier();
  else
    warp_sum(1.0f);
}
FRIT_KERNEL(96, 1) barrier_against_shuffle_kernel(int who) {
  wait_for_previous();
  if (thread_index() == who)
    barrier();
  else
    warp_sum(1.0f);
}
TEST(SimulatorBarriers, BarrierInOneBranchOnly) {
  SimTest t;
  t.expect_fault(
      "[kernel early_return_first, block 0, thread 3] waits at the barrier() of frit/simt/simulator_test.cc line ",
      [&] {
        t.launch("early_return_first", early_return_first_kernel, {1, 96, 0});
      });
  t.expect_fault(
      "[kernel barrier_in_branch, block 0, thread 32] waits at the barrier() of frit/simt/simulator_test.cc line ",
      [&] {
        t.launch("barrier_in_branch", barrier_in_branch_kernel, {1, 96, 0});
      });
  t.expect_fault(
      "[kernel barrier_against_shuffle, block 0, thread 7] comes to barrier(), while lanes 0, 1, 2, 3 and 3 more of "
      "its warp "
      "wait for it at shuffle_xor",
      [&] {
        t.launch("barrier_against_shuffle", barrier_against_shuffle_kernel, {1, 96, 0}, 7);
      });
  t.expect_fault(
      "[kernel barrier_against_shuffle, block 0, thread 1] waits at shuffle_xor for lane 0 of its warp, which wait at "
      "barrier()",
      [&] {
        t.launch("barrier_against_shuffle", barrier_against_shuffle_kernel, {1, 96, 0}, 0);
      });
}

FRIT_KERNEL(96, 1) barrier_in_both_branches_kernel() {
  wait_for_previous();
  if (warp() == 1) {
    barrier();
  } else {
    barrier();
  }
}
TEST(SimulatorBarriers, BarriersAtDifferentPlaces) {
  SimTest t;
  t.expect_fault(
      "[kernel barrier_in_both_branches, block 0, thread 32] comes to the barrier() of frit/simt/simulator_test.cc "
      "line ",
      [&] {
        t.launch("barrier_in_both_branches", barrier_in_both_branches_kernel, {1, 96, 0});
      });
}

FRIT_KERNEL(64, 1) masks_kernel(int mistake) {
  wait_for_previous();
  const int me = lane();
  switch (mistake) {
    case 0:
      shuffle(1.0f, 0, 0x7fffffffu);
      break;  // 31 lanes, called by 32
    case 1:
      shuffle(1.0f, 0, me < 16 ? 0xffffu : kFullMask);
      break;  // lanes disagree
    case 2:
      if (me != 9) ballot(true);
      break;  // lane 9 ends
    case 3:
      if (me == 0) return;
      ballot(true);
      break;  // lane 0 has ended
    case 4:
      if (me < 16)
        shuffle(1.0f, 0);
      else
        shuffle_xor(1.0f, 1);
      break;
    case 5:
      if (me < 16)
        shuffle(1.0f, 0);
      else
        shuffle(1.0, 0);
      break;
    case 6:
      if (me < 16) shuffle(1.0f, 16, 0xffffu);
      break;  // takes from a lane outside
    case 7:
      if (me < 16)
        shuffle(1.0f, me, 0xffffu);
      else
        shuffle_xor(1.0f, 1, 0xffff0000u);
      break;  // right
    case 8:
      warp_barrier();
      break;
    case 9:
      shuffle(1.0f, 0, me < 16 ? 0x1ffffu : kFullMask);
      break;  // lane 16 is in both masks
  }
}
TEST(SimulatorBarriers, Masks) {
  SimTest t;
  const auto run = [&](int mistake, int threads = 64) {
    return [&t, mistake, threads] { t.launch("masks", masks_kernel, {1, threads, 0}, mistake); };
  };
  t.expect_fault(
      "[kernel masks, block 0, thread 31] calls shuffle with the mask 0x7fffffff, which lacks its own lane 31", run(0));
  t.expect_fault(
      "[kernel masks, block 0, thread 16] waits at shuffle for lanes 0, 1, 2, 3 and 12 more of its warp, which ended",
      run(1));
  t.expect_fault(
      "[kernel masks, block 0, thread 9] ends, while lanes 0, 1, 2, 3 and 5 more of its warp wait for it at ballot",
      run(2));
  t.expect_fault("[kernel masks, block 0, thread 1] waits at ballot for lane 0 of its warp, which ended", run(3));
  t.expect_fault(
      "[kernel masks, block 0, thread 16] comes to shuffle_xor of 4 bytes, while lanes 0, 1, 2, 3 and 12 more of its "
      "warp wait for "
      "it at shuffle of 4 bytes",
      run(4));
  t.expect_fault(
      "[kernel masks, block 0, thread 16] comes to shuffle of 8 bytes, while lanes 0, 1, 2, 3 and 12 more of its warp "
      "wait for "
      "it at shuffle of 4 bytes",
      run(5));
  t.expect_fault("takes the value of lane 16, which is not in the mask 0x0000ffff", run(6));
  t.expect_fault(
      "[kernel masks, block 0, thread 16] comes to shuffle with the mask 0xffffffff, while lanes 0, 1, 2, 3 and 12 "
      "more of its "
      "warp wait for it at shuffle with the mask 0x0001ffff",
      run(9));
  run(7)();
  run(8)();
  t.expect_fault(
      "[kernel masks, block 0, thread 32] calls warp_barrier with the mask 0xffffffff: the mask names lanes that do "
      "not exist in a "
      "block of 40 threads",
      run(8, 40));
}

// ---- Order of blocks ----

FRIT_KERNEL(32, 1) order_kernel(Global<float> x) {
  wait_for_previous();
  if (thread_index() == 0) atomic_add(x, 0, block_index() == 0 ? 1e8f : 1.0f);
}
TEST(SimulatorOrder, ReversedBlocksShowOrderDependence) {
  SimTest t;
  auto x = t.tensor<float>(1);
  float sums[2];
  for (int i = 0; i < 2; ++i) {
    t.gpu.set_order(i == 0 ? sim::Order::kForward : sim::Order::kReversed);
    t.gpu.fill(x.p, 0, 4);
    t.launch("order", order_kernel, {20, 32, 0}, x.global());
    sums[i] = x.p[0];
  }
  EXPECT_EQ(sums[0], 1e8f);
  EXPECT_NE(sums[0], sums[1]);
}

FRIT_KERNEL(64, 1) throwing_kernel() {
  wait_for_previous();
  if (thread_index() == 40) throw std::runtime_error("from a kernel");
  barrier();
}
TEST(SimulatorOrder, ExceptionsReachTheLaunch) {
  SimTest t;
  for (int i = 0; i < 3; ++i) EXPECT_THROW(t.launch("throwing", throwing_kernel, {3, 64, 0}), std::runtime_error);
  t.launch("early_return", early_return_kernel, {1, 96, 0}, 96);
}

}  // namespace
}  // namespace frit
