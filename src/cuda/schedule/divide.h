// Division by a number that a launch knows: a product and a shift where the kernels would take a few dozen dependent
// instructions, several times an item.
#pragma once

#include <cstdint>

#include "cuda/tile/image.h"

namespace dmattn::cuda {

// x / value for 0 <= x < 2^31. With s = ceil(log2 value) and m = ceil(2^(31 + s) / value), x m / 2^(31 + s) exceeds
// x / value by less than x / 2^(31 + s) < 2^-s <= 1 / value, so that the integer part is the same.
struct Divisor {
  uint32_t multiplier, shift;
  int32_t value;

  DMATTN_CUDA_HD int32_t divide(int32_t x) const {
    const uint32_t twice = static_cast<uint32_t>(x) * 2;
#if defined(__CUDA_ARCH__)
    return static_cast<int32_t>(__umulhi(twice, multiplier) >> shift);
#else
    return static_cast<int32_t>((static_cast<uint64_t>(twice) * multiplier >> 32) >> shift);
#endif
  }
};

// value in [1, 2^31); outside, the nearest of these: a problem without rows may have any batch and heads, and no items.
inline Divisor divisor(int64_t value) {
  const auto bounded = static_cast<uint64_t>(value < 1 ? 1 : value > INT32_MAX ? INT32_MAX : value);
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < bounded) ++shift;
  const uint64_t power = uint64_t{1} << (31 + shift);
  return {static_cast<uint32_t>((power + bounded - 1) / bounded), shift, static_cast<int32_t>(bounded)};
}

}  // namespace dmattn::cuda
