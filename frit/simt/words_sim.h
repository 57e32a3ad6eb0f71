// The words of simt.h in the simulator. Included by simt.h alone.
#pragma once
#include <bit>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "frit/backend/sim/machine.h"

#define FRIT_KERNEL(max_threads, min_blocks) inline void
#define FRIT_DEVICE inline
#define FRIT_UNROLL
#define FRIT_UNROLL_BY(n)

namespace frit::simt {

FRIT_DEVICE int thread_index() {
  return sim::place().thread;
}
FRIT_DEVICE int thread_count() {
  return sim::place().threads;
}
FRIT_DEVICE int64_t block_index() {
  return sim::place().block;
}
FRIT_DEVICE int64_t block_count() {
  return sim::place().blocks;
}

FRIT_DEVICE void barrier(std::source_location where = std::source_location::current()) {
  sim::barrier(where);
}
FRIT_DEVICE void warp_barrier(uint32_t mask = kFullMask) {
  sim::warp_barrier(mask);
}
FRIT_DEVICE void wait_for_previous() {
  sim::wait_for_previous();
}

namespace detail {
template <typename T>
FRIT_DEVICE T slot_value(const sim::Slot& slot) {
  T value;
  std::memcpy(&value, slot.bytes, sizeof(T));
  return value;
}
}  // namespace detail
namespace detail {
template <typename T>
FRIT_DEVICE T shuffle_from(T value, int from, uint32_t mask, const char* what) {
  const sim::Slot* slots = sim::gather(mask, what, &value, sizeof(T));
  if (!(mask >> from & 1)) sim::source_not_in_mask(from, mask);
  return slot_value<T>(slots[from]);
}
}  // namespace detail
template <typename T>
FRIT_DEVICE T shuffle(T value, int from, uint32_t mask = kFullMask) {
  return detail::shuffle_from(value, from & 31, mask, "shuffle");
}
template <typename T>
FRIT_DEVICE T shuffle_xor(T value, int bits, uint32_t mask = kFullMask) {
  return detail::shuffle_from(value, (sim::place().thread ^ bits) & 31, mask, "shuffle_xor");
}
// Beyond the warp's ends a lane keeps its own value.
template <typename T>
FRIT_DEVICE T shuffle_down(T value, int by, uint32_t mask = kFullMask) {
  const int me = sim::place().thread & 31, from = me + by;
  return detail::shuffle_from(value, from < 32 ? from : me, mask, "shuffle_down");
}
template <typename T>
FRIT_DEVICE T shuffle_up(T value, int by, uint32_t mask = kFullMask) {
  const int me = sim::place().thread & 31, from = me - by;
  return detail::shuffle_from(value, from >= 0 ? from : me, mask, "shuffle_up");
}
FRIT_DEVICE uint32_t ballot(bool vote, uint32_t mask = kFullMask) {
  const sim::Slot* slots = sim::gather(mask, "ballot", &vote, sizeof(bool));
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && detail::slot_value<bool>(slots[lane])) votes |= 1u << lane;
  return votes;
}

template <typename T>
class Global {
 public:
  Global() = default;
  explicit Global(T* p) : p_(p), base_(p) {}
  FRIT_DEVICE explicit operator bool() const { return p_ != nullptr; }
  FRIT_DEVICE Global operator+(int64_t elements) const {
    Global moved = *this;
    moved.p_ += elements;
    return moved;
  }
  FRIT_DEVICE uint64_t address() const { return reinterpret_cast<uint64_t>(p_); }
  FRIT_DEVICE T* raw() const { return p_; }
  // The tensor that the pointer was made for, so that an access beyond it is not taken for one to its neighbour.
  FRIT_DEVICE sim::Region*& region() const {
    if (!region_) region_ = sim::find_region(base_);
    return region_;
  }

 private:
  T* p_ = nullptr;
  T* base_ = nullptr;
  mutable sim::Region* region_ = nullptr;
};

template <Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE std::remove_const_t<T> load(const Global<T>& from, int64_t i) {
  sim::touch_global(from.raw() + i, sizeof(T), sim::Access::kRead, from.region());
  return from.raw()[i];
}
template <Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE void store(const Global<T>& to, int64_t i, T value) {
  sim::touch_global(to.raw() + i, sizeof(T), sim::Access::kWrite, to.region());
  to.raw()[i] = value;
}
template <int N, Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, N> load_vec(const Global<T>& from, int64_t i) {
  sim::touch_global(from.raw() + i, sizeof(T) * N, sim::Access::kRead, from.region());
  Vec<std::remove_const_t<T>, N> v;
  std::memcpy(static_cast<void*>(&v), from.raw() + i, sizeof(v));
  return v;
}
template <int N, Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE void store_vec(const Global<T>& to, int64_t i, const Vec<T, N>& v) {
  sim::touch_global(to.raw() + i, sizeof(T) * N, sim::Access::kWrite, to.region());
  std::memcpy(static_cast<void*>(to.raw() + i), &v, sizeof(v));
}
template <typename T>
FRIT_DEVICE T atomic_add(const Global<T>& to, int64_t i, T value) {
  sim::touch_global(to.raw() + i, sizeof(T), sim::Access::kAtomic, to.region());
  const T before = to.raw()[i];
  to.raw()[i] = before + value;
  return before;
}
template <typename T>
FRIT_DEVICE T atomic_max(const Global<T>& to, int64_t i, T value) {
  sim::touch_global(to.raw() + i, sizeof(T), sim::Access::kAtomic, to.region());
  const T before = to.raw()[i];
  if (value > before) to.raw()[i] = value;
  return before;
}
FRIT_DEVICE uint32_t atomic_or(const Global<uint32_t>& to, int64_t i, uint32_t value) {
  sim::touch_global(to.raw() + i, 4, sim::Access::kAtomic, to.region());
  const uint32_t before = to.raw()[i];
  to.raw()[i] = before | value;
  return before;
}

// A hint: neither a read nor counted.
template <typename T>
FRIT_DEVICE void prefetch(const Global<T>&, int64_t) {}

template <typename T>
class Shared {
  static_assert(sizeof(T) >= 2, "shared memory is checked in pieces of two bytes");

 public:
  Shared() = default;
  explicit Shared(int64_t offset_bytes) : offset_(offset_bytes) {}
  FRIT_DEVICE Shared operator+(int64_t elements) const {
    return Shared(offset_ + elements * static_cast<int64_t>(sizeof(T)));
  }
  FRIT_DEVICE int64_t offset(int64_t i) const { return offset_ + i * static_cast<int64_t>(sizeof(T)); }

 private:
  int64_t offset_ = 0;
};
template <typename T>
FRIT_DEVICE Shared<T> shared_array(int64_t offset_bytes) {
  return Shared<T>(offset_bytes);
}
template <typename T>
FRIT_DEVICE T load(const Shared<T>& from, int64_t i) {
  T value;
  std::memcpy(&value, sim::touch_shared(from.offset(i), sizeof(T), sim::Access::kRead), sizeof(T));
  return value;
}
template <typename T>
FRIT_DEVICE void store(const Shared<T>& to, int64_t i, T value) {
  std::memcpy(sim::touch_shared(to.offset(i), sizeof(T), sim::Access::kWrite), &value, sizeof(T));
}
template <int N, typename T>
FRIT_DEVICE Vec<T, N> load_vec(const Shared<T>& from, int64_t i) {
  Vec<T, N> v;
  std::memcpy(static_cast<void*>(&v), sim::touch_shared(from.offset(i), sizeof(v), sim::Access::kRead), sizeof(v));
  return v;
}
template <int N, typename T>
FRIT_DEVICE void store_vec(const Shared<T>& to, int64_t i, const Vec<T, N>& v) {
  std::memcpy(sim::touch_shared(to.offset(i), sizeof(v), sim::Access::kWrite), &v, sizeof(v));
}
template <typename T>
FRIT_DEVICE T atomic_add(const Shared<T>& to, int64_t i, T value) {
  unsigned char* p = sim::touch_shared(to.offset(i), sizeof(T), sim::Access::kAtomic);
  T before;
  std::memcpy(&before, p, sizeof(T));
  value = static_cast<T>(before + value);
  std::memcpy(p, &value, sizeof(T));
  return before;
}

template <typename T, typename U>
FRIT_DEVICE void copy_async16(const Shared<T>& to, int64_t i, const Global<U>& from, int64_t j, bool valid = true) {
  sim::copy_async(to.offset(i), from.raw() + j, 16, valid ? 16 : 0, from.region());
}
FRIT_DEVICE void copy_async_commit() {
  sim::commit_async();
}
template <int groups_left>
FRIT_DEVICE void copy_async_wait() {
  sim::wait_async(groups_left);
}

// Four (or two) 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
namespace detail {
template <int matrices, bool transposed, typename T>
FRIT_DEVICE void ldmatrix(uint32_t (&r)[matrices], const Shared<T>& from, int64_t i) {
  struct Row {
    uint16_t v[8];
  } row = {};
  const int me = sim::place().thread & 31;
  if (me < 8 * matrices) std::memcpy(&row, sim::touch_shared(from.offset(i), 16, sim::Access::kRead), 16);
  const sim::Slot* slots = sim::gather(kFullMask, transposed ? "ldmatrix_transposed" : "ldmatrix", &row, sizeof(row));
  for (int m = 0; m < matrices; ++m) {
    const auto element = [&](int y, int x) { return slot_value<Row>(slots[m * 8 + y]).v[x]; };
    const uint32_t low = transposed ? element(me % 4 * 2, me / 4) : element(me / 4, me % 4 * 2);
    const uint32_t high = transposed ? element(me % 4 * 2 + 1, me / 4) : element(me / 4, me % 4 * 2 + 1);
    r[m] = low | high << 16;
  }
}
}  // namespace detail
template <typename T>
FRIT_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const Shared<T>& from, int64_t i) {
  detail::ldmatrix<4, false>(r, from, i);
}
template <typename T>
FRIT_DEVICE void ldmatrix_x4_transposed(uint32_t (&r)[4], const Shared<T>& from, int64_t i) {
  detail::ldmatrix<4, true>(r, from, i);
}
template <typename T>
FRIT_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const Shared<T>& from, int64_t i) {
  detail::ldmatrix<2, false>(r, from, i);
}
template <typename T>
FRIT_DEVICE void ldmatrix_x2_transposed(uint32_t (&r)[2], const Shared<T>& from, int64_t i) {
  detail::ldmatrix<2, true>(r, from, i);
}

template <typename T>
FRIT_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  // Where the fragments lie (PTX ISA, mma.m16n8k16): of A a lane holds the rows g = lane / 4 and g + 8 by turns, of the
  // columns 2 (lane % 4) + {0, 1}, then those + 8; of B the same columns of A, which are its rows, of column g.
  struct Fragments {
    float a[8], b[4];
  } mine;
  const auto unpack = [](uint32_t pair, float* to) {
    to[0] = static_cast<float>(T::from_bits(static_cast<uint16_t>(pair)));
    to[1] = static_cast<float>(T::from_bits(static_cast<uint16_t>(pair >> 16)));
  };
  for (int i = 0; i < 4; ++i) unpack(a[i], mine.a + 2 * i);
  for (int i = 0; i < 2; ++i) unpack(b[i], mine.b + 2 * i);
  const sim::Slot* slots = sim::gather(kFullMask, "mma_m16n8k16", &mine, sizeof(mine));
  const int lane = sim::place().thread & 31, g = lane / 4, column = lane % 4 * 2;
  double sums[4] = {d[0], d[1], d[2], d[3]};
  for (int quad = 0; quad < 4; ++quad) {  // k = 2 quad + {0, 1, 8, 9}
    const Fragments rows = detail::slot_value<Fragments>(slots[g * 4 + quad]);
    for (int i = 0; i < 4; ++i) {
      Fragments other = detail::slot_value<Fragments>(slots[(column + i % 2) * 4 + quad]);
      for (int k = 0; k < 4; ++k)
        sums[i] += static_cast<double>(rows.a[k / 2 * 4 + i / 2 * 2 + k % 2]) * static_cast<double>(other.b[k]);
    }
  }
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(sums[i]);
}

FRIT_DEVICE float exp2_fast(float x) {
  return std::exp2(x);
}
FRIT_DEVICE float log2_fast(float x) {
  return std::log2(x);
}
FRIT_DEVICE float reciprocal_fast(float x) {
  return 1.0f / x;
}
FRIT_DEVICE float rsqrt(float x) {
  return 1.0f / std::sqrt(x);
}
FRIT_DEVICE float add_rn(float a, float b) {
  return a + b;
}
FRIT_DEVICE float sub_rn(float a, float b) {
  return a - b;
}
FRIT_DEVICE float mul_rn(float a, float b) {
  return a * b;
}
FRIT_DEVICE float div_rn(float a, float b) {
  return a / b;
}
FRIT_DEVICE float sqrt_rn(float x) {
  return std::sqrt(x);
}
FRIT_DEVICE double add_rn(double a, double b) {
  return a + b;
}
FRIT_DEVICE double sub_rn(double a, double b) {
  return a - b;
}
FRIT_DEVICE double mul_rn(double a, double b) {
  return a * b;
}
FRIT_DEVICE float tanh_fast(float x) {
  return std::tanh(x);
}
FRIT_DEVICE uint32_t pack2(bfloat16, float low, float high) {
  return bfloat16(low).bits | static_cast<uint32_t>(bfloat16(high).bits) << 16;
}
FRIT_DEVICE uint32_t pack2(float16, float low, float high) {
  return float16(low).bits | static_cast<uint32_t>(float16(high).bits) << 16;
}
template <typename T>
FRIT_DEVICE uint32_t max2(T, uint32_t a, uint32_t b) {
  const auto larger = [](uint32_t p, uint32_t q) {
    const T x = T::from_bits(static_cast<uint16_t>(p)), y = T::from_bits(static_cast<uint16_t>(q));
    return uint32_t{std::fmax(static_cast<float>(x), static_cast<float>(y)) == static_cast<float>(x) ? x.bits : y.bits};
  };
  return larger(a, b) | larger(a >> 16, b >> 16) << 16;
}
template <typename T>
FRIT_DEVICE T convert(float x) {
  return T(x);
}
template <typename T>
FRIT_DEVICE float widen(T x) {
  return static_cast<float>(x);
}
FRIT_DEVICE uint32_t opaque(uint32_t x) {
  return x;
}
FRIT_DEVICE int find_first_set(uint32_t x) {
  return x ? std::countr_zero(x) + 1 : 0;
}
FRIT_DEVICE int count_bits(uint32_t x) {
  return std::popcount(x);
}
FRIT_DEVICE int leading_zeros(uint32_t x) {
  return std::countl_zero(x);
}

FRIT_DEVICE bool last_block(const Global<uint32_t>& counter, const Shared<uint32_t>& scratch) {
  barrier();
  if (thread_index() == 0) {
    const uint32_t ticket = atomic_add(counter, 0, 1u);
    const bool last = ticket == static_cast<uint32_t>(block_count() - 1);
    sim::release_to_last_block();
    if (last) {
      sim::join_after_all_blocks();
      store(counter, 0, 0u);
    }
    store(scratch, 0, last ? 1u : 0u);
  }
  barrier();
  const bool last = load(scratch, 0) != 0;
  if (last) sim::join_after_all_blocks();
  return last;
}

}  // namespace frit::simt
