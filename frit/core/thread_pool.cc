#include "frit/core/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace frit {
namespace {

thread_local int t_worker = -1;           // this thread's index while it works for a pool
thread_local const void* t_pool = nullptr;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// Rounds of waiting before a worker sleeps: some tens of microseconds, the gap between two operators of a step.
constexpr int kSpins = 4000;

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads <= 0) threads = usable_cores();
  workers_.reserve(threads - 1);
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(sleep_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& w : workers_) w.join();
}

void ThreadPool::drain(int worker) {
  for (;;) {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    try {
      (*body_)(task, worker);
    } catch (...) {
      std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
}

void ThreadPool::work(int worker) {
  t_worker = worker;
  t_pool = this;
  uint64_t seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen && !stop_) {
      if (++spins < kSpins) {
        relax();
        continue;
      }
      std::unique_lock lock(sleep_mutex_);
      ++sleepers_;
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen || stop_; });
      --sleepers_;
    }
    if (stop_) return;
    seen = epoch_.load(std::memory_order_acquire);
    drain(worker);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::run(int64_t tasks, FunctionRef<void(int64_t, int)> body) {
  if (tasks <= 0) return;
  if (t_pool == this) {  // inside one of our tasks
    for (int64_t i = 0; i < tasks; ++i) body(i, t_worker);
    return;
  }
  std::lock_guard lock(caller_mutex_);
  ++regions_;
  struct Enter {
    const void* pool = t_pool;
    int worker = t_worker;
    explicit Enter(const void* p) { t_pool = p, t_worker = 0; }
    ~Enter() { t_pool = pool, t_worker = worker; }
  } enter(this);
  if (workers_.empty() || tasks == 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i, 0);
    return;
  }
  body_ = &body;
  tasks_ = tasks;
  error_ = nullptr;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard sleep(sleep_mutex_);
    wake_.notify_all();
  }
  drain(0);
  for (int spins = 0; busy_.load(std::memory_order_acquire) != 0;) {
    if (++spins < kSpins)
      relax();
    else
      std::this_thread::yield();
  }
  body_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::parallel_for(int64_t n, int64_t grain, FunctionRef<void(int64_t, int64_t, int)> body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(1, grain);
  // At most 64 pieces, whatever the number of threads, so that nothing computed per piece depends on it.
  const int64_t pieces = std::clamp<int64_t>(n / grain, 1, 64);
  const int64_t size = n / pieces, rest = n % pieces;
  auto begin = [&](int64_t i) { return i * size + std::min(i, rest); };
  run(pieces, [&](int64_t i, int worker) { body(begin(i), begin(i + 1), worker); });
}

}  // namespace frit
