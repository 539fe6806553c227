// E4M3 ("finite only"): 1 sign, 4 exponent bits of bias 7, 3 fraction bits; 448 is the largest, 2^-9 the smallest
// subnormal; 0x7f and 0xff are NaN; there is no infinity. The cast rounds to nearest even and saturates, as
// cvt.rn.satfinite.e4m3x2.f32 does. Domain: all 2^32 floats (tests/cpp/test_fp8.cpp runs them all). Relative error
// of a value in [2^-6, 448]: at most 2^-4; absolute error below 2^-6: at most 2^-10.
#pragma once

#include "numerics/constants.h"

namespace dmattn::numerics {

constexpr float kE4m3MinNormal = 0x1p-6f;
constexpr uint8_t kE4m3Nan = 0x7f;

// The value of the code that x is cast to, as a float: what the twin computes with. NaN stays NaN.
DMATTN_HD float e4m3_round(float x) {
  const float magnitude = absolute(x);
  // Normal range: drop 20 fraction bits, half to even.
  const uint32_t bits = float_bits(magnitude);
  const float normal = bits_float((bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u);
  // Subnormal range: adding 1.5 * 2^14 leaves a unit of 2^-9 in the last place, so the addition rounds.
  const float shift = 0x1.8p14f;
  const float subnormal = (magnitude + shift) - shift;
  float rounded = magnitude < kE4m3MinNormal ? subnormal : normal;
  rounded = rounded > kE4m3Max ? kE4m3Max : rounded;
  rounded = magnitude == magnitude ? rounded : quiet_nan();
  return bits_float(float_bits(rounded) | (float_bits(x) & 0x80000000u));
}

// The code of a value that e4m3_round returned (any other value is rounded first by the caller).
DMATTN_HD uint8_t e4m3_code_of(float rounded) {
  const uint32_t bits = float_bits(rounded);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const float magnitude = absolute(rounded);
  if (magnitude != magnitude) return kE4m3Nan;  // of either sign, as the hardware's cast gives
  if (magnitude < kE4m3MinNormal) return static_cast<uint8_t>(sign | static_cast<uint8_t>(magnitude * 0x1p9f));
  return static_cast<uint8_t>(sign | static_cast<uint8_t>(((bits & 0x7fffffffu) >> 20) - (120u << 3)));
}

DMATTN_HD uint8_t e4m3_encode(float x) { return e4m3_code_of(e4m3_round(x)); }

DMATTN_HD float e4m3_decode(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t exponent = (code >> 3) & 0xfu, fraction = code & 7u;
  if ((code & 0x7fu) == kE4m3Nan) return quiet_nan();
  if (exponent == 0) return bits_float(sign | float_bits(static_cast<float>(fraction) * 0x1p-9f));
  return bits_float(sign | ((exponent + 120u) << 23) | (fraction << 20));
}

}  // namespace dmattn::numerics
