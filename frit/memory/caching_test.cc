#include "frit/memory/caching.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "frit/core/error.h"
#include "frit/memory/memory.h"

namespace frit {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Host memory with a limit, that counts what was asked of it.
struct Host : DeviceMemory {
  explicit Host(size_t limit = SIZE_MAX) : left(limit) {}
  Device device() const override { return Device::kSim; }
  void* allocate(size_t bytes) override {
    if (bytes > left) fail("[host] no room for {} bytes", bytes);
    void* p = std::aligned_alloc(256, bytes);
    sizes[p] = bytes, left -= bytes;
    ++asked;
    return p;
  }
  void release(void* p) noexcept override {
    left += sizes[p];
    sizes.erase(p);
    std::free(p);
  }
  void upload(void*, const void*, size_t) override {}
  void download(void*, const void*, size_t) override {}
  void fill(void*, unsigned char, size_t) override {}
  size_t left;
  int asked = 0;
  std::map<void*, size_t> sizes;
};

TEST(CachingMemory, HandsOutAgainWhatWasGivenBack) {
  Host host;
  {
    CachingMemory cache(host);
    void *a = cache.allocate(1000), *b = cache.allocate(5 * kMiB), *c = cache.allocate(30 * kMiB + 1);
    EXPECT_EQ(cache.held_bytes(), 2 * kMiB + 20 * kMiB + 32 * kMiB);  // small, medium, one of its own
    EXPECT_EQ(cache.used_bytes(), 1024 + 5 * kMiB + 30 * kMiB + 256);
    EXPECT_EQ(host.asked, 3);
    for (void* p : {a, b, c}) cache.release(p);
    EXPECT_EQ(cache.used_bytes(), 0u);
    EXPECT_EQ(cache.allocate(1000), a);
    EXPECT_EQ(cache.allocate(5 * kMiB), b);
    EXPECT_EQ(cache.allocate(32 * kMiB), c);
    EXPECT_EQ(host.asked, 3);
    EXPECT_EQ(cache.held_bytes(), 54 * kMiB);
  }
  EXPECT_TRUE(host.sizes.empty());
}

TEST(CachingMemory, CutsPiecesAndJoinsNeighbours) {
  Host host;
  CachingMemory cache(host);
  void* parts[4];
  for (void*& p : parts) p = cache.allocate(5 * kMiB);
  EXPECT_EQ(host.asked, 1);
  cache.release(parts[1]);
  cache.release(parts[2]);
  EXPECT_EQ(cache.allocate(10 * kMiB), parts[1]);  // the two together
  EXPECT_EQ(host.asked, 1);
  cache.release(parts[1]);
  cache.release(parts[0]);
  cache.release(parts[3]);
  EXPECT_EQ(cache.allocate(20 * kMiB), parts[0]);
  EXPECT_EQ(host.asked, 1);
  // The best fit, not the first: of 3 and 2 MiB free the smaller one, whole, since less than 1 MiB would be left.
  void *x = cache.allocate(3 * kMiB), *gap = cache.allocate(4 * kMiB), *y = cache.allocate(2 * kMiB),
       *end = cache.allocate(4 * kMiB);
  EXPECT_EQ(host.asked, 2);
  cache.release(x), cache.release(y);
  EXPECT_EQ(cache.allocate(3 * kMiB / 2), y);
  for (void* p : {gap, end}) cache.release(p);
}

TEST(CachingMemory, AsksOnceMoreWhenUnusedSegmentsWentBack) {
  Host host(40 * kMiB);
  CachingMemory cache(host);
  void *a = cache.allocate(16 * kMiB), *b = cache.allocate(16 * kMiB);
  cache.release(a);
  void* c = cache.allocate(24 * kMiB);  // 16 in use, 16 free in a segment that is too small
  EXPECT_EQ(cache.held_bytes(), 40 * kMiB);
  EXPECT_THROW(cache.allocate(12 * kMiB), Error);
  cache.release(b), cache.release(c);
}

// Any order of requests: pieces never overlap, and all come back.
TEST(CachingMemory, PiecesNeverOverlap) {
  Host host;
  CachingMemory cache(host);
  std::mt19937 random(3);
  struct Live {
    unsigned char* p;
    size_t bytes;
    unsigned char value;
  };
  std::vector<Live> live;
  const auto whole = [](const Live& l) {
    return l.p[0] == l.value && l.p[l.bytes - 1] == l.value && l.p[l.bytes / 2] == l.value;
  };
  for (int i = 0; i < 4000; ++i) {
    if (live.size() > 30 || (!live.empty() && random() % 2)) {
      const size_t at = random() % live.size();
      ASSERT_TRUE(whole(live[at])) << i;
      cache.release(live[at].p);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
      continue;
    }
    const size_t bytes = 1 + random() % (random() % 8 == 0 ? 3 * kMiB : 100000);
    auto* p = static_cast<unsigned char*>(cache.allocate(bytes));
    ASSERT_EQ(reinterpret_cast<uintptr_t>(p) % kAlignment, 0u);
    live.push_back({p, bytes, static_cast<unsigned char>(i)});
    for (size_t b : {size_t{0}, bytes / 2, bytes - 1}) p[b] = static_cast<unsigned char>(i);
  }
  for (const Live& l : live) {
    EXPECT_TRUE(whole(l));
    cache.release(l.p);
  }
  EXPECT_EQ(cache.used_bytes(), 0u);
  EXPECT_GE(cache.held_bytes(), cache.most_used_bytes());
  // Nothing is in pieces any more: every segment can be had whole, without a new one.
  const int asked = host.asked;
  for (const auto& [p, bytes] : std::map<void*, size_t>(host.sizes))
    if (bytes > 2 * kMiB) cache.allocate(bytes);
  EXPECT_EQ(host.asked, asked);
}

}  // namespace
}  // namespace frit
