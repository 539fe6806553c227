// The E4M3 cast, against a walk over its 127 finite magnitudes in FP64.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cpu/parallel.h"
#include "numerics/fp8.h"

namespace dmattn::numerics {
namespace {

// Value of a code from the format's definition, independent of e4m3_decode.
double value_of(int code) {
  const int exponent = code >> 3, fraction = code & 7;
  return exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
}

TEST(Fp8, DecodesEveryCode) {
  for (int code = 0; code < 127; ++code) {
    EXPECT_EQ(e4m3_decode(static_cast<uint8_t>(code)), value_of(code)) << code;
    EXPECT_EQ(e4m3_decode(static_cast<uint8_t>(code | 0x80)), -value_of(code)) << code;
  }
  EXPECT_TRUE(std::isnan(e4m3_decode(0x7f)));
  EXPECT_TRUE(std::isnan(e4m3_decode(0xff)));
  EXPECT_EQ(value_of(126), 448.0);
}

// All floats from bits `first` to `last` (magnitudes, ascending), both signs. Returns the number of wrong casts.
int64_t wrong_casts(uint32_t first, uint32_t last) {
  int code = 0;
  int64_t wrong = 0;
  for (uint64_t bits = first; bits <= last; ++bits) {
    const double x = bits_float(static_cast<uint32_t>(bits));
    // Next code once x passes the midpoint, or sits on it and the code above is even.
    while (code < 126) {
      const double middle = (value_of(code) + value_of(code + 1)) / 2;
      if (x < middle || (x == middle && code % 2 == 0)) break;
      ++code;
    }
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float input = bits_float(static_cast<uint32_t>(bits) | sign);
      const auto expected = static_cast<uint8_t>(code | (sign >> 24));
      if (e4m3_encode(input) != expected) ++wrong;
      if (float_bits(e4m3_round(input)) != float_bits(e4m3_decode(expected))) ++wrong;
    }
  }
  return wrong;
}

int64_t wrong_nans(uint32_t first, uint32_t last) {
  int64_t wrong = 0;
  for (uint64_t bits = first; bits <= last; ++bits)
    for (const uint32_t sign : {0u, 0x80000000u})
      if (e4m3_encode(bits_float(static_cast<uint32_t>(bits) | sign)) != 0x7f) ++wrong;  // either sign, as cvt does
  return wrong;
}

TEST(Fp8, CastsAroundEveryMidpoint) {
  for (int code = 0; code < 126; ++code) {
    const auto middle = static_cast<float>((value_of(code) + value_of(code + 1)) / 2);
    const uint32_t bits = float_bits(middle);
    EXPECT_EQ(wrong_casts(bits - 2, bits + 2), 0) << "between codes " << code << " and " << code + 1;
  }
  EXPECT_EQ(wrong_casts(0x7f800000u - 4, 0x7f800000u), 0) << "largest floats and infinity saturate";
  EXPECT_EQ(wrong_nans(0x7f800001u, 0x7f800010u), 0);
}

TEST(Fp8, SlowCastsAll2To32Floats) {
  constexpr int64_t kPieces = 128;
  constexpr uint32_t kInfinity = 0x7f800000u, kPiece = (kInfinity + 1) / kPieces;
  std::vector<int64_t> wrong(kPieces + 1, 0);
  cpu::parallel_for(kPieces + 1, 0, [&](int64_t piece) {
    const auto first = static_cast<uint32_t>(piece) * kPiece;
    wrong[static_cast<size_t>(piece)] = piece == kPieces
                                            ? wrong_casts(first, kInfinity) + wrong_nans(kInfinity + 1, 0x7fffffffu)
                                            : wrong_casts(first, first + kPiece - 1);
  });
  for (const int64_t count : wrong) EXPECT_EQ(count, 0);
}

}  // namespace
}  // namespace dmattn::numerics
