// A caching allocator: what a program without a memory plan takes its temporaries from. To compare with.
#pragma once
#include <map>
#include <set>
#include <vector>

#include "frit/memory/block.h"

namespace frit {

// Takes memory from a device in segments and keeps it: what is given back is handed out again, at once. That is safe
// while all work goes to one stream, in whose order the pieces are used. Everything but allocate() and release() is the
// device's.
//
// Policy (the usual one of deep-learning frameworks): the smallest free piece that is large enough, cut to size; what
// is given back joins its free neighbours. Requests of up to 1 MiB come from segments of 2 MiB, those of up to 10 MiB
// from segments of 20 MiB, larger ones from a segment of their own, whole 2 MiB. Small and large ones never share a
// segment; of a large piece less than 1 MiB is not cut off. If the device has no room, segments of which nothing is in
// use go back, and it is asked once more.
class CachingMemory : public DeviceMemory {
 public:
  // device must outlive this.
  explicit CachingMemory(DeviceMemory& device) : device_(device) {}
  ~CachingMemory() override;
  CachingMemory(const CachingMemory&) = delete;
  CachingMemory& operator=(const CachingMemory&) = delete;

  // Errors: as the device's.
  void* allocate(size_t bytes) override;
  void release(void* p) noexcept override;
  size_t held_bytes() const { return held_; }       // taken from the device
  size_t used_bytes() const { return used_; }       // handed out now, rounded up to kAlignment
  size_t most_used_bytes() const { return most_; }  // and at most

  Device device() const override { return device_.device(); }
  void upload(void* device, const void* host, size_t bytes) override { device_.upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { device_.download(host, device, bytes); }
  void fill(void* device, unsigned char byte, size_t bytes) override { device_.fill(device, byte, bytes); }
  void poison(void* device, size_t bytes) override { device_.poison(device, bytes); }
  void born(void* p, size_t bytes, DType dtype) override { device_.born(p, bytes, dtype); }
  void died(void* p) noexcept override { device_.died(p); }

 private:
  struct Piece {
    size_t bytes;
    bool free, large;
    bool first;  // of its segment: the piece before it is of another
  };
  using Pieces = std::map<char*, Piece>;
  using Free = std::set<std::pair<size_t, char*>>;
  Free& free_of(const Piece& piece) { return free_[piece.large]; }
  Pieces::iterator new_segment(size_t bytes);
  void give_back_unused() noexcept;
  // The piece behind this one in its segment; end() if it is the last.
  Pieces::iterator behind(Pieces::iterator piece);

  DeviceMemory& device_;
  Pieces pieces_;  // all memory, by address
  Free free_[2];   // small, large
  size_t held_ = 0, used_ = 0, most_ = 0;
};

}  // namespace frit
