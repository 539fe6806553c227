// Consumer warpgroup of the key-stationary backward: 64 keys against query tiles of 64 (kernels/key_gradients.cuh).
#pragma once

#include "cuda/collective/key_plan.h"
#include "cuda/collective/stage_ring.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/wgmma.h"
#include "numerics/scale.h"

namespace dmattn::cuda {

constexpr int32_t kIntervalTiles = numerics::kFlushRows / kImageRows;

// Exponents that have not been set in this interval: below any that matters, so that a code made with it saturates.
constexpr float kUnset = -1048576.0f;
constexpr float kCodeExponent = numerics::kProbabilityExponent;  // codes of P hold 2^8 p
static_assert(numerics::kExponentKeys == 16, "E belongs to a warp's rows of a product");

static_assert(numerics::kE4m3Max == 448.0f, "the code 0x7e below");
// Bit 7 of some byte is set if a byte of x, whose bit 7 is clear, is 0x7e (448) or 0x7f (NaN).
__device__ __forceinline__ uint32_t saturation(uint32_t x) { return x + 0x02020202u; }

// Where a thread's accumulator elements lie: keys key and key + 8 of the warpgroup's 64; queries 8 j + pair, + 1.
struct LaneMap {
  int warp, lane, key, pair;
  __device__ __forceinline__ explicit LaneMap(int thread)
      : warp(__shfl_sync(0xffffffffu, thread / 32, 0)),
        lane(thread % 32),
        key(16 * warp + lane / 4),
        pair(2 * (lane % 4)) {}
};

// A tile's probabilities: codes as the A operand of dV, and the unrounded values where dS wants them.
template <bool kRounded>
struct Probabilities {
  uint32_t codes[8];
  float values[kRounded ? 1 : 32];
};

// codes = E4M3(2^(acc f + shift - exponent)), acc in the layout of one m64n64 product. True if a code is 448 or NaN.
template <bool kRounded>
__device__ __forceinline__ bool make_codes(const float (&acc)[32], float factor, uint32_t shift, float exponent,
                                           Probabilities<kRounded>& p) {
  uint32_t saturated = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float v[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 s = ptx::load_shared2(shift + 4 * (16 * k + 8 * half));
      const float a = s.x - exponent, b = s.y - exponent;
      const float* x = acc + 8 * k + 4 * half;
      v[4 * half + 0] = ptx::exp2_approx(fmaf(x[0], factor, a));
      v[4 * half + 1] = ptx::exp2_approx(fmaf(x[1], factor, b));
      v[4 * half + 2] = ptx::exp2_approx(fmaf(x[2], factor, a));
      v[4 * half + 3] = ptx::exp2_approx(fmaf(x[3], factor, b));
    }
    p.codes[2 * k] = ptx::e4m3_pack(v[0], v[1], v[4], v[5]);
    p.codes[2 * k + 1] = ptx::e4m3_pack(v[2], v[3], v[6], v[7]);
    saturated |= saturation(p.codes[2 * k]) | saturation(p.codes[2 * k + 1]);
    if constexpr (!kRounded) {
#pragma unroll
      for (int i = 0; i < 8; ++i) p.values[8 * k + i] = v[i];
    }
  }
  return (saturated & 0x80808080u) != 0;
}

// Smallest integer exponent at or above every acc f - c of the warp's 16 keys; kUnset if none is visible.
__device__ __forceinline__ float warp_exponent(const float (&acc)[32], float factor, uint32_t shift) {
  float most = -INFINITY;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 s = ptx::load_shared2(shift + 4 * 8 * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fmaf(acc[4 * j + i], factor, i % 2 ? s.y : s.x));
  }
  // Integers beyond 2^20 do not matter: their codes vanish or their rows are NaN.
  const int bounded = static_cast<int>(fmaxf(fminf(ceilf(most) - kCodeExponent, 1048576.0f), kUnset));
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
    const int key = first_key + at.key + 8 * row;
    // The query 8 j + i after the thread's first sees the key from `need` on.
    const int need = key >= keys ? 0x40000000 : causal ? key - offset - first_query - at.pair : -0x40000000;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (8 * j + i < need) acc[4 * j + 2 * row + i] = -INFINITY;
  }
}

// sink(k, e): dS = p fma(T, dp_scale, -delta delta_scale) of 16 queries, e in the order of dp[8 k ...]. p is 2^(8 - E) P~.
template <bool kRounded, class Sink>
__device__ __forceinline__ void each_ds(const Probabilities<kRounded>& p, const float (&dp)[32], float dp_scale,
                                        float delta_scale, uint32_t delta, Sink sink) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x[2][4], e[8];
    if constexpr (kRounded) {
      ptx::e4m3_unpack(p.codes[2 * k], x[0]);
      ptx::e4m3_unpack(p.codes[2 * k + 1], x[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 d = ptx::load_shared2(delta + 4 * (16 * k + 8 * half));
      d.x *= delta_scale, d.y *= delta_scale;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 8 * k + 4 * half + i;
        const float probability = kRounded ? x[i / 2][2 * half + i % 2] : p.values[kRounded ? 0 : at];
        e[4 * half + i] = probability * fmaf(dp[at], dp_scale, -(i % 2 ? d.y : d.x));
      }
    }
    sink(k, e);
  }
}

template <bool kRounded>
__device__ __forceinline__ bool make_ds_codes(const Probabilities<kRounded>& p, const float (&dp)[32], float dp_scale,
                                              float delta_scale, uint32_t delta, uint32_t (&codes)[8]) {
  uint32_t saturated = 0;
  each_ds<kRounded>(p, dp, dp_scale, delta_scale, delta, [&](int k, const float(&e)[8]) {
    codes[2 * k] = ptx::e4m3_pack(e[0], e[1], e[4], e[5]);
    codes[2 * k + 1] = ptx::e4m3_pack(e[2], e[3], e[6], e[7]);
    saturated |= saturation(codes[2 * k] & 0x7f7f7f7fu) | saturation(codes[2 * k + 1] & 0x7f7f7f7fu);
  });
  return (saturated & 0x80808080u) != 0;
}

// dS over dp; `unit` is what p lacks to be P~. Returns the thread's largest magnitude.
template <bool kRounded>
__device__ __forceinline__ float replace_by_ds(const Probabilities<kRounded>& p, float (&dp)[32], float dp_scale,
                                               float unit, uint32_t delta) {
  float most = 0.0f;
  each_ds<kRounded>(p, dp, dp_scale * unit, unit, delta, [&](int k, const float(&e)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      most = fmaxf(most, fabsf(e[i]));
      dp[8 * k + i] = e[i];
    }
  });
  return most;
}

// Largest of the warpgroup's non-negative x.
__device__ __forceinline__ float group_maximum(float x, uint32_t scratch, int group_barrier, const LaneMap& at) {
  const uint32_t warp = __reduce_max_sync(0xffffffffu, __float_as_uint(x));  // they order as integers
  if (at.lane == 0) ptx::store_shared(scratch + 4 * at.warp, __uint_as_float(warp));
  ptx::group_sync(group_barrier);
  const float2 a = ptx::load_shared2(scratch), b = ptx::load_shared2(scratch + 8);
  ptx::group_sync(group_barrier);  // the next call may be one step away, with no barrier between
  return fmaxf(fmaxf(a.x, a.y), fmaxf(b.x, b.y));
}

// sum[64 keys x D] of a slice array += left[64 x 64] . right image[D x 64]^T; accumulate = false starts from zero.
template <class T, int N>
__device__ __forceinline__ void add_product(float (&sum)[T::kSlices][N], const uint32_t (&left)[8], uint64_t right,
                                            bool accumulate) {
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
    for (int k = 0; k < 2; ++k)
      ptx::mma(sum[slice], left + 4 * k, right + slice * image_rows(T::kSlice) + k * image_step(T::D),
               k > 0 || accumulate);
}

// acc[64 keys x 64 queries] = keys' image . queries' image^T over channels.
template <class T>
__device__ __forceinline__ void row_product(float (&acc)[32], uint64_t keys, uint64_t queries) {
#pragma unroll
  for (int k = 0; k < T::D / 32; ++k)
    ptx::mma(acc, keys + k * image_step(kImageRows), queries + k * image_step(kImageRows), k > 0);
}

template <class T, int N>
__device__ __forceinline__ void scale_sum(float (&sum)[T::kSlices][N], float factor) {
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
    for (int i = 0; i < N; ++i) sum[slice][i] *= factor;
}

}  // namespace dmattn::cuda
