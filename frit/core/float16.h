// The 16-bit floating-point types, for host and device: storage with explicit conversions, round to nearest even.
#pragma once
#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define FRIT_HOST_DEVICE __host__ __device__
#else
#define FRIT_HOST_DEVICE
#endif

namespace frit {

// The upper half of an fp32 number: 8 exponent bits, 7 mantissa bits.
struct bfloat16 {
  uint16_t bits = 0;

  bfloat16() = default;
  FRIT_HOST_DEVICE explicit bfloat16(float value) : bits(round(value)) {}
  FRIT_HOST_DEVICE explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  FRIT_HOST_DEVICE static bfloat16 from_bits(uint16_t bits) {
    bfloat16 result;
    result.bits = bits;
    return result;
  }

 private:
  FRIT_HOST_DEVICE static uint16_t round(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);  // NaN stays a quiet NaN
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
};

// IEEE binary16: 5 exponent bits, 10 mantissa bits.
struct float16 {
  uint16_t bits = 0;

  float16() = default;
  FRIT_HOST_DEVICE explicit float16(float value) : bits(round(value)) {}
  FRIT_HOST_DEVICE explicit operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal or zero
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  FRIT_HOST_DEVICE static float16 from_bits(uint16_t bits) {
    float16 result;
    result.bits = bits;
    return result;
  }

 private:
  FRIT_HOST_DEVICE static uint16_t round(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));  // NaN
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);                     // rounds to infinity
    if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, in steps of 2^-24; adding 0.5 makes the FPU round there
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
};

}  // namespace frit
