// Scales. A scale always multiplies to dequantise: value = code * scale.
#pragma once

#include "numerics/constants.h"

namespace dmattn::numerics {

struct BlockScale {
  float scale;    // amax / 448, or 0 for an all-zero block, or NaN if the block holds a NaN or an infinity
  float inverse;  // 448 / amax, likewise
};

// amax: the largest magnitude of the block; NaN if it holds one. Both divisions are IEEE: error half an ulp each, so
// |x * inverse| <= 448 (1 + 2^-23) for every x of the block, which the cast saturates.
DMATTN_HD BlockScale block_scale(float amax) {
  if (!is_finite(amax)) return {quiet_nan(), quiet_nan()};
  if (amax == 0.0f) return {0.0f, 0.0f};
  const float clamped = amax < kAmaxFloor ? kAmaxFloor : amax;
#if defined(__CUDA_ARCH__)
  return {__fdiv_rn(clamped, kE4m3Max), __fdiv_rn(kE4m3Max, clamped)};
#else
  return {clamped / kE4m3Max, kE4m3Max / clamped};
#endif
}

// Scale of V's codes, and of O's where onepass asks what the tensor core makes of them: the smallest power of two with
// amax <= 448 scale, so that equal numbers have equal codes in every block, up to a power of two.
DMATTN_HD BlockScale power_scale(float amax) {
  if (!is_finite(amax)) return {quiet_nan(), quiet_nan()};
  if (amax == 0.0f) return {0.0f, 0.0f};
  const uint32_t bits = float_bits(amax < kAmaxFloor ? kAmaxFloor : amax);
  constexpr uint32_t kMantissa = 0x007fffffu, kOf448 = 0x00600000u;  // 448 = 1.75 * 2^8
  const uint32_t biased = (bits >> 23) - 8 + ((bits & kMantissa) > kOf448 ? 1u : 0u);
  return {bits_float(biased << 23), bits_float((254u - biased) << 23)};
}

// Largest magnitude so far, with NaN and infinity sticky (an infinity counts as NaN in block_scale).
DMATTN_HD float amax_step(float amax, float x) {
  const float magnitude = absolute(x);
  return (magnitude > amax || magnitude != magnitude) ? magnitude : amax;  // a NaN amax stays: no comparison holds
}

// 2^exponent for an integer-valued exponent; 0 below -126 (also for -infinity), infinity above 127, NaN for NaN. Exact.
DMATTN_HD float power_of_two(float exponent) {
  if (exponent != exponent) return exponent;
  if (exponent < -126.0f) return 0.0f;
  if (exponent > 127.0f) return bits_float(0x7f800000u);
  return bits_float(static_cast<uint32_t>(static_cast<int32_t>(exponent) + 127) << 23);
}

// tile_exponent of a finite amax > 0.
DMATTN_HD float tile_exponent_of_finite(float amax) {
  const float clamped = amax > kAmaxFloor ? amax : kAmaxFloor;
  return static_cast<float>(static_cast<int32_t>(float_bits(clamped) >> 23) - 127 - 7);
}

// Exponent of a dS tile's own scale: amax 2^-exponent lies in [128, 256). -infinity for amax = 0, NaN if amax is not
// finite.
DMATTN_HD float tile_exponent(float amax) {
  if (!is_finite(amax)) return quiet_nan();
  if (amax == 0.0f) return negative_infinity();
  return tile_exponent_of_finite(amax);
}

// Scale 2^exponent, exact to apply and to undo; zero if the exponent is -infinity.
DMATTN_HD BlockScale exponent_scale(float exponent) {
  if (exponent == negative_infinity()) return {0.0f, 0.0f};
  return {power_of_two(exponent), power_of_two(-exponent)};
}

// Scale of a dS tile by itself.
DMATTN_HD BlockScale tile_scale(float amax) { return exponent_scale(tile_exponent(amax)); }

}  // namespace dmattn::numerics
