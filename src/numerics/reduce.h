// Sums whose bits are part of the contract.
#pragma once

#include "numerics/hd.h"

namespace dmattn::numerics {

constexpr int kDotLane = 8;  // elements a lane adds up by itself: 16 bytes of BF16

// <a, b> over n elements (n a multiple of 8, at most 256): lane l fuses elements 8l ... 8l+7 in ascending order from
// zero, then lanes are added in a butterfly, the far half first: what a warp does with xor shuffles.
template <class A, class B>
DMATTN_HD float tree_dot(A a, B b, int n) {
  float lane[32] = {};
  const int lanes = n / kDotLane;
  for (int l = 0; l < lanes; ++l) {
    float sum = 0.0f;
    for (int i = 0; i < kDotLane; ++i) sum = fused(a(l * kDotLane + i), b(l * kDotLane + i), sum);
    lane[l] = sum;
  }
  for (int half = 16; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lane[l] = lane[l] + lane[l + half];
  return lane[0];
}

}  // namespace dmattn::numerics
