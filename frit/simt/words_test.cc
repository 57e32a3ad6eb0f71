// What the words of simt mean, in the simulator.
#include <algorithm>
#include <bit>
#include <cmath>

#include "frit/simt/funnel.h"
#include "frit/simt/test_kernels.h"
#include "frit/simt/warp_max.h"

namespace frit {
namespace {

using namespace simt;

// Numbers of -8 .. 8 in steps of 1/8, which 16-bit types hold exactly.
float number(int64_t i) {
  return static_cast<float>(i * 2654435761 % 129 - 64) / 8;
}

TEST(Words, FunnelRight) {
  EXPECT_EQ(funnel_right(0x89abcdefu, 0x01234567u, 0), 0x89abcdefu);
  EXPECT_EQ(funnel_right(0x89abcdefu, 0x01234567u, 16), 0x456789abu);
  EXPECT_EQ(funnel_right(0x89abcdefu, 0x01234567u, 28), 0x12345678u);
}

// ---- Warps ----

FRIT_KERNEL(64, 1) warp_max_kernel(Global<int32_t> y) {
  wait_for_previous();
  const int me = thread_index();
  store(y, me, warp_max_int((me * 7 + 3) % 32 - (me < 32 ? 40 : 10)));
}
TEST(Words, WarpMaxInt) {
  SimTest t;
  auto y = t.tensor<int32_t>(64);
  t.launch("warp_max", warp_max_kernel, {1, 64, 0}, y.global());
  for (int i = 0; i < 64; ++i) EXPECT_EQ(y.p[i], i < 32 ? -9 : 21);
}

FRIT_KERNEL(64, 1) shuffles_kernel(Global<int32_t> y) {
  wait_for_previous();
  const int me = thread_index(), threads = thread_count();
  store(y, me, shuffle(me, 5));
  store(y, threads + me, shuffle(me, me + 3));  // wraps
  store(y, 2 * threads + me, shuffle_xor(me, 9));
  store(y, 3 * threads + me, shuffle_down(me, 7));
  store(y, 4 * threads + me, shuffle_up(me, 7));
  const uint32_t half = lane() < 16 ? 0xffffu : 0xffff0000u;
  store(y, 5 * threads + me, shuffle_xor(me, 15, half));
  const double wide = shuffle_down(me + 0.5, 1);
  store(y, 6 * threads + me, static_cast<int32_t>(2 * wide));
}
TEST(Words, Shuffles) {
  SimTest t;
  auto y = t.tensor<int32_t>(7 * 64);
  t.launch("shuffles", shuffles_kernel, {1, 64, 0}, y.global());
  for (int i = 0; i < 64; ++i) {
    const int base = i / 32 * 32, lane = i % 32;
    EXPECT_EQ(y.p[i], base + 5);
    EXPECT_EQ(y.p[64 + i], base + (lane + 3) % 32);
    EXPECT_EQ(y.p[2 * 64 + i], i ^ 9);
    EXPECT_EQ(y.p[3 * 64 + i], lane + 7 < 32 ? i + 7 : i);
    EXPECT_EQ(y.p[4 * 64 + i], lane >= 7 ? i - 7 : i);
    EXPECT_EQ(y.p[5 * 64 + i], base + lane / 16 * 16 + (15 - lane % 16));
    EXPECT_EQ(y.p[6 * 64 + i], 2 * (lane < 31 ? i + 1 : i) + 1);
  }
  EXPECT_EQ(t.gpu.counts().collectives, 2 * (5 + 2 + 1));
}

FRIT_KERNEL(64, 1) ballots_kernel(Global<uint32_t> y) {
  wait_for_previous();
  store(y, thread_index(), ballot(thread_index() % 3 == 0));
  if (lane() < 8) store(y, thread_index(), ballot(lane() != 2, 0xffu));
}
TEST(Words, Ballot) {
  SimTest t;
  auto y = t.tensor<uint32_t>(64);
  t.launch("ballots", ballots_kernel, {1, 64, 0}, y.global());
  for (int w = 0; w < 2; ++w) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<uint32_t>((w * 32 + lane) % 3 == 0) << lane;
    for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(y.p[w * 32 + lane], lane < 8 ? 0xfbu : votes);
  }
}

// A lane runs ahead of the others through several collectives: each gets the values of its own.
FRIT_KERNEL(32, 1) chained_kernel(Global<int32_t> y, int rounds) {
  wait_for_previous();
  int x = lane();
  for (int i = 0; i < rounds; ++i)
    x = shuffle(x, lane() + 1) + (i % 2 == 0 ? shuffle_xor(x, 1, lane() < 16 ? 0xffffu : 0xffff0000u) : 0);
  store(y, lane(), x);
}
TEST(Words, CollectivesInARow) {
  SimTest t;
  auto y = t.tensor<int32_t>(32);
  t.launch("chained", chained_kernel, {1, 32, 0}, y.global(), 9);
  std::vector<int32_t> x(32), next(32);
  for (int i = 0; i < 32; ++i) x[static_cast<size_t>(i)] = i;
  for (int r = 0; r < 9; ++r) {
    for (size_t i = 0; i < 32; ++i) next[i] = x[(i + 1) % 32] + (r % 2 == 0 ? x[i ^ 1] : 0);
    x = next;
  }
  for (int i = 0; i < 32; ++i) EXPECT_EQ(y.p[i], x[static_cast<size_t>(i)]);
}

template <int width>
FRIT_KERNEL(32, 1)
warp_reductions_kernel(Global<const float> x, Global<float> sums, Global<float> maxima) {
  wait_for_previous();
  const float value = load(x, thread_index());
  store(sums, thread_index(), warp_sum<width>(value));
  store(maxima, thread_index(), warp_max<width>(value));
}
template <int width>
void check_warp_reductions() {
  SimTest t;
  auto x = t.tensor<float>(32), sums = t.tensor<float>(32), maxima = t.tensor<float>(32);
  t.fill_with(x, number);
  t.launch("warp_reductions", warp_reductions_kernel<width>, {1, 32, 0}, x.constant(), sums.global(), maxima.global());
  for (int i = 0; i < 32; ++i) {
    float sum = 0, maximum = -INFINITY;
    for (int j = i / width * width; j < i / width * width + width; ++j)
      sum += x.p[j], maximum = std::max(maximum, x.p[j]);
    EXPECT_EQ(sums.p[i], sum) << width;
    EXPECT_EQ(maxima.p[i], maximum) << width;
  }
  EXPECT_EQ(t.gpu.counts().collectives, 2 * std::countr_zero(static_cast<uint32_t>(width)));
}
TEST(Words, WarpReductions) {
  check_warp_reductions<32>(), check_warp_reductions<8>(), check_warp_reductions<2>(), check_warp_reductions<1>();
}

FRIT_KERNEL(1024, 1) block_reductions_kernel(Global<const float> x, Global<float> y) {
  wait_for_previous();
  const float value = load(x, thread_index());
  float two[2] = {value, value * value};
  block_sum(two, shared_array<float>(0));
  const float one = block_sum(value, shared_array<float>(256));
  const float maximum = block_max(value, shared_array<float>(384));
  store(y, thread_index() * 4, two[0]), store(y, thread_index() * 4 + 1, two[1]);
  store(y, thread_index() * 4 + 2, one), store(y, thread_index() * 4 + 3, maximum);
}
TEST(Words, BlockReductions) {
  for (int threads : {32, 64, 96, 1024}) {
    SimTest t;
    auto x = t.tensor<float>(threads), y = t.tensor<float>(threads * 4);
    t.fill_with(x, number);
    t.launch("block_reductions", block_reductions_kernel, {1, threads, 512}, x.constant(), y.global());
    double sum = 0, squares = 0;
    float maximum = -INFINITY;
    for (int i = 0; i < threads; ++i) sum += x.p[i], squares += x.p[i] * x.p[i], maximum = std::max(maximum, x.p[i]);
    for (int i = 0; i < threads; ++i) {
      EXPECT_EQ(y.p[4 * i], sum);
      EXPECT_EQ(y.p[4 * i + 1], squares);
      EXPECT_EQ(y.p[4 * i + 2], sum);
      EXPECT_EQ(y.p[4 * i + 3], maximum);
    }
    EXPECT_EQ(t.gpu.counts().barriers, 3);
  }
}

// ---- Tensor cores ----

// d[16, 8] = c + a[16, 16] b[16, 8] with the fragments laid out by the indices that the PTX manual gives.
template <typename T>
FRIT_KERNEL(32, 1)
product_kernel(Global<const T> a, Global<const T> b, Global<float> d) {
  wait_for_previous();
  const int g = lane() / 4, q = lane() % 4;
  const auto pair = [](T low, T high) { return low.bits | static_cast<uint32_t>(high.bits) << 16; };
  uint32_t fa[4], fb[2];
  for (int i = 0; i < 4; ++i) {
    const int row = g + i % 2 * 8, k = q * 2 + i / 2 * 8;
    fa[i] = pair(load(a, row * 16 + k), load(a, row * 16 + k + 1));
  }
  for (int i = 0; i < 2; ++i) fb[i] = pair(load(b, (q * 2 + i * 8) * 8 + g), load(b, (q * 2 + i * 8 + 1) * 8 + g));
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = load(d, (g + i / 2 * 8) * 8 + q * 2 + i % 2);
  mma_m16n8k16<T>(c, fa, fb);
  for (int i = 0; i < 4; ++i) store(d, (g + i / 2 * 8) * 8 + q * 2 + i % 2, c[i]);
}
// The same with A and B brought by ldmatrix: A row-major, B [k, n] row-major through the transposed form.
template <typename T>
FRIT_KERNEL(32, 1)
product_by_ldmatrix_kernel(Global<const T> a, Global<const T> b, Global<float> d, int b_lanes) {
  wait_for_previous();
  const Shared<T> sa = shared_array<T>(0), sb = shared_array<T>(512);
  copy_async16(sa, lane() * 8, a, lane() * 8);
  if (lane() < b_lanes) copy_async16(sb, lane() % 16 * 8, b, lane() % 16 * 8);
  copy_async_commit();
  copy_async_wait<0>();
  warp_barrier();
  uint32_t fa[4], fb[2];
  ldmatrix_x4(fa, sa, lane() % 16 * 16 + lane() / 16 * 8);
  ldmatrix_x2_transposed(fb, sb, lane() % 16 * 8);
  float c[4] = {};
  mma_m16n8k16<T>(c, fa, fb);
  for (int i = 0; i < 4; ++i) store(d, (lane() / 4 + i / 2 * 8) * 8 + lane() % 4 * 2 + i % 2, c[i]);
}
template <typename T>
void check_products() {
  SimTest t;
  auto a = t.tensor<T>(256), b = t.tensor<T>(128);
  auto d = t.tensor<float>(128);
  t.fill_with(a, [](int64_t i) { return T(number(i)); });
  t.fill_with(b, [](int64_t i) { return T(number(i + 1000)); });
  const auto plain = [&](int row, int column) {
    float sum = 0;
    for (int k = 0; k < 16; ++k) sum += static_cast<float>(a.p[row * 16 + k]) * static_cast<float>(b.p[k * 8 + column]);
    return sum;
  };
  t.fill_with(d, [](int64_t i) { return static_cast<float>(i); });
  t.launch("product", product_kernel<T>, {1, 32, 0}, a.constant(), b.constant(), d.global());
  for (int i = 0; i < 128; ++i) EXPECT_EQ(d.p[i], plain(i / 8, i % 8) + static_cast<float>(i)) << i;
  const auto by_ldmatrix = [&](int b_lanes) {
    t.launch("by_ldmatrix", product_by_ldmatrix_kernel<T>, {1, 32, 1024}, a.constant(), b.constant(), d.global(),
             b_lanes);
  };
  by_ldmatrix(16);
  for (int i = 0; i < 128; ++i) EXPECT_EQ(d.p[i], plain(i / 8, i % 8)) << i;
  t.expect_fault(
      "[kernel by_ldmatrix, block 0, thread 16] race: writes 16 bytes at byte 512 of shared memory, which thread 0 of "
      "block 0 wrote",
      [&] { by_ldmatrix(32); });
}
TEST(Words, Products) {
  check_products<bfloat16>();
  check_products<float16>();
}

FRIT_KERNEL(32, 1) ldmatrix_kernel(Global<const float16> x, Global<uint32_t> y, bool transposed) {
  wait_for_previous();
  const Shared<float16> s = shared_array<float16>(0);
  store_vec<8>(s, lane() * 8, load_vec<8>(x, lane() * 8));
  warp_barrier();
  uint32_t four[4], two[2];
  if (transposed)
    ldmatrix_x4_transposed(four, s, lane() * 8), ldmatrix_x2_transposed(two, s, lane() % 16 * 8);
  else
    ldmatrix_x4(four, s, lane() * 8), ldmatrix_x2(two, s, lane() % 16 * 8);
  for (int m = 0; m < 4; ++m) store(y, m * 32 + lane(), four[m]);
  for (int m = 0; m < 2; ++m) store(y, (4 + m) * 32 + lane(), two[m]);
}
TEST(Words, Ldmatrix) {
  for (bool transposed : {false, true}) {
    SimTest t;
    auto x = t.tensor<float16>(256);
    auto y = t.tensor<uint32_t>(6 * 32);
    t.fill_with(x, [](int64_t i) { return float16::from_bits(static_cast<uint16_t>(i)); });
    t.launch("ldmatrix", ldmatrix_kernel, {1, 32, 512}, x.constant(), y.global(), transposed);
    for (int m = 0; m < 6; ++m)
      for (uint32_t lane = 0; lane < 32; ++lane) {
        // Element (row, column) of matrix m is 64 m + 8 row + column; a lane gets (lane / 4, 2 (lane % 4) + {0, 1}).
        const uint32_t row = lane / 4, column = lane % 4 * 2, matrix = static_cast<uint32_t>(m % 4 * 64);
        const uint32_t low = matrix + (transposed ? column * 8 + row : row * 8 + column);
        const uint32_t high = matrix + (transposed ? (column + 1) * 8 + row : row * 8 + column + 1);
        EXPECT_EQ(y.p[m * 32 + static_cast<int>(lane)], low | high << 16) << m << " " << lane;
      }
  }
}
// ---- Atomics ----

FRIT_KERNEL(64, 1)
atomic_words_kernel(Global<int32_t> sum, Global<float> maximum, Global<uint32_t> bits, Global<int32_t> tickets) {
  wait_for_previous();
  const int i = static_cast<int>(block_index()) * thread_count() + thread_index();
  store(tickets, i, atomic_add(sum, 0, 1));
  atomic_max(maximum, 0, static_cast<float>(i * 37 % 128));
  atomic_or(bits, 0, 1u << (i % 31));
  const Shared<int32_t> s = shared_array<int32_t>(0);
  if (thread_index() == 0) store(s, 0, 5);
  barrier();
  atomic_add(s, 0, 2);
  barrier();
  if (load(s, 0) != 5 + 2 * thread_count()) store(tickets, i, -1);
}
TEST(Words, Atomics) {
  SimTest t;
  auto sum = t.tensor<int32_t>(1), tickets = t.tensor<int32_t>(128);
  auto maximum = t.tensor<float>(1);
  auto bits = t.tensor<uint32_t>(1);
  t.gpu.fill(sum.p, 0, 4), t.gpu.fill(maximum.p, 0, 4), t.gpu.fill(bits.p, 0, 4);
  t.launch("atomic_words", atomic_words_kernel, {2, 64, 4}, sum.global(), maximum.global(), bits.global(),
           tickets.global());
  EXPECT_EQ(sum.p[0], 128);
  EXPECT_EQ(maximum.p[0], 127.0f);
  EXPECT_EQ(bits.p[0], 0x7fffffffu);
  std::vector<bool> seen(128);
  for (int i = 0; i < 128; ++i) {
    ASSERT_GE(tickets.p[i], 0);
    seen[static_cast<size_t>(tickets.p[i])] = true;
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), 128);
  EXPECT_EQ(t.gpu.counts().atomics, 3 * 128);  // shared ones apart
}

// ---- Rows of any alignment ----

// Copies `columns` columns from one row that starts `first` elements into x to one of y, by spans that begin aligned.
template <typename T>
FRIT_KERNEL(32, 1)
spans_kernel(Global<const T> x, Global<T> y, int64_t first, int64_t columns, Global<T> outside) {
  wait_for_previous();
  constexpr int N = kVecOf<T>;
  const Global<const T> from = x + first;
  const Global<T> to = y + first;
  const int64_t column = static_cast<int64_t>(thread_index()) * N - row_shift(from);
  const Vec<T, N> v = load_span<N>(from, column, columns, T(77.0f));
  store_span<N>(to, column, columns, v);
  for (int i = 0; i < N; ++i)
    if (column + i < 0 || column + i >= columns) store(outside, thread_index() * N + i, v[i]);
}
template <typename T>
void check_spans() {
  for (int64_t first = 0; first < 2 * kVecOf<T>; ++first)
    for (int64_t columns : {0, 1, 2, 7, 8, 9, 31, 32, 33, 64}) {
      SimTest t;
      auto x = t.tensor<T>(100), y = t.tensor<T>(100), outside = t.tensor<T>(32 * kVecOf<T>);
      t.fill_with(x, [](int64_t i) { return T(number(i)); });
      t.fill_with(outside, [](int64_t) { return T(77.0f); });
      t.fill_with(y, [](int64_t) { return T(-1.0f); });
      t.launch("spans", spans_kernel<T>, {1, 32, 0}, x.constant(), y.global(), first, columns, outside.global());
      for (int64_t i = 0; i < 100; ++i) {
        const bool inside = i >= first && i < first + columns;
        ASSERT_EQ(static_cast<float>(y.p[i]), inside ? number(i) : -1.0f) << first << " " << columns << " " << i;
      }
      for (int64_t i = 0; i < outside.count; ++i) ASSERT_EQ(static_cast<float>(outside.p[i]), 77.0f);
    }
}
TEST(Words, Spans) {
  check_spans<float>();
  check_spans<bfloat16>();
  check_spans<float16>();
}

// ---- Dropout, conversions, bits ----

template <int N>
FRIT_KERNEL(64, 1)
keeps_kernel(Dropout d, Global<uint32_t> y) {
  wait_for_previous();
  const int64_t column = thread_index() - 16;
  store(y, thread_index(), dropout_keep<N>(d, 3, column, 2));
}
template <int N>
void check_keeps() {
  SimTest t;
  auto y = t.tensor<uint32_t>(64);
  const Dropout d = {0.3f, dropout_site("layer.use"), 5, {1, 2}};
  t.launch("keeps", keeps_kernel<N>, {1, 64, 0}, d, y.global());
  int kept = 0;
  for (int64_t thread = 0; thread < 64; ++thread)
    for (int i = 0; i < N; ++i) {
      const int64_t column = thread - 16 + i;
      const bool keep = y.p[thread] >> i & 1;
      kept += keep;
      if (column >= 0) {
        EXPECT_EQ(keep, d.keep(3, column, 2)) << column;
      }
      // Below zero groups of 8 go on downwards: group -1 is [-8, 0), the same bits whatever column the span began at.
      if (i + 1 < N && thread + 1 < 64) {
        EXPECT_EQ(y.p[thread] >> (i + 1) & 1, y.p[thread + 1] >> i & 1);
      }
    }
  EXPECT_EQ(y.p[0] >> N, 0u);
  EXPECT_NEAR(kept / (64.0 * N), 0.7, 0.15);
}
TEST(Words, DropoutKeep) {
  check_keeps<8>(), check_keeps<4>(), check_keeps<2>(), check_keeps<1>();
}

FRIT_KERNEL(32, 1) scalars_kernel(Global<const float> x, Global<float> y) {
  wait_for_previous();
  const int i = thread_index();
  const float v = load(x, i);
  store(y, i * 8 + 0, exp2_fast(v)), store(y, i * 8 + 1, log2_fast(std::abs(v) + 1));
  store(y, i * 8 + 2, reciprocal_fast(v + 0.0625f)), store(y, i * 8 + 3, rsqrt(std::abs(v) + 1));
  store(y, i * 8 + 4, tanh_fast(v)), store(y, i * 8 + 5, exp_fast(v));
  store(y, i * 8 + 6, static_cast<float>(convert<bfloat16>(v * 1.01f)));
  const Vec<float, 2> pair = {{v * 1.01f, v * 1.02f}};
  const Vec<float, 2> back = to_float(from_float<float16>(pair));
  store(y, i * 8 + 7, back[0] - back[1]);
}
TEST(Words, Scalars) {
  SimTest t;
  auto x = t.tensor<float>(32), y = t.tensor<float>(256);
  t.fill_with(x, number);
  t.launch("scalars", scalars_kernel, {1, 32, 0}, x.constant(), y.global());
  for (int i = 0; i < 32; ++i) {
    const double v = x.p[i];
    const float* r = y.p + 8 * i;
    EXPECT_NEAR(r[0], std::exp2(v), 1e-6 * std::exp2(v));
    EXPECT_NEAR(r[1], std::log2(std::abs(v) + 1), 1e-6);
    EXPECT_NEAR(r[2], 1 / (v + 0.0625), 1e-5);
    EXPECT_NEAR(r[3], 1 / std::sqrt(std::abs(v) + 1), 1e-6);
    EXPECT_NEAR(r[4], std::tanh(v), 5e-4);
    EXPECT_NEAR(r[5], std::exp(v), 2e-6 * std::exp(v));
    EXPECT_EQ(r[6], static_cast<float>(bfloat16(x.p[i] * 1.01f)));
    EXPECT_EQ(r[7], static_cast<float>(float16(x.p[i] * 1.01f)) - static_cast<float>(float16(x.p[i] * 1.02f)));
  }
  EXPECT_EQ(find_first_set(0), 0);
  EXPECT_EQ(find_first_set(0x80000000u), 32);
  EXPECT_EQ(find_first_set(12), 3);
  EXPECT_EQ(count_bits(0xf0f0u), 8);
  EXPECT_EQ(leading_zeros(0), 32);
  EXPECT_EQ(leading_zeros(1), 31);
}

FRIT_KERNEL(64, 1) places_kernel(Global<int64_t> y) {
  wait_for_previous();
  const int64_t i = block_index() * thread_count() + thread_index();
  store(y, i, ((block_index() * 100 + block_count()) * 100 + warp()) * 10000 + lane() * 100 + warp_count());
}
TEST(Words, Places) {
  SimTest t;
  auto y = t.tensor<int64_t>(3 * 64);
  t.launch("places", places_kernel, {3, 64, 0}, y.global());
  for (int64_t i = 0; i < 192; ++i)
    EXPECT_EQ(y.p[i], ((i / 64 * 100 + 3) * 100 + i / 32 % 2) * 10000 + i % 32 * 100 + 2);
}

}  // namespace
}  // namespace frit
