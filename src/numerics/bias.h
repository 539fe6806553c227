// The column bias of Q centring, carried through the tensor core.
//
// S of centred codes lacks mu . (k - K mean), constant down a block of queries. It comes back as one more k = 32 step
// of the product, taken last: the Q side holds kBiasWeight in the first kBiasSlots places, the K side holds the bias
// in units of the accumulator, split greedily into E4M3 codes. Each code takes 4 bits off what is left, so four
// reach the 13 bits that the accumulator keeps; kBiasRangeSlots of them may be saturated before that.
// Error: at most 2^-16 of the bias or half a unit of the accumulator, whichever is larger.
#pragma once

#include "numerics/fp8.h"

namespace dmattn::numerics {

constexpr int kBiasSlots = 16;
constexpr int kBiasRangeSlots = 12;
constexpr float kBiasWeight = 256.0f;
constexpr float kBiasCapacity = kBiasRangeSlots * kE4m3Max * kBiasWeight;  // 1,376,256 units

// Codes (as values) of a bias of |units| <= kBiasCapacity. NaN spreads to every slot.
DMATTN_HD void bias_split(float units, float* slots, int64_t stride) {
  float rest = units;
  for (int s = 0; s < kBiasSlots; ++s) {
    const float code = e4m3_round(rest * (1.0f / kBiasWeight));
    slots[s * stride] = code;
    rest = rest - code * kBiasWeight;
  }
}

// Exponent by which a block's q_scale must rise so that the largest bias fits. `need` is the largest
// |mu . (k - mean)| / (k_scale * kBiasCapacity) over the sequence's keys. Exact comparison of doubles.
DMATTN_HD int bias_guard_exponent(double need, double q_scale) {
  int exponent = 0;
  while (need > q_scale && exponent < 300) {
    q_scale *= 2;
    ++exponent;
  }
  return exponent;
}

// Bias in units of the accumulator. A product of scales below the normal range means scores that vanish.
DMATTN_HD float bias_units(float dot, float q_scale, float k_scale) {
  const float unit = q_scale * k_scale;
  if (unit < 0x1p-126f) return unit != unit ? unit : 0.0f;
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(dot, unit);
#else
  return dot / unit;
#endif
}

}  // namespace dmattn::numerics
