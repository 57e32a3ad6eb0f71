// A 64-bit checksum of bytes, fed in pieces: finds damage and changes, offers no security.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace frit {

// The value depends on the bytes alone, not on how they were cut into update() calls.
// Cost: one multiplication each for the word and the state, 8 bytes at a time; a few GB/s.
class Hash64 {
 public:
  void update(const void* data, size_t bytes) {
    const auto* p = static_cast<const unsigned char*>(data);
    total_ += bytes;
    while (bytes > 0 && filled_ > 0) {
      pending_[filled_++] = *p++, --bytes;
      if (filled_ == 8) mix(pending_), filled_ = 0;
    }
    for (; bytes >= 8; bytes -= 8, p += 8) mix(p);
    if (bytes > 0) std::memcpy(pending_, p, bytes), filled_ = static_cast<int>(bytes);
  }
  void update(std::string_view text) { update(text.data(), text.size()); }
  // A number: its eight bytes.
  void update_number(uint64_t value) { update(&value, sizeof(value)); }

  uint64_t value() const {
    Hash64 end = *this;
    std::memset(end.pending_ + filled_, 0, 8 - filled_);
    end.mix(end.pending_);
    uint64_t h = end.state_ ^ (total_ * 0x9E3779B97F4A7C15u);
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
  }

 private:
  void mix(const unsigned char* p) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    state_ = std::rotl(state_ ^ (word * 0x9DDFEA08EB382D69u), 29) * 0xA24BAED4963EE407u;
  }

  uint64_t state_ = 0x243F6A8885A308D3u, total_ = 0;
  unsigned char pending_[8] = {};
  int filled_ = 0;
};

}  // namespace frit
