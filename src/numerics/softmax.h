// References of the softmax: integers, so that every change of reference is an exact power of two.
#pragma once

#include "numerics/constants.h"
#include "numerics/scale.h"

namespace dmattn::numerics {

// Reference of a row's group of 64 keys: the smallest integer at or above the largest score (log2 units).
// -infinity for a fully masked group, NaN if the score is NaN. Exact.
DMATTN_HD float group_reference(float largest_score) {
#if defined(__CUDA_ARCH__)
  return ceilf(largest_score);
#else
  return __builtin_ceilf(largest_score);
#endif
}

// The larger of two references; NaN is sticky.
DMATTN_HD float raise_reference(float current, float group) {
  return (group > current || group != group) ? group : current;
}

// Scores beyond this many log2 units have no integer reference that FP32 can subtract exactly: such a row is NaN, so
// that codes which vanish or saturate never pass for a result.
constexpr float kLargestReference = 0x1p24f;

// The row's reference once all keys are seen. NaN outside the domain; -infinity (no key seen) stays.
DMATTN_HD float final_reference(float reference) {
  const bool outside = absolute(reference) > kLargestReference && reference != negative_infinity();
  return outside ? quiet_nan() : reference;
}

// w = 2^exponent / sum in [1, 2), from exponent bits and one IEEE division (half an ulp).
// sum = 0 (a row without keys): w = 0. Domain: sum >= 0 and normal; NaN gives NaN.
struct RowWeight {
  float weight;
  float exponent;  // the backward's reference of the row is M + exponent
};

DMATTN_HD RowWeight row_weight(float sum) {
  if (sum == 0.0f) return {0.0f, 0.0f};
  if (!is_finite(sum)) return {quiet_nan(), 0.0f};
  const uint32_t bits = float_bits(sum);
  const int32_t exponent = static_cast<int32_t>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0 ? 1 : 0);
  const float numerator = power_of_two(static_cast<float>(exponent));
#if defined(__CUDA_ARCH__)
  return {__fdiv_rn(numerator, sum), static_cast<float>(exponent)};
#else
  return {numerator / sum, static_cast<float>(exponent)};
#endif
}

}  // namespace dmattn::numerics
