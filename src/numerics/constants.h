// The constants that change results. Their meaning and the measurements behind them: docs/numerics.md. Constants
// that change only speed live with the code they speed up.
#pragma once

#include "numerics/hd.h"

namespace dmattn::numerics {

// Raised whenever a change alters any bit that the hopper numerics promises.
constexpr int kNumericsVersion = 4;

constexpr float kE4m3Max = 448.0f;  // largest finite E4M3
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

constexpr int kQueryScaleRows = 128;  // rows of S's Q that share a scale
constexpr int kKeyScaleRows = 64;     // keys of K and V that share a scale
constexpr int kTile = 64;             // queries and keys of a tile
constexpr int kMeanRows = 64;         // rows a partial sum of a mean runs over

// Rows of dO and plain q that share a scale; dV and dK leave the tensor core after that many queries.
constexpr int kFlushRows = 1024;
constexpr int kExponentKeys = 16;  // keys of a tile whose codes of P share an exponent in the backward

// Block amax is raised to this, so that 448 / amax stays finite (about 2^119).
constexpr float kAmaxFloor = 0x1p-110f;

// Codes of P hold 2^8 P / 2^b with b an integer: at most 2^8, so they never saturate.
constexpr int kProbabilityExponent = 8;
constexpr float kProbabilityScale = 0x1p8f;

// Q is centred per block of 128 * ceil(queries / kQueryMeanSpan) rows: at most 64 blocks.
constexpr int64_t kQueryMeanSpan = 8192;
DMATTN_HD int64_t query_mean_rows(int64_t queries) {
  const int64_t spans = (queries + kQueryMeanSpan - 1) / kQueryMeanSpan;
  return kQueryScaleRows * (spans > 1 ? spans : 1);
}

// Fraction bits that Hopper's FP8 accumulator keeps, and products added in one step (section "tensor core").
constexpr int kAccumulatorFractionBits = 13;
constexpr int kTensorCoreStep = 32;

}  // namespace dmattn::numerics
