// The simulator's fibers: their stacks, switching between them, and what the sanitizers must hear of it.
#include <sys/mman.h>

#include <boost/context/detail/fcontext.hpp>
#include <new>

#include "frit/backend/sim/internal.h"

#if defined(__SANITIZE_ADDRESS__)
#define FRIT_SIM_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FRIT_SIM_ASAN
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define FRIT_SIM_TSAN
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FRIT_SIM_TSAN
#endif
#endif
#ifdef FRIT_SIM_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef FRIT_SIM_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace frit::sim {

namespace context = boost::context::detail;

namespace {

#if defined(FRIT_SIM_ASAN) || defined(FRIT_SIM_TSAN)
constexpr size_t kStackBytes = 512 * 1024;  // instrumented frames are larger
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif
constexpr size_t kGuardBytes = 4096;  // below a stack: one that overflows ends the program rather than its neighbour

void announce_leave([[maybe_unused]] Fiber& from, [[maybe_unused]] Fiber& to) {
#ifdef FRIT_SIM_ASAN
  __sanitizer_start_switch_fiber(&from.sanitizer, to.stack, to.stack_bytes);
#endif
#ifdef FRIT_SIM_TSAN
  __tsan_switch_to_fiber(to.sanitizer, 0);
#endif
}

void announce_arrive([[maybe_unused]] Fiber& here, [[maybe_unused]] Fiber& from) {
#ifdef FRIT_SIM_ASAN
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(here.sanitizer, &bottom, &bytes);
  // The stack that launch() was called on is not ours: here its place is told.
  if (!from.stack) from.stack = static_cast<char*>(const_cast<void*>(bottom)), from.stack_bytes = bytes;
#endif
}

void announce_new([[maybe_unused]] Fiber& fiber) {
#ifdef FRIT_SIM_ASAN
  fiber.sanitizer = nullptr;
  __asan_unpoison_memory_region(fiber.stack, fiber.stack_bytes);  // frames that a fault left behind
#endif
#ifdef FRIT_SIM_TSAN
  if (fiber.sanitizer) __tsan_destroy_fiber(fiber.sanitizer);
  fiber.sanitizer = __tsan_create_fiber(0);
#endif
}

void enter_fiber(context::transfer_t from) {
  Machine& m = running_machine();
  Fiber& before = *static_cast<Fiber*>(from.data);
  before.context = from.fctx;
  announce_arrive(*m.running, before);
  m.run_threads();
}

}  // namespace

void Machine::enter_main() {
  main = {};
#ifdef FRIT_SIM_TSAN
  main.sanitizer = __tsan_get_current_fiber();
#endif
  running = &main;
}

void Machine::switch_to(Fiber& to) {
  Fiber* from = running;
  running = &to;
  announce_leave(*from, to);
  const context::transfer_t back = context::jump_fcontext(to.context, from);
  Fiber& before = *static_cast<Fiber*>(back.data);
  before.context = back.fctx;
  announce_arrive(*from, before);
}

Fiber& Machine::free_fiber() {
  if (free_fibers.empty()) {
    auto fiber = std::make_unique<Fiber>();
    void* stack = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    mprotect(stack, kGuardBytes, PROT_NONE);
    fiber->stack = static_cast<char*>(stack) + kGuardBytes;
    fiber->stack_bytes = kStackBytes;
    free_fibers.push_back(fiber.get());
    fibers.push_back(std::move(fiber));
  }
  Fiber& fiber = *free_fibers.back();
  free_fibers.pop_back();
  if (!fiber.context) {
    announce_new(fiber);
    // Stacks begin at different offsets, else they all fall into the same sets of the caches.
    const size_t colour = (reinterpret_cast<uintptr_t>(fiber.stack) / kStackBytes) % 32 * 320;
    fiber.context =
        context::make_fcontext(fiber.stack + fiber.stack_bytes - colour, fiber.stack_bytes - colour, enter_fiber);
  }
  return fiber;
}

void Machine::reset_fibers() {
  free_fibers.clear();
  for (auto& fiber : fibers) fiber->context = nullptr, free_fibers.push_back(fiber.get());
}

void Machine::drop_fibers() {
  for (auto& fiber : fibers) {
#ifdef FRIT_SIM_TSAN
    if (fiber->sanitizer) __tsan_destroy_fiber(fiber->sanitizer);
#endif
    munmap(fiber->stack - kGuardBytes, kGuardBytes + fiber->stack_bytes);
  }
}

}  // namespace frit::sim
