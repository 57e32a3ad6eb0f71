// Prepares batches ahead, in a thread of its own.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "frit/data/batch.h"
#include "frit/data/batcher.h"

namespace frit {

// A ring of reused batches, filled in order by one thread and emptied by one consumer.
class Prefetcher {
 public:
  // Fills the batch and says where the stream stands after it; false at the end.
  using Produce = std::function<bool(Batch* batch, BatchPosition* after)>;

  // Takes the batcher's batches from where it stands. It must outlive this, and belongs to this thread alone meanwhile.
  explicit Prefetcher(Batcher& batcher, int ahead = 4);
  explicit Prefetcher(Produce produce, int ahead = 4, BatchPosition start = {});
  // Stops the thread after the batch it is working on.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // The next batch, valid until the next call; nullptr at the end. What the producer threw is thrown here, after the
  // batches made before it, and again on every later call.
  const Batch* next();
  // Where the stream stands after the batch that next() returned last: what to save. The start position before the
  // first.
  BatchPosition position() const { return position_; }

 private:
  struct Slot {
    Batch batch;
    BatchPosition after;
  };
  void work();

  Produce produce_;
  BatchPosition position_;
  std::vector<Slot> slots_;
  std::mutex mutex_;
  std::condition_variable filled_, freed_;
  int64_t produced_ = 0, consumed_ = 0;  // consumed_ counts batches given back: the one in use is not among them
  bool in_use_ = false, stop_ = false, end_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace frit
