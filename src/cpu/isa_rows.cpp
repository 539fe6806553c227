// Row operations of the twin: maxima, casts, exponentials. Compiled once per instruction set; see tile_kernels.h.

#include "cpu/isa.h"
#include "numerics/exp2.h"
#include "numerics/fp8.h"
#include "numerics/scale.h"

namespace dmattn::cpu::DMATTN_ISA {
namespace {

constexpr int kTile = numerics::kTile;
static_assert(kLanes == numerics::kExponentKeys);  // a row's groups are its lanes' turns

// Sums run over 16 lanes, then the far half is added to the near one: the same order for every vector width.
inline __attribute__((always_inline)) float fold_sum(float* lane) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  return lane[0];
}

__attribute__((noinline)) float amax(const float* x, int64_t n) {
  uint32_t lane[kLanes] = {};  // magnitudes order like their bits, with infinity and NaN on top
  const int64_t whole = n - n % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t bits = numerics::float_bits(x[i + l]) & 0x7fffffffu;
      lane[l] = bits > lane[l] ? bits : lane[l];
    }
  uint32_t largest = 0;
  for (int64_t i = whole; i < n; ++i) {
    const uint32_t bits = numerics::float_bits(x[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  for (int l = 0; l < kLanes; ++l) largest = lane[l] > largest ? lane[l] : largest;
  return numerics::bits_float(largest);
}

void cast(const float* x, float inverse, int64_t n, float* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = numerics::e4m3_round(x[i] * inverse);
}

float row_max(const float* x, int n) {
  float lane[kLanes];
  for (int l = 0; l < kLanes; ++l) lane[l] = numerics::negative_infinity();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  float largest = numerics::negative_infinity();
  for (; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (int l = 0; l < kLanes; ++l) largest = lane[l] > largest ? lane[l] : largest;
  return largest;
}

ExpSums exp_row(const float* score, float factor, const float* offset, int n, float* p, float* code) {
  for (int first = 0; first < kTile; first += kLanes) {
    const float of_group = offset[first / kLanes];
    for (int j = first; j < first + kLanes; ++j) {
      const float power = numerics::exp2_polynomial(numerics::fused(score[j], factor, of_group));
      const float kept = j < n ? power : 0.0f;
      p[j] = kept;
      code[j] = kept == kept ? numerics::e4m3_round(kept) : 0.0f;  // a NaN travels in sums and factors
    }
  }
  float plain[kLanes] = {}, rounded[kLanes] = {};
  for (int j = 0; j < kTile; j += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      plain[l] += p[j + l];
      rounded[l] += code[j + l];
    }
  return {fold_sum(plain), fold_sum(rounded)};
}

float exp_row_plain(const float* score, float factor, float reference, int n, float* p) {
  for (int j = 0; j < kTile; ++j) {
    const float power = numerics::exp2_polynomial(numerics::fused(score[j], factor, -reference));
    p[j] = j < n ? power : 0.0f;
  }
  float lane[kLanes] = {};
  for (int j = 0; j < kTile; j += kLanes)
    for (int l = 0; l < kLanes; ++l) lane[l] += p[j + l];
  return fold_sum(lane);
}

float ds_row(const float* p, const float* p_scale, const float* dp, float dp_scale, float delta, int n, float* ds) {
  for (int first = 0; first < kTile; first += kLanes) {
    const float of_group = p_scale[first / kLanes];
    for (int j = first; j < first + kLanes; ++j) {
      const float value = (p[j] * of_group) * numerics::fused(dp[j], dp_scale, -delta);
      ds[j] = j < n ? value : 0.0f;
    }
  }
  return amax(ds, kTile);
}

float dot_row(const float* p, const float* x, int n) {
  float lane[kLanes] = {};
  for (int j = 0; j < kTile; j += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float sum = numerics::fused(p[j + l], x[j + l], lane[l]);
      lane[l] = j + l < n ? sum : lane[l];
    }
  return fold_sum(lane);
}

void axpy(const float* x, float factor, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = numerics::fused(x[i], factor, y[i]);
}

void add_scaled(const float* x, float factor, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = y[i] + x[i] * factor;
}

}  // namespace

void fill_rows(TileKernels& table) {
  table.amax = amax;
  table.cast = cast;
  table.row_max = row_max;
  table.exp_row = exp_row;
  table.exp_row_plain = exp_row_plain;
  table.ds_row = ds_row;
  table.dot_row = dot_row;
  table.axpy = axpy;
  table.add_scaled = add_scaled;
}

}  // namespace dmattn::cpu::DMATTN_ISA
