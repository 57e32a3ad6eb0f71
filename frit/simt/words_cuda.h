// The words of simt.h on the GPU. Included by simt.h alone, under nvcc.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define FRIT_KERNEL(max_threads, min_blocks) __global__ void __launch_bounds__(max_threads, min_blocks)
#define FRIT_DEVICE __device__ __forceinline__
#define FRIT_UNROLL _Pragma("unroll")
#define FRIT_PRAGMA(text) _Pragma(#text)
#define FRIT_UNROLL_BY(n) FRIT_PRAGMA(unroll n)

namespace frit::simt {

FRIT_DEVICE int thread_index() {
  return static_cast<int>(threadIdx.x);
}
FRIT_DEVICE int thread_count() {
  return static_cast<int>(blockDim.x);
}
FRIT_DEVICE int64_t block_index() {
  return blockIdx.x;
}
FRIT_DEVICE int64_t block_count() {
  return gridDim.x;
}

FRIT_DEVICE void barrier() {
  __syncthreads();
}
FRIT_DEVICE void warp_barrier(uint32_t mask = kFullMask) {
  __syncwarp(mask);
}
FRIT_DEVICE void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

template <typename T>
FRIT_DEVICE T shuffle(T value, int from, uint32_t mask = kFullMask) {
  return __shfl_sync(mask, value, from);
}
template <typename T>
FRIT_DEVICE T shuffle_xor(T value, int bits, uint32_t mask = kFullMask) {
  return __shfl_xor_sync(mask, value, bits);
}
template <typename T>
FRIT_DEVICE T shuffle_down(T value, int by, uint32_t mask = kFullMask) {
  return __shfl_down_sync(mask, value, by);
}
template <typename T>
FRIT_DEVICE T shuffle_up(T value, int by, uint32_t mask = kFullMask) {
  return __shfl_up_sync(mask, value, by);
}
FRIT_DEVICE uint32_t ballot(bool vote, uint32_t mask = kFullMask) {
  return __ballot_sync(mask, vote);
}

template <typename T>
class Global {
 public:
  Global() = default;
  __host__ __device__ explicit Global(T* p) : p_(p) {}
  // Also on the host: nvcc accepts a host's call of a device function in a template, and makes exit(1) of it.
  __host__ __device__ explicit operator bool() const { return p_ != nullptr; }
  __host__ __device__ Global operator+(int64_t elements) const { return Global(p_ + elements); }
  __host__ __device__ uint64_t address() const { return reinterpret_cast<uint64_t>(p_); }
  __host__ __device__ T* raw() const { return p_; }

 private:
  T* p_ = nullptr;
};

namespace detail {
// The plain type that moves `bytes` in one instruction.
template <int bytes>
struct Plain;
template <>
struct Plain<1> {
  using type = unsigned char;
};
template <>
struct Plain<2> {
  using type = unsigned short;
};
template <>
struct Plain<4> {
  using type = unsigned int;
};
template <>
struct Plain<8> {
  using type = uint2;
};
template <>
struct Plain<16> {
  using type = uint4;
};

template <Cache cache, typename To, typename From>
FRIT_DEVICE To load_as(const From* p) {
  using P = typename Plain<sizeof(To)>::type;
  union {
    P plain;
    To value;
  } u;
  if constexpr (cache == Cache::kStream)
    u.plain = __ldcs(reinterpret_cast<const P*>(p));
  else if constexpr (cache == Cache::kReadOnly)
    u.plain = __ldg(reinterpret_cast<const P*>(p));
  else
    u.plain = *reinterpret_cast<const P*>(p);
  return u.value;
}
template <Cache cache, typename From, typename To>
FRIT_DEVICE void store_as(To* p, const From& value) {
  using P = typename Plain<sizeof(From)>::type;
  const P plain = *reinterpret_cast<const P*>(&value);
  if constexpr (cache == Cache::kStream)
    __stcs(reinterpret_cast<P*>(p), plain);
  else if constexpr (sizeof(P) == 16)  // nvcc may make four stores of an assignment
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(plain.x), "r"(plain.y), "r"(plain.z),
                 "r"(plain.w)
                 : "memory");
  else
    *reinterpret_cast<P*>(p) = plain;
}
}  // namespace detail

template <Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE std::remove_const_t<T> load(const Global<T>& from, int64_t i) {
  if constexpr (cache == Cache::kDefault)
    return from.raw()[i];
  else
    return std::bit_cast<std::remove_const_t<T>>(
        detail::load_as<cache, typename detail::Plain<sizeof(T)>::type>(from.raw() + i));
}
template <Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE void store(const Global<T>& to, int64_t i, T value) {
  if constexpr (cache == Cache::kDefault)
    to.raw()[i] = value;
  else
    detail::store_as<cache>(to.raw() + i, value);
}
template <int N, Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, N> load_vec(const Global<T>& from, int64_t i) {
  using V = Vec<std::remove_const_t<T>, N>;
  return std::bit_cast<V>(detail::load_as<cache, typename detail::Plain<sizeof(V)>::type>(from.raw() + i));
}
template <int N, Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE void store_vec(const Global<T>& to, int64_t i, const Vec<T, N>& v) {
  detail::store_as<cache>(to.raw() + i, v);
}
template <typename T>
FRIT_DEVICE T atomic_add(const Global<T>& to, int64_t i, T value) {
  return atomicAdd(to.raw() + i, value);
}
template <typename T>
FRIT_DEVICE T atomic_max(const Global<T>& to, int64_t i, T value) {
  return atomicMax(to.raw() + i, value);
}
FRIT_DEVICE uint32_t atomic_or(const Global<uint32_t>& to, int64_t i, uint32_t value) {
  return atomicOr(to.raw() + i, value);
}

// Asks the L2 cache for the 128 bytes around element i, which must lie in the tensor; nothing waits for them.
template <typename T>
FRIT_DEVICE void prefetch(const Global<T>& from, int64_t i) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from.raw() + i));
}

template <typename T>
class Shared {
 public:
  Shared() = default;
  FRIT_DEVICE explicit Shared(T* p) : p_(p) {}
  FRIT_DEVICE Shared operator+(int64_t elements) const { return Shared(p_ + elements); }
  FRIT_DEVICE T* raw() const { return p_; }

 private:
  T* p_ = nullptr;
};
template <typename T>
FRIT_DEVICE Shared<T> shared_array(int64_t offset_bytes) {
  extern __shared__ __align__(128) unsigned char frit_shared_memory[];
  return Shared<T>(reinterpret_cast<T*>(frit_shared_memory + offset_bytes));
}
template <typename T>
FRIT_DEVICE T load(const Shared<T>& from, int64_t i) {
  return from.raw()[i];
}
template <typename T>
FRIT_DEVICE void store(const Shared<T>& to, int64_t i, T value) {
  to.raw()[i] = value;
}
template <int N, typename T>
FRIT_DEVICE Vec<T, N> load_vec(const Shared<T>& from, int64_t i) {
  return *reinterpret_cast<const Vec<T, N>*>(from.raw() + i);
}
template <int N, typename T>
FRIT_DEVICE void store_vec(const Shared<T>& to, int64_t i, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(to.raw() + i) = v;
}
template <typename T>
FRIT_DEVICE T atomic_add(const Shared<T>& to, int64_t i, T value) {
  return atomicAdd(to.raw() + i, value);
}

namespace detail {
template <typename T>
FRIT_DEVICE uint32_t shared_address(const T* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
}  // namespace detail
template <typename T, typename U>
FRIT_DEVICE void copy_async16(const Shared<T>& to, int64_t i, const Global<U>& from, int64_t j, bool valid = true) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(detail::shared_address(to.raw() + i)),
               "l"(from.raw() + j), "r"(bytes)
               : "memory");
}
FRIT_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int groups_left>
FRIT_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups_left) : "memory");
}

template <typename T>
FRIT_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const Shared<T>& from, int64_t i) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(from.raw() + i))
               : "memory");
}
template <typename T>
FRIT_DEVICE void ldmatrix_x4_transposed(uint32_t (&r)[4], const Shared<T>& from, int64_t i) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(from.raw() + i))
               : "memory");
}
template <typename T>
FRIT_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const Shared<T>& from, int64_t i) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(detail::shared_address(from.raw() + i))
               : "memory");
}
template <typename T>
FRIT_DEVICE void ldmatrix_x2_transposed(uint32_t (&r)[2], const Shared<T>& from, int64_t i) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(detail::shared_address(from.raw() + i))
               : "memory");
}

template <typename T>
FRIT_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

FRIT_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FRIT_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FRIT_DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FRIT_DEVICE float rsqrt(float x) {
  return rsqrtf(x);
}
// Each rounded on its own, to nearest even, whatever the compiler's flags: never a part of a fused multiply-add, so the
// bits are the CPU's. div_rn and sqrt_rn cost about 8 instructions.
FRIT_DEVICE float add_rn(float a, float b) {
  return __fadd_rn(a, b);
}
FRIT_DEVICE float sub_rn(float a, float b) {
  return __fsub_rn(a, b);
}
FRIT_DEVICE float mul_rn(float a, float b) {
  return __fmul_rn(a, b);
}
FRIT_DEVICE float div_rn(float a, float b) {
  return __fdiv_rn(a, b);
}
FRIT_DEVICE float sqrt_rn(float x) {
  return __fsqrt_rn(x);
}
FRIT_DEVICE double add_rn(double a, double b) {
  return __dadd_rn(a, b);
}
FRIT_DEVICE double sub_rn(double a, double b) {
  return __dsub_rn(a, b);
}
FRIT_DEVICE double mul_rn(double a, double b) {
  return __dmul_rn(a, b);
}
FRIT_DEVICE float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FRIT_DEVICE uint32_t pack2(bfloat16, float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
FRIT_DEVICE uint32_t pack2(float16, float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// The larger of each of two pairs' elements; a NaN gives way. One instruction.
FRIT_DEVICE uint32_t max2(bfloat16, uint32_t a, uint32_t b) {
  uint32_t c;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
FRIT_DEVICE uint32_t max2(float16, uint32_t a, uint32_t b) {
  uint32_t c;
  asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
template <typename T>
FRIT_DEVICE T convert(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return T::from_bits(static_cast<uint16_t>(pack2(T(), x, 0.0f)));
  }
}
// Exact, in one instruction each.
FRIT_DEVICE float widen(float x) {
  return x;
}
FRIT_DEVICE float widen(bfloat16 x) {
  return static_cast<float>(x);
}
FRIT_DEVICE float widen(float16 x) {
  return __half2float(__ushort_as_half(x.bits));
}
// x, as a value the compiler knows nothing of: what was computed from it before is computed again, not kept in
// registers.
FRIT_DEVICE uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
FRIT_DEVICE int find_first_set(uint32_t x) {
  return __ffs(static_cast<int>(x));
}
FRIT_DEVICE int count_bits(uint32_t x) {
  return __popc(x);
}
FRIT_DEVICE int leading_zeros(uint32_t x) {
  return __clz(static_cast<int>(x));
}

// True in all threads of the block that reaches this last, behind all other blocks' writes. counter (one zeroed
// uint32_t in global memory) is zero again afterwards. Cost: 2 barriers, one atomic a block. scratch: one uint32_t of
// shared memory.
FRIT_DEVICE bool last_block(const Global<uint32_t>& counter, const Shared<uint32_t>& scratch) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t ticket = atomicAdd(counter.raw(), 1u);
    const bool last = ticket == gridDim.x - 1;
    if (last) counter.raw()[0] = 0u;
    scratch.raw()[0] = last ? 1u : 0u;
  }
  __syncthreads();
  const bool last = scratch.raw()[0] != 0;
  if (last) __threadfence();
  return last;
}

}  // namespace frit::simt
