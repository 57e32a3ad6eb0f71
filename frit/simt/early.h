// Words for kernels that begin before the kernels before them have ended: decoding is a chain of short ones, and what a
// step waits for is mostly its weights, which depend on no step.
//   let_next_start()               the next kernel may begin once all blocks of this one have said so or ended; what
//                                  this one writes it sees behind its own wait_for_previous(), as ever
//   load_constant<N>(g, i)         load_vec of memory that no kernel writes that may still run: the one kind of access
//                                  that is allowed before wait_for_previous(). Through the read-only path
//   load_constant(g, i)            one element
//   copy_constant_async16(shared, i, global, j, valid)    copy_async16 of the same; commit and wait as ever
// A kernel that uses them may have begun before any of the kernels before it ended: whatever it reads by load_constant,
// or prefetches, must have been written before a wait of the host, or be weights.
#pragma once
#include "frit/simt/simt.h"
#ifndef __CUDACC__
#include "frit/backend/sim/early.h"
#endif

namespace frit::simt {

#ifdef __CUDACC__
FRIT_DEVICE void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
template <int N, typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, N> load_constant(const Global<T>& from, int64_t i) {
  return load_vec<N, Cache::kReadOnly>(from, i);
}
template <typename T>
FRIT_DEVICE std::remove_const_t<T> load_constant(const Global<T>& from, int64_t i) {
  return load<Cache::kReadOnly>(from, i);
}
template <typename T, typename U>
FRIT_DEVICE void copy_constant_async16(const Shared<T>& to, int64_t i, const Global<U>& from, int64_t j, bool valid) {
  copy_async16(to, i, from, j, valid);
}
#else
FRIT_DEVICE void let_next_start() {}
template <int N, typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, N> load_constant(const Global<T>& from, int64_t i) {
  sim::touch_constant(from.raw() + i, sizeof(T) * N, from.region());
  Vec<std::remove_const_t<T>, N> v;
  std::memcpy(static_cast<void*>(&v), from.raw() + i, sizeof(v));
  return v;
}
template <typename T>
FRIT_DEVICE std::remove_const_t<T> load_constant(const Global<T>& from, int64_t i) {
  sim::touch_constant(from.raw() + i, sizeof(T), from.region());
  return from.raw()[i];
}
template <typename T, typename U>
FRIT_DEVICE void copy_constant_async16(const Shared<T>& to, int64_t i, const Global<U>& from, int64_t j, bool valid) {
  sim::copy_constant_async(to.offset(i), from.raw() + j, 16, valid ? 16 : 0, from.region());
}
#endif

}  // namespace frit::simt
