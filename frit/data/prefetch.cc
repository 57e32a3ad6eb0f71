#include "frit/data/prefetch.h"

#include <utility>

#include "frit/core/error.h"

namespace frit {

Prefetcher::Prefetcher(Batcher& batcher, int ahead)
    : Prefetcher(
          [&batcher](Batch* batch, BatchPosition* after) {
            batcher.next(batch);
            *after = batcher.position();
            return true;
          },
          ahead, batcher.position()) {}

Prefetcher::Prefetcher(Produce produce, int ahead, BatchPosition start)
    : produce_(std::move(produce)), position_(start) {
  FRIT_CHECK(ahead >= 1, "[prefetch] ahead is {}, expected at least 1", ahead);
  slots_.resize(static_cast<size_t>(ahead) + 1);  // one more is in the consumer's hands
  thread_ = std::thread([this] { work(); });
}

Prefetcher::~Prefetcher() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  freed_.notify_all();
  thread_.join();
}

void Prefetcher::work() {
  const auto count = static_cast<int64_t>(slots_.size());
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      freed_.wait(lock, [&] { return stop_ || produced_ - consumed_ < count; });
      if (stop_) return;
    }
    Slot& slot = slots_[static_cast<size_t>(produced_ % count)];
    bool more = false;
    std::exception_ptr error;
    try {
      more = produce_(&slot.batch, &slot.after);
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(mutex_);
    if (more)
      ++produced_;
    else
      end_ = true, error_ = error;
    filled_.notify_one();
    if (!more) return;
  }
}

const Batch* Prefetcher::next() {
  std::unique_lock lock(mutex_);
  if (in_use_) {
    in_use_ = false;
    ++consumed_;
    freed_.notify_one();
  }
  filled_.wait(lock, [&] { return end_ || produced_ > consumed_; });
  if (produced_ == consumed_) {
    if (error_) std::rethrow_exception(error_);
    return nullptr;
  }
  in_use_ = true;
  const Slot& slot = slots_[static_cast<size_t>(consumed_ % static_cast<int64_t>(slots_.size()))];
  position_ = slot.after;
  return &slot.batch;
}

}  // namespace frit
