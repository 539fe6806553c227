// What the tensor core would make of <D, O>: onepass' delta' (docs/numerics.md, sections 2 and 4).
//
// The codes of dO and O lie where O's rows lay (pack_copies.h), in warps of whole rows. The lanes are dealt out again,
// D / 32 a row: a step of 32 channels then takes every lane.
#pragma once

#include "cuda/collective/pack_copies.h"
#include "numerics/constants.h"
#include "numerics/scale.h"

namespace dmattn::cuda::pack {

// 8 codes of a row of O, and the row's scale.
struct OutputCodes {
  uint32_t word[2];
  float scale;
};

// Codes of O's row, of which x is this lane's part. Leaves in x what the codes lack.
template <int kDim>
__device__ __forceinline__ OutputCodes encode_output(float (&x)[kChunk]) {
  uint32_t amax = 0;
#pragma unroll
  for (int c = 0; c < kChunk; ++c) amax = max(amax, magnitude_bits(x[c]));
#pragma unroll
  for (int lane = 1; lane < ThreadRows<kDim>::kLanes; lane *= 2)
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, lane));
  const auto scale = numerics::power_scale(__uint_as_float(amax));
  OutputCodes out{{}, scale.scale};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* const half = x + 4 * h;
    out.word[h] = ptx::e4m3_pack(__fmul_rn(half[0], scale.inverse), __fmul_rn(half[1], scale.inverse),
                                 __fmul_rn(half[2], scale.inverse), __fmul_rn(half[3], scale.inverse));
    float code[4];
    ptx::e4m3_unpack(out.word[h], code);
#pragma unroll
    for (int c = 0; c < 4; ++c) half[c] = __fmaf_rn(-scale.scale, code[c], half[c]);
  }
  return out;
}

// Four pairs of codes: the exponents of their products, 14 more than they are, in bytes; 0 where a code is zero.
__device__ __forceinline__ uint32_t product_exponents(uint32_t a, uint32_t b) {
  constexpr uint32_t kOnes = 0x01010101u;
  const auto is_zero = [](uint32_t x) { return ((0x80 * kOnes - x) >> 7) & kOnes; };  // bytes of 0 ... 127
  const auto exponent = [](uint32_t x) {  // a subnormal has that of the smallest normal
    const uint32_t field = (x >> 3) & (0x0f * kOnes);
    return field + (((0x10 * kOnes - field) >> 4) & kOnes);
  };
  const uint32_t zero = is_zero(a & (0x7f * kOnes)) | is_zero(b & (0x7f * kOnes));
  return (exponent(a) + exponent(b)) & ~(zero * 0xff);
}

// <D, O> of this lane's row from its codes, as wgmma adds it up from zero.
template <int kDim>
struct TruncatedDot {
  static constexpr int kStep = numerics::kTensorCoreStep, kSteps = kDim / kStep;
  static constexpr int kLanes = kSteps;              // of a row
  static constexpr int kWords = kStep / kLanes / 4;  // of a lane and step

  int row;      // of the image
  bool first;   // of the row's lanes: one writes what all hold
  float value;  // in units of the codes

  __device__ __forceinline__ explicit TruncatedDot(const CopiedRows<kDim>& codes) {
    constexpr int kRowLanes = ThreadRows<kDim>::kLanes;  // as the rows lie
    const int lane = threadIdx.x % 32, part = lane % kLanes, slot = lane / kLanes % kThreadRows;
    const int quad = lane / kLanes / kThreadRows;  // of the warp's
    const auto* const base =
        reinterpret_cast<const uint32_t*>(&codes[slot] + (quad * kRowLanes - lane)) + kWords * part % 2;
    row = ThreadRows<kDim>(threadIdx.x - lane + quad * kRowLanes).row(slot);
    first = part == 0;
    value = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t d[kWords], o[kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t* const at = base + 4 * (4 * s + (kWords * part + w) / 2) + w % 2;
        d[w] = at[0];
        o[w] = at[2];
      }
      add_step(d, o);
    }
  }

 private:
  __device__ __forceinline__ void add_step(const uint32_t (&d)[kWords], const uint32_t (&o)[kWords]) {
    uint32_t most = 0;  // two halves
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t pair = product_exponents(d[w], o[w]);
      most = __vmaxu2(most, __vmaxu2(pair & 0x00ff00ffu, (pair >> 8) & 0x00ff00ffu));
    }
    int largest = static_cast<int>(max(most & 0xffffu, most >> 16));
#pragma unroll
    for (int lane = 1; lane < kLanes; lane *= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, lane));
    // Biased exponents; no unit lies below 2^-126.
    constexpr int kFraction = numerics::kAccumulatorFractionBits;
    const int of_products = largest > 0 ? largest - 14 + 127 : kFraction + 1;
    const int of_sum = static_cast<int>(__float_as_uint(value) >> 23 & 0xffu);
    const int unit = max(of_products, of_sum) - kFraction;
    const float inverse = __int_as_float((254 - unit) << 23);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float a[4], b[4];
      ptx::e4m3_unpack(d[w], a);
      ptx::e4m3_unpack(o[w], b);
#pragma unroll
      for (int c = 0; c < 4; ++c) total += truncated(__fmul_rn(a[c], b[c]), inverse);
    }
#pragma unroll
    for (int lane = 1; lane < kLanes; lane *= 2) total += __shfl_xor_sync(kAllLanes, total, lane);
    total += truncated(value, inverse);  // every sum is of integers, below 2^21
    const float kept = __uint_as_float(__float_as_uint(total) & ~((1u << (23 - kFraction)) - 1));
    value = __fadd_rn(__fmul_rn(kept, __int_as_float(unit << 23)), 0.0f);  // a zero is positive
  }

  // x inverse, below 2^22, without its fraction.
  static __device__ __forceinline__ float truncated(float x, float inverse) {
    constexpr float kIntegers = 0x1p23f;
    return copysignf(__fadd_rn(__fmaf_rz(fabsf(x), inverse, kIntegers), -kIntegers), x);
  }
};

}  // namespace dmattn::cuda::pack
