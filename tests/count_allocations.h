// Counts the calls of malloc and its kin in a program that includes this in one of its sources: the program's malloc comes
// before the C library's, in every thread and every library it loads.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace {
std::atomic<int64_t> g_allocations{0};
}
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t bytes) {
  ++g_allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t n, size_t bytes) {
  ++g_allocations;
  return __libc_calloc(n, bytes);
}
void* realloc(void* p, size_t bytes) {
  ++g_allocations;
  return __libc_realloc(p, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  ++g_allocations;
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  return memalign(alignment, bytes);
}
int posix_memalign(void** p, size_t alignment, size_t bytes) {
  *p = memalign(alignment, bytes);
  return *p ? 0 : 12;  // ENOMEM
}
}
