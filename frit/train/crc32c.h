// CRC-32C (Castagnoli), the checksum of checkpoint manifests and TensorBoard event files.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace frit {

// Returns the CRC-32C of `bytes`, continuing from `crc`, the value of the bytes before them (0 at the start).
// Source: RFC 3720, appendix B.4 (reflected polynomial 0x82F63B78, initial and final inversion).
// Cost: one read; the processor's instruction where it has one (SSE4.2), tables elsewhere: the same value.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);
uint32_t crc32c(std::string_view text, uint32_t crc = 0);

// The form by tables alone, for processors without the instruction (and the test that both agree).
uint32_t crc32c_by_tables(std::span<const std::byte> bytes, uint32_t crc = 0);

// The rotated and offset form that TFRecord stores, so that a checksum of data holding checksums stays strong.
uint32_t masked_crc32c(std::string_view text);

}  // namespace frit
