// The words kernels are written in. A cuda.cu includes this header, and nothing of CUDA's own; it compiles unchanged
// for the GPU (nvcc) and for the simulator (the host compiler), where each word also counts and checks
// (frit/backend/sim/machine.h).
//
// A kernel is a function `template <...> FRIT_KERNEL(max threads a block, min blocks a multiprocessor)
// name_kernel(arguments)` that begins with wait_for_previous() and touches memory through load and store alone.
// launch() starts it.
#pragma once
#include <cstdint>
#include <type_traits>

#include "frit/core/float16.h"
#include "frit/core/philox.h"

namespace frit::simt {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullMask = 0xffffffffu;

// What the caches should do with a line.
enum class Cache {
  kDefault,
  kStream,    // touched once: the first to be evicted (ld.global.cs, st.global.cs)
  kReadOnly,  // nobody writes it while the kernel runs: may go through the read-only path (ld.global.nc)
};

// N elements that travel together; at most 16 bytes move in one access.
template <typename T, int N, bool paired = sizeof(T) == 2 && N % 2 == 0>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T v[N];
  FRIT_HOST_DEVICE T& operator[](int i) { return v[i]; }
  FRIT_HOST_DEVICE const T& operator[](int i) const { return v[i]; }
};
// 16-bit elements stay in pairs, as they came from memory, until one is asked for: kept apart, each would take a
// register of its own from the load on.
template <typename T, int N>
struct alignas(2 * N < 16 ? 2 * N : 16) Vec<T, N, true> {
  uint32_t pairs[N / 2];
  struct Element {
    uint32_t& pair;
    int shift;
    FRIT_HOST_DEVICE operator T() const { return T::from_bits(static_cast<uint16_t>(pair >> shift)); }
    FRIT_HOST_DEVICE explicit operator float() const { return static_cast<float>(static_cast<T>(*this)); }
    FRIT_HOST_DEVICE Element& operator=(T x) {
      pair = (pair & ~(0xffffu << shift)) | static_cast<uint32_t>(x.bits) << shift;
      return *this;
    }
    FRIT_HOST_DEVICE Element& operator=(const Element& other) { return *this = static_cast<T>(other); }
  };
  FRIT_HOST_DEVICE Element operator[](int i) { return {pairs[i / 2], 16 * (i % 2)}; }
  FRIT_HOST_DEVICE T operator[](int i) const {
    return T::from_bits(static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2))));
  }
};
// Elements of T in 16 bytes.
template <typename T>
constexpr int kVecOf = 16 / sizeof(T);

}  // namespace frit::simt

#ifdef __CUDACC__
#include "frit/simt/words_cuda.h"
#else
#include "frit/simt/words_sim.h"
#endif

// clang-format off
// Words in both worlds (words_cuda.h has the instructions behind them):
//   thread_index() thread_count() block_index() block_count()    one-dimensional blocks and grids
//   barrier()                      all threads of the block
//   warp_barrier(mask)             the lanes of mask; orders their memory accesses, which shuffles do not
//   wait_for_previous()            first word of every kernel: earlier kernels' writes are visible behind it
//   shuffle shuffle_xor shuffle_down shuffle_up ballot    of the lanes of mask; each must be reached by all of them
//   Global<T>                      pointer into a tensor; + moves it; false when the operand was not given
//   load<cache>(g, i) store<cache>(g, i, x) load_vec<N, cache>(g, i) store_vec<N, cache>(g, i, v)    vectors must be aligned
//   atomic_add atomic_max atomic_or
//   shared_array<T>(offset bytes)  the block's dynamic shared memory; load, store, load_vec, store_vec, atomic_add on Shared<T>
//   copy_async16(shared, i, global, j, valid) copy_async_commit() copy_async_wait<groups left>()    16 bytes, zeros when !valid
//   ldmatrix_x4 ldmatrix_x4_transposed ldmatrix_x2 ldmatrix_x2_transposed    8x8 matrices of 16-bit elements
//   mma_m16n8k16<bfloat16 | float16>(d, a, b)                    d += a b, fp32 accumulation
//   exp2_fast log2_fast reciprocal_fast rsqrt tanh_fast          to about 2 ulp (tanh_fast: 5e-4 relative)
//   convert<T>(float) pack2(T(), low, high)                      round to nearest even
//   max2(T(), a, b)                the larger elements of two pairs of 16-bit ones; NaN gives way
//   add_rn sub_rn mul_rn div_rn sqrt_rn    fp32 (the first three fp64 too), each rounded on its own, never fused: the CPU's bits
//   prefetch(g, i)                 into the L2 cache; nothing waits for it
//   find_first_set count_bits leading_zeros
//   last_block(counter, scratch)   true in all threads of the block that comes last; 2 barriers (see there)
// clang-format on

namespace frit::simt {

FRIT_DEVICE int lane() {
  return thread_index() & 31;
}
FRIT_DEVICE int warp() {
  return thread_index() >> 5;
}
FRIT_DEVICE int warp_count() {
  return thread_count() >> 5;
}

FRIT_DEVICE float exp_fast(float x) {
  return exp2_fast(x * 1.4426950408889634f);
}
FRIT_DEVICE float log_fast(float x) {
  return log2_fast(x) * 0.6931471805599453f;
}

template <typename T, int N>
FRIT_DEVICE Vec<float, N> to_float(const Vec<T, N>& x) {
  Vec<float, N> y;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) y[i] = widen(x[i]);
  return y;
}
template <typename T, int N>
FRIT_DEVICE Vec<T, N> from_float(const Vec<float, N>& x) {
  Vec<T, N> y;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    FRIT_UNROLL
    for (int i = 0; i < N; i += 2) {
      y.pairs[i / 2] = pack2(T(), x[i], x[i + 1]);
    }
  } else {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) y[i] = convert<T>(x[i]);
  }
  return y;
}

// ---- Rows of any width and alignment ----

// Elements by which `row` lies past a multiple of 16 bytes. A kernel whose thread takes the N = kVecOf<T> columns from
// j * N - row_shift(row) on moves whole aligned vectors but for the first and the last.
template <typename T>
FRIT_DEVICE int row_shift(const Global<T>& row) {
  return static_cast<int>(row.address() / sizeof(T) % kVecOf<T>);
}

// The N elements [column, column + N) of a row of `columns`: one access if they lie inside and are aligned, element by
// element else. What lies outside of the row is `outside`.
template <int N, Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, N> load_span(const Global<T>& row, int64_t column, int64_t columns,
                                                     std::remove_const_t<T> outside) {
  const Global<T> at = row + column;
  if (column >= 0 && column + N <= columns && at.address() % (N * sizeof(T)) == 0) return load_vec<N, cache>(at, 0);
  Vec<std::remove_const_t<T>, N> v{};
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) v[i] = column + i >= 0 && column + i < columns ? load<cache>(at, i) : outside;
  return v;
}
// The same for writing; what lies outside of the row is not written.
template <int N, Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE void store_span(const Global<T>& row, int64_t column, int64_t columns, const Vec<T, N>& v) {
  const Global<T> at = row + column;
  if (column >= 0 && column + N <= columns && at.address() % (N * sizeof(T)) == 0) return store_vec<N, cache>(at, 0, v);
  FRIT_UNROLL
  for (int i = 0; i < N; ++i)
    if (column + i >= 0 && column + i < columns) store<cache>(at, i, static_cast<T>(v[i]));
}

// ---- Reductions ----

// Sum (maximum) over the `width` neighbouring lanes that share lane / width; width a power of two up to 32. All lanes
// of the warp take part; every one gets the result, the same bits in each. Cost: log2(width) shuffles, no barrier.
template <int width = 32>
FRIT_DEVICE float warp_sum(float x) {
  FRIT_UNROLL
  for (int bits = width / 2; bits > 0; bits /= 2) x += shuffle_xor(x, bits);
  return x;
}
template <int width = 32>
FRIT_DEVICE float warp_max(float x) {
  FRIT_UNROLL
  for (int bits = width / 2; bits > 0; bits /= 2) {
    const float other = shuffle_xor(x, bits);
    x = other > x ? other : x;
  }
  return x;
}

// Sums (maxima) of K values over the block, whose threads are whole warps; every thread gets them, in a fixed order of
// addition. `scratch` holds K * 32 floats. Cost: 1 barrier. scratch may be written again only behind a further barrier.
template <int K>
FRIT_DEVICE void block_sum(float (&x)[K], const Shared<float>& scratch) {
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) x[k] = warp_sum(x[k]);
  if (lane() == 0) {
    FRIT_UNROLL
    for (int k = 0; k < K; ++k) store(scratch, k * 32 + warp(), x[k]);
  }
  barrier();
  FRIT_UNROLL
  for (int k = 0; k < K; ++k) x[k] = warp_sum(lane() < warp_count() ? load(scratch, k * 32 + lane()) : 0.0f);
}
FRIT_DEVICE float block_sum(float x, const Shared<float>& scratch) {
  float one[1] = {x};
  block_sum(one, scratch);
  return one[0];
}
FRIT_DEVICE float block_max(float x, const Shared<float>& scratch) {
  x = warp_max(x);
  if (lane() == 0) store(scratch, warp(), x);
  barrier();
  return warp_max(lane() < warp_count() ? load(scratch, lane()) : -INFINITY);
}

// ---- Dropout ----

// A Dropout with all that does not depend on the element worked out, to be a kernel's argument: the rounds' keys are
// then constants that cost no instruction and no register.
struct DropoutTable {
  uint32_t keys[20] = {};  // k0 and k1 of every round
  uint32_t below = 0;      // a word's upper 16 bits are kept if the word is above this
  uint32_t lane_word = 0, site = 0;
  float scale = 1;
  bool active = false;

  DropoutTable() = default;
  explicit DropoutTable(const Dropout& d)
      : below((d.threshold() << 16) - 1u),
        lane_word(d.stream << 16),
        site(d.site),
        scale(d.scale()),
        active(d.active()) {
    for (uint32_t r = 0; r < 10; ++r)
      keys[2 * r] = d.key.k0 + r * kPhiloxW0, keys[2 * r + 1] = d.key.k1 + r * kPhiloxW1;
  }
};

namespace detail {
// Bit i of the result: are the i-th 16 bits of a block above `below`? The lower ones of a word are shifted up first.
FRIT_DEVICE uint32_t kept(const uint32_t (&words)[4], uint32_t below) {
  uint32_t keep = 0;
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i) {
    keep |= words[i] << 16 > below ? 1u << (2 * i) : 0u;
    keep |= words[i] > below ? 2u << (2 * i) : 0u;
  }
  return keep;
}
}  // namespace detail

// Bit i says whether element (row, group * 8 + i) is kept. Cost: one Philox block, 40 instructions (60 without a
// table), and 20 more. With a table, dropout must be active.
FRIT_DEVICE uint32_t dropout_keep_group(const Dropout& d, uint32_t row, uint32_t group, uint32_t head = 0) {
  const uint32_t threshold = d.threshold();
  const PhiloxBlock block = philox(d.key, group, row, head | d.stream << 16, d.site);
  return threshold == 0 ? 0xffu : detail::kept(block.v, (threshold << 16) - 1u);
}
FRIT_DEVICE uint32_t dropout_keep_group(const DropoutTable& d, uint32_t row, uint32_t group, uint32_t head = 0) {
  uint32_t c[4] = {group, row, head | d.lane_word, d.site};
  FRIT_UNROLL
  for (int r = 0; r < 10; ++r) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c[0], p1 = static_cast<uint64_t>(kPhiloxM1) * c[2];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ d.keys[2 * r];
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ d.keys[2 * r + 1];
    c[1] = static_cast<uint32_t>(p1), c[3] = static_cast<uint32_t>(p0);
  }
  return detail::kept(c, d.below);
}

// Bit i says whether element (row, column + i) is kept, i in [0, N), N at most 8, any column (also below 0). Cost: one
// Philox block if [column, column + N) lies in one group of 8 columns, two else.
template <int N, typename D>
FRIT_DEVICE uint32_t dropout_keep(const D& d, int64_t row, int64_t column, uint32_t head = 0) {
  const int64_t group = column >= 0 ? column / 8 : -((7 - column) / 8);
  const int first = static_cast<int>(column - group * 8);
  uint32_t keep = 0;
  const auto add = [&](int64_t g, int shift) {
    const uint32_t bits = dropout_keep_group(d, static_cast<uint32_t>(row), static_cast<uint32_t>(g), head);
    keep |= shift >= 0 ? bits << shift : bits >> -shift;
  };
  add(group, -first);
  if (first + N > 8) add(group + 1, 8 - first);
  return keep & ((1u << N) - 1u);
}

}  // namespace frit::simt
