// Marks functions that run on the host and in a kernel. They are internal to each translation unit and always
// inlined: the CPU twin compiles its inner loops once per instruction set, and a shared out-of-line copy built with
// AVX-512 must never be picked by the linker for a machine without it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DMATTN_HD __host__ __device__ __forceinline__ static
#else
#define DMATTN_HD [[maybe_unused]] __attribute__((always_inline)) static inline
#endif

namespace dmattn::numerics {

DMATTN_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

DMATTN_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// The fused multiply-add: one rounding, on every machine.
DMATTN_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

DMATTN_HD float absolute(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }
DMATTN_HD bool is_nan(float x) { return (float_bits(x) & 0x7fffffffu) > 0x7f800000u; }
DMATTN_HD bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }
DMATTN_HD float quiet_nan() { return bits_float(0x7fc00000u); }
DMATTN_HD float negative_infinity() { return bits_float(0xff800000u); }

}  // namespace dmattn::numerics
