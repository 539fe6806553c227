// Conversions of several numbers in one register, and exp2 of the special-function unit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace dmattn::cuda::ptx {

// Codes of a (lowest byte) .. d: round to nearest even, saturating; NaN gives 0x7f.
__device__ __forceinline__ uint32_t e4m3_pack(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;"
      " mov.b32 %0, {l, h}; }"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// The four values of a register of codes.
__device__ __forceinline__ void e4m3_unpack(uint32_t codes, float (&x)[4]) {
  uint32_t low, high;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
      : "=r"(low), "=r"(high)
      : "r"(codes));
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&low));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&high));
  x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
}

// BF16 of a (low half) and b: round to nearest even.
__device__ __forceinline__ uint32_t bf16_pack(float a, float b) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// 2^x within 2 ulp; 0 below -126 and at -infinity. Agrees with numerics::exp2_polynomial within the grade "bounded".
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dmattn::cuda::ptx
