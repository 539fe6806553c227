// What a warpgroup of the key-stationary backward does with a tile of 64 keys x 64 queries: codes of P and dS from S
// and dP, exponents, masks, products (kernels/key_gradients.cuh).
#pragma once

#include "cuda/collective/key_plan.h"
#include "cuda/collective/stage_ring.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/wgmma.h"
#include "numerics/exponent.h"
#include "numerics/scale.h"

namespace dmattn::cuda {

constexpr int32_t kIntervalTiles = numerics::kFlushRows / kImageRows;

// An exponent that was forgotten or never set: below any that matters, so that a code made with it saturates.
constexpr float kUnset = -1048576.0f;
constexpr float kCodeExponent = numerics::kProbabilityExponent;  // codes of P hold 2^8 p
static_assert(numerics::kExponentKeys == 16, "E belongs to a warp's rows of a product");

static_assert(numerics::kE4m3Max == 448.0f, "the code 0x7e below");
// Bit 7 of some byte is set if a byte of x, whose bit 7 is clear, is 0x7e (448) or 0x7f (NaN).
__device__ __forceinline__ uint32_t saturation(uint32_t x) { return x + 0x02020202u; }

// Where a thread's accumulator elements lie: keys key and key + 8 of the warpgroup's 64; queries 8 j + pair, + 1.
struct LaneMap {
  int warp;
  __device__ __forceinline__ explicit LaneMap(int thread) : warp(__shfl_sync(0xffffffffu, thread / 32, 0)) {}
  // Worked out anew at every use: no registers are left to keep them.
  __device__ __forceinline__ int lane() const { return opaque(static_cast<int>(threadIdx.x)) & 31; }
  __device__ __forceinline__ int key() const { return 16 * warp + (lane() >> 2); }
  __device__ __forceinline__ int pair() const { return 2 * (lane() & 3); }
};

// A tile's codes as the A operands of dV and dK, and whether one of them is 448 or NaN.
struct TileCodes {
  uint32_t p[8], ds[8];
  bool p_saturated, ds_saturated;
};

// The factors of a tile's products, and where the warp keeps the constants of the tile's queries in shared memory, as
// its exponents want them: 8 - c - E and delta' scaled, 16 bytes for the thread's first two queries, 64 more for the
// next two.
struct TileOperands {
  uint32_t rows;
  float score, dp_scale;
};

// sink(k, low, high, e) for 16 queries: codes of P = 2^(S f + shift - E) of the thread's two keys, and
// e = p (dP dp_scale - delta') in the order of s[8 k ...]; p is rounded to its code where kRounded.
// `begun` is called once the first 16 queries' P is there, before their codes.
template <bool kRounded, bool kDs, class Sink, class Begun>
__device__ __forceinline__ void each_code(const float (&s)[32], const float (&dp)[32], const TileOperands& in,
                                          Sink sink, Begun begun) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float v[8], e[8];
    float4 row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = ptx::load_shared4(in.rows + 64 * (2 * k + half));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        v[4 * half + i] = ptx::exp2_approx(fmaf(s[8 * k + 4 * half + i], in.score, i % 2 ? row[half].y : row[half].x));
    }
    if (k == 0) begun();
    const uint32_t low = ptx::e4m3_pack(v[0], v[1], v[4], v[5]), high = ptx::e4m3_pack(v[2], v[3], v[6], v[7]);
    if constexpr (kDs) {
      if constexpr (kRounded) {
        float x[2][4];
        ptx::e4m3_unpack(low, x[0]);
        ptx::e4m3_unpack(high, x[1]);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = x[i / 2 % 2][2 * (i / 4) + i % 2];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 4 * half; i < 4 * half + 4; ++i)
          e[i] = v[i] * fmaf(dp[8 * k + i], in.dp_scale, -(i % 2 ? row[half].w : row[half].z));
    }
    sink(k, low, high, e);
  }
}

template <bool kRounded, bool kDs, class Begun>
__device__ __forceinline__ void make_codes(const float (&s)[32], const float (&dp)[32], const TileOperands& in,
                                           TileCodes& out, Begun begun) {
  uint32_t p_saturated = 0, ds_saturated = 0;
  each_code<kRounded, kDs>(
      s, dp, in,
      [&](int k, uint32_t low, uint32_t high, const float(&e)[8]) {
        out.p[2 * k] = low, out.p[2 * k + 1] = high;
        p_saturated |= saturation(low) | saturation(high);
        if constexpr (kDs) {
          out.ds[2 * k] = ptx::e4m3_pack(e[0], e[1], e[4], e[5]);
          out.ds[2 * k + 1] = ptx::e4m3_pack(e[2], e[3], e[6], e[7]);
          ds_saturated |= saturation(out.ds[2 * k] & 0x7f7f7f7fu) | saturation(out.ds[2 * k + 1] & 0x7f7f7f7fu);
        }
      },
      begun);
  out.p_saturated = (p_saturated & 0x80808080u) != 0;
  out.ds_saturated = (ds_saturated & 0x80808080u) != 0;
}

// The thread's largest magnitude of dS.
template <bool kRounded>
__device__ __forceinline__ float most_ds(const float (&s)[32], const float (&dp)[32], const TileOperands& in) {
  float most = 0.0f;
  each_code<kRounded, true>(
      s, dp, in,
      [&](int, uint32_t, uint32_t, const float(&e)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(e[i]));
      },
      [] {});
  return most;
}

// The exponent that the warp's 16 keys ask for: the smallest integer at or above every acc f - c, and room. kUnset if
// none is visible.
__device__ __forceinline__ float warp_exponent(const float (&acc)[32], float factor, uint32_t shift) {
  float most = -INFINITY;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 s = ptx::load_shared2(shift + 4 * 8 * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fmaf(acc[4 * j + i], factor, i % 2 ? s.y : s.x));
  }
  // Integers beyond 2^20 do not matter: their codes vanish or their rows are NaN.
  const int bounded =
      static_cast<int>(fmaxf(fminf(ceilf(most) - kCodeExponent + numerics::kExponentRoom, 1048576.0f), kUnset));
  return static_cast<float>(__reduce_max_sync(0xffffffffu, bounded));
}

// 2^exponent of an integer; 0 below -126, infinity above 127. numerics::power_of_two without its branches: the magic
// number leaves the integer in the low bits of the sum.
__device__ __forceinline__ float exact_power(float exponent) {
  const float bounded = fmaxf(fminf(exponent, 128.0f), -127.0f);
  return __uint_as_float((__float_as_uint(bounded + 0x1.8p23f) << 23) + 0x3f800000u);
}

// acc = -infinity where the query does not see the key or there is no such key.
__device__ __forceinline__ void mask_scores(float (&acc)[32], const LaneMap& at, int first_key, int first_query,
                                            int keys, int offset, bool causal) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int key = first_key + at.key() + 8 * row;
    // The query 8 j + i after the thread's first sees the key from `need` on.
    const int need = key >= keys ? 0x40000000 : causal ? key - offset - first_query - at.pair() : -0x40000000;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (8 * j + i < need) acc[4 * j + 2 * row + i] = -INFINITY;
  }
}

// Largest of the warpgroup's non-negative x.
__device__ __forceinline__ float group_maximum(float x, uint32_t scratch, int group_barrier, const LaneMap& at) {
  const uint32_t warp = __reduce_max_sync(0xffffffffu, __float_as_uint(x));  // they order as integers
  if (at.lane() == 0) ptx::store_shared(scratch + 4 * at.warp, __uint_as_float(warp));
  ptx::group_sync(group_barrier);
  const float2 a = ptx::load_shared2(scratch), b = ptx::load_shared2(scratch + 8);
  ptx::group_sync(group_barrier);  // the next call may be one step away, with no barrier between
  return fmaxf(fmaxf(a.x, a.y), fmaxf(b.x, b.y));
}

// sum[64 keys x D] of a slice array += left[64 x 64] . right image[D x 64]^T; accumulate = false starts from zero.
template <class T, int N>
__device__ __forceinline__ void add_product(float (&sum)[T::kSlices][N], const uint32_t (&left)[8], ImageOperand right,
                                            bool accumulate) {
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
    for (int k = 0; k < 2; ++k) ptx::mma(sum[slice], left + 4 * k, right.at(k, slice * T::kSlice), k > 0 || accumulate);
}

// acc[64 keys x 64 queries] = keys' image . queries' image^T over channels.
template <class T>
__device__ __forceinline__ void row_product(float (&acc)[32], ImageOperand keys, ImageOperand queries) {
#pragma unroll
  for (int k = 0; k < T::D / 32; ++k) ptx::mma(acc, keys.at(k), queries.at(k), k > 0);
}

template <class T, int N>
__device__ __forceinline__ void scale_sum(float (&sum)[T::kSlices][N], float factor) {
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
    for (int i = 0; i < N; ++i) sum[slice][i] *= factor;
}

}  // namespace dmattn::cuda
