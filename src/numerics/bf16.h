// BF16: the upper half of an FP32. Domain: all floats. Error of the rounding: half a unit in the 8th bit.
#pragma once

#include "numerics/hd.h"

namespace dmattn::numerics {

DMATTN_HD float bf16_decode(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; overflow gives infinity; a NaN stays a (quiet) NaN of the same sign.
DMATTN_HD uint16_t bf16_encode(float x) {
  const uint32_t bits = float_bits(x);
  if (is_nan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

DMATTN_HD float bf16_round(float x) { return bf16_decode(bf16_encode(x)); }

}  // namespace dmattn::numerics
