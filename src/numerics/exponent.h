// Exponents that codes of P and dS keep while dV and dK stay in the tensor core (docs/numerics.md, section 4): set by the
// first tile, then raised where a code would reach 448, never lowered. -infinity: not set yet.
#pragma once

#include "numerics/fp8.h"
#include "numerics/scale.h"

namespace dmattn::numerics {

// `own`: the exponent that the tile would take by itself, -infinity if it holds nothing. `largest`: its largest magnitude
// in units of 2^current (any number where current is not set). NaN takes no part.
DMATTN_HD float raise_exponent(float current, float own, float largest) {
  const bool keeps = current != negative_infinity() && e4m3_round(largest) != kE4m3Max;
  return !keeps && own > current ? own : current;
}

}  // namespace dmattn::numerics
