// A queue between threads that holds few elements: whoever is ahead waits.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

namespace frit {

template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t room) : room_(room) {}

  // Waits for room. False, and the value is dropped, once the queue is stopped.
  bool push(T value) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ || values_.size() < room_; });
    if (stopped_) return false;
    values_.push_back(std::move(value));
    changed_.notify_all();
    return true;
  }
  // Waits for a value. None once the queue is stopped, or finished and empty.
  std::optional<T> pop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stopped_ || finished_ || !values_.empty(); });
    if (stopped_ || values_.empty()) return std::nullopt;
    std::optional<T> value(std::move(values_.front()));
    values_.pop_front();
    changed_.notify_all();
    return value;
  }
  // No more values come; what is there is still taken.
  void finish() { set(finished_); }
  // Nothing is put or taken any more.
  void stop() { set(stopped_); }

 private:
  void set(bool& flag) {
    const std::lock_guard lock(mutex_);
    flag = true;
    changed_.notify_all();
  }
  const size_t room_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> values_;
  bool finished_ = false, stopped_ = false;
};

}  // namespace frit
