// CRC-32C (Castagnoli), the checksum of checkpoint manifests and TensorBoard event files.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace frit {

// Returns the CRC-32C of `bytes`, continuing from `crc`, the value of the bytes before them (0 at the start).
// Source: RFC 3720, appendix B.4 (reflected polynomial 0x82F63B78, initial and final inversion).
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);
uint32_t crc32c(std::string_view text, uint32_t crc = 0);

// The rotated and offset form that TFRecord stores, so that a checksum of data holding checksums stays strong.
uint32_t masked_crc32c(std::string_view text);

}  // namespace frit
