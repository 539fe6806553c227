// 2^y. One polynomial of degree 5 in fused multiply-adds gives the same bits on a CPU and in a kernel that uses it;
// a kernel that uses ex2.approx.ftz instead (2 ulp) agrees within the grade "bounded" and flips at most one E4M3
// code in a thousand (docs/numerics.md says why the choice is left to speed).
#pragma once

#include "numerics/hd.h"

namespace dmattn::numerics {

// Domain: all floats. Below -126 (also -infinity) the result is 0; above 127 it is 2^127; NaN stays NaN.
// Integers are exact. Relative error elsewhere: at most 2.2 * 2^-23 (tests/cpp/test_exp2.cpp).
DMATTN_HD float exp2_polynomial(float y) {
  const float clamped = y > 127.0f ? 127.0f : y;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const float magic = 0x1.8p23f;
  const float shifted = clamped + magic;
  const float r = clamped - (shifted - magic);  // in [-1/2, 1/2], exact
  // Least maximum relative error with the constant fixed at 1: 9.2e-8 before rounding.
  float p = 0x1.5bba14p-10f;
  p = fused(p, r, 0x1.3cea88p-7f);
  p = fused(p, r, 0x1.c6b752p-5f);
  p = fused(p, r, 0x1.ebf9bcp-3f);
  p = fused(p, r, 0x1.62e42ap-1f);
  p = fused(p, r, 1.0f);
  const float scaled = bits_float(float_bits(p) + (float_bits(shifted) << 23));
  const float result = clamped < -126.0f ? 0.0f : scaled;
  return y == y ? result : quiet_nan();
}

}  // namespace dmattn::numerics
