#include "frit/memory/caching.h"

#include <algorithm>

#include "frit/core/error.h"
#include "frit/memory/memory.h"

namespace frit {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kSmall = kMiB;             // requests up to this size are small
constexpr size_t kSmallSegment = 2 * kMiB;  // of small requests
constexpr size_t kMedium = 10 * kMiB;       // larger requests get a segment of their own
constexpr size_t kMediumSegment = 20 * kMiB;
constexpr size_t kStep = 2 * kMiB;   // of larger segments
constexpr size_t kLeastRest = kMiB;  // that is cut off a large piece

size_t segment_bytes(size_t bytes) {
  if (bytes <= kSmall) return kSmallSegment;
  if (bytes <= kMedium) return kMediumSegment;
  return (bytes + kStep - 1) / kStep * kStep;
}

}  // namespace

CachingMemory::~CachingMemory() {
  for (const auto& [address, piece] : pieces_)
    if (piece.first) device_.release(address);
}

CachingMemory::Pieces::iterator CachingMemory::behind(Pieces::iterator piece) {
  auto next = std::next(piece);
  return next == pieces_.end() || next->second.first ? pieces_.end() : next;
}

CachingMemory::Pieces::iterator CachingMemory::new_segment(size_t bytes) {
  const size_t size = segment_bytes(bytes);
  void* p = nullptr;
  try {
    p = device_.allocate(size);
  } catch (const std::exception&) {  // it is asked once more, and what that says is told
    give_back_unused();
    p = device_.allocate(size);
  }
  held_ += size;
  return pieces_.emplace(static_cast<char*>(p), Piece{size, true, bytes > kSmall, true}).first;
}

void CachingMemory::give_back_unused() noexcept {
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    if (!piece->second.first || !piece->second.free || behind(piece) != pieces_.end()) {
      ++piece;
      continue;
    }
    free_of(piece->second).erase({piece->second.bytes, piece->first});
    held_ -= piece->second.bytes;
    device_.release(piece->first);
    piece = pieces_.erase(piece);
  }
}

void* CachingMemory::allocate(size_t bytes) {
  bytes = std::max(align_up(bytes), kAlignment);
  Free& free = free_[bytes > kSmall];
  Pieces::iterator piece;
  if (const auto found = free.lower_bound({bytes, nullptr}); found != free.end()) {
    piece = pieces_.find(found->second);
    free.erase(found);
  } else {
    piece = new_segment(bytes);
  }
  Piece& taken = piece->second;
  const size_t rest = taken.bytes - bytes;
  if (rest >= (taken.large ? kLeastRest : kAlignment)) {
    char* at = piece->first + bytes;
    pieces_.emplace(at, Piece{rest, true, taken.large, false});
    free.emplace(rest, at);
    taken.bytes = bytes;
  }
  taken.free = false;
  used_ += taken.bytes;
  most_ = std::max(most_, used_);
  return piece->first;
}

void CachingMemory::release(void* p) noexcept {
  if (!p) return;
  auto piece = pieces_.find(static_cast<char*>(p));
  if (piece == pieces_.end()) return;
  used_ -= piece->second.bytes;
  piece->second.free = true;
  Free& free = free_of(piece->second);
  if (const auto next = behind(piece); next != pieces_.end() && next->second.free) {
    free.erase({next->second.bytes, next->first});
    piece->second.bytes += next->second.bytes;
    pieces_.erase(next);
  }
  if (!piece->second.first) {
    if (const auto before = std::prev(piece); before->second.free) {
      free.erase({before->second.bytes, before->first});
      before->second.bytes += piece->second.bytes;
      pieces_.erase(piece);
      piece = before;
    }
  }
  free.emplace(piece->second.bytes, piece->first);
}

}  // namespace frit
