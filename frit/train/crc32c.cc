#include "frit/train/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

namespace frit {
namespace {

// tables[k][b]: the checksum's change when byte b is followed by k zero bytes; eight bytes are then one step.
constexpr auto make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    tables[0][b] = crc;
  }
  for (uint32_t b = 0; b < 256; ++b) {
    for (int k = 1; k < 8; ++k) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 255];
  }
  return tables;
}
constexpr auto kTables = make_tables();

#if defined(__x86_64__)
// The processor's own CRC-32C instruction (SSE4.2), 8 bytes at a time.
__attribute__((target("sse4.2"))) uint32_t crc32c_instruction(std::span<const std::byte> bytes, uint32_t crc) {
  const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t n = bytes.size();
  uint64_t wide = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; n > 0; --n, ++p) narrow = __builtin_ia32_crc32qi(narrow, *p);
  return ~narrow;
}
#endif

}  // namespace

uint32_t crc32c_by_tables(std::span<const std::byte> bytes, uint32_t crc) {
  const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t n = bytes.size();
  crc = ~crc;
  if constexpr (std::endian::native == std::endian::little) {
    for (; n >= 8; n -= 8, p += 8) {
      uint64_t w;
      std::memcpy(&w, p, 8);
      w ^= crc;
      crc = kTables[7][w & 255] ^ kTables[6][(w >> 8) & 255] ^ kTables[5][(w >> 16) & 255] ^
            kTables[4][(w >> 24) & 255] ^ kTables[3][(w >> 32) & 255] ^ kTables[2][(w >> 40) & 255] ^
            kTables[1][(w >> 48) & 255] ^ kTables[0][w >> 56];
    }
  }
  for (; n > 0; --n, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 255];
  return ~crc;
}

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return crc32c_instruction(bytes, crc);
#endif
  return crc32c_by_tables(bytes, crc);
}

uint32_t crc32c(std::string_view text, uint32_t crc) {
  return crc32c(std::as_bytes(std::span(text)), crc);
}

uint32_t masked_crc32c(std::string_view text) {
  const uint32_t crc = crc32c(text);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

}  // namespace frit
