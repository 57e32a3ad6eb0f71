// One pool of threads; the calling thread works too.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace frit {

// A non-owning reference to something callable: no allocation, valid while the callee runs.
template <typename Signature> class FunctionRef;
template <typename R, typename... Args> class FunctionRef<R(Args...)> {
 public:
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::decay_t<F>, FunctionRef>>>
  FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* o, Args... args) -> R { return (*static_cast<std::remove_reference_t<F>*>(o))(args...); }) {}
  R operator()(Args... args) const { return call_(object_, args...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

class ThreadPool {
 public:
  // threads counts the caller: 1 means no other thread. 0 takes the machine's number of usable cores.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, worker) for every task in [0, tasks); worker is in [0, threads()). Returns when all are done. Which
  // worker takes a task is not fixed, so results must not depend on it. An exception in a task is thrown here, after the
  // rest has finished. One caller at a time (others wait); calling it from inside a task runs the tasks in that task.
  // Cost: no allocation; about 1 us when the workers are awake.
  void run(int64_t tasks, FunctionRef<void(int64_t task, int worker)> body);

  // Cuts [0, n) into pieces of at least grain and calls body(begin, end, worker). The cuts depend on n and grain alone.
  void parallel_for(int64_t n, int64_t grain, FunctionRef<void(int64_t begin, int64_t end, int worker)> body);

  // Parallel regions begun since construction (run and parallel_for with work to do): what budgets count as launches.
  int64_t regions() const { return regions_; }

 private:
  struct Job;
  void work(int worker);
  void drain(int worker);

  std::vector<std::thread> workers_;
  std::mutex caller_mutex_, sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  const FunctionRef<void(int64_t, int)>* body_ = nullptr;
  int64_t tasks_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> busy_{0};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  int64_t regions_ = 0;
};

}  // namespace frit
