#include "frit/core/philox.h"

#include <gtest/gtest.h>

namespace frit {
namespace {

// Known answers of Random123's kat_vectors for philox4x32-10.
TEST(Philox, KnownAnswers) {
  const PhiloxBlock zeros = philox({0, 0}, 0, 0, 0, 0);
  EXPECT_EQ(zeros.v[0], 0x6627e8d5u);
  EXPECT_EQ(zeros.v[1], 0xe169c58du);
  EXPECT_EQ(zeros.v[2], 0xbc57ac4cu);
  EXPECT_EQ(zeros.v[3], 0x9b00dbd8u);
  const PhiloxBlock ones = philox({~0u, ~0u}, ~0u, ~0u, ~0u, ~0u);
  EXPECT_EQ(ones.v[0], 0x408f276du);
  EXPECT_EQ(ones.v[1], 0x41c83b0eu);
  EXPECT_EQ(ones.v[2], 0xa20bc7c6u);
  EXPECT_EQ(ones.v[3], 0x6d5451fdu);
}

TEST(Dropout, KeepsTheShareAndScalesExactly) {
  Dropout d{0.3f, dropout_site("here"), 0, {1, 2}};
  int64_t kept = 0;
  const int64_t n = 200000;
  for (int64_t i = 0; i < n; ++i) kept += d.keep(i / 1000, i % 1000);
  EXPECT_NEAR(static_cast<double>(kept) / n, 0.7, 0.005);
  EXPECT_NEAR(d.scale(), 1 / 0.7, 1e-4);
  EXPECT_FLOAT_EQ(d.scale() * (65536 - d.threshold()), 65536);
  EXPECT_FALSE(Dropout{}.active());
}

TEST(Float16, RoundTripsAndRoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float16 h = float16::from_bits(static_cast<uint16_t>(bits));
    const float f = static_cast<float>(h);
    if (f == f) {
      EXPECT_EQ(float16(f).bits, h.bits);
    }
    const bfloat16 b = bfloat16::from_bits(static_cast<uint16_t>(bits));
    const float g = static_cast<float>(b);
    if (g == g) {
      EXPECT_EQ(bfloat16(g).bits, b.bits);
    }
  }
  EXPECT_EQ(bfloat16(1.00390625f).bits, 0x3f80);  // halfway between 1 and 1 + 2^-7: even
  EXPECT_EQ(bfloat16(1.01171875f).bits, 0x3f82);
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(float16(0x1p-25f).bits, 0);
  EXPECT_EQ(float16(0x1.8p-24f).bits, 2);
}

}  // namespace
}  // namespace frit
