// Block scales. A scale always multiplies to dequantise: value = code * scale.
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

// Scale of a dS tile: the power of two that brings amax into [128, 256), exact to apply and to undo.
DMATTN_HD BlockScale tile_scale(float amax) {
  if (!is_finite(amax)) return {quiet_nan(), quiet_nan()};
  if (amax == 0.0f) return {0.0f, 0.0f};
  const float clamped = amax < kAmaxFloor ? kAmaxFloor : amax;
  const int32_t exponent = static_cast<int32_t>(float_bits(clamped) >> 23) - 127;
  return {power_of_two(static_cast<float>(exponent - 7)), power_of_two(static_cast<float>(7 - exponent))};
}

}  // namespace dmattn::numerics
