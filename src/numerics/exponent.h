// Exponents of the codes of P and dS in the backward (docs/numerics.md, section 4): set by the first tile, with room for
// codes twice as large, then raised where a code would reach 448, never lowered until they are forgotten. -infinity: not
// set yet.
#pragma once

#include "numerics/fp8.h"
#include "numerics/scale.h"

namespace dmattn::numerics {

constexpr float kExponentRoom = 1.0f;

// Whether an interval of kFlushRows queries, counted from the sequence's first, starts without exponents: intervals 0, 1,
// 2, 4, 8 ... do. A causal row's weights fall as 1 / row, by a factor of two at most from one to the next.
DMATTN_HD bool forgets_exponents(int64_t interval) { return (interval & (interval - 1)) == 0; }

// `own`: the exponent that brings the tile's largest magnitude to between 128 and 256, -infinity if it holds nothing.
// `largest`: that magnitude in units of 2^current (any number where current is not set). NaN takes no part.
DMATTN_HD float raise_exponent(float current, float own, float largest) {
  const bool keeps = current != negative_infinity() && e4m3_round(largest) != kE4m3Max;
  return !keeps && own + kExponentRoom > current ? own + kExponentRoom : current;
}

}  // namespace dmattn::numerics
