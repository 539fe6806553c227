// The column bias as codes: one k = 32 step of S whose other operand is constant (numerics/bias.h).
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/memory.h"
#include "cuda/tile/image.h"
#include "numerics/bias.h"

namespace dmattn::cuda {

static_assert(numerics::kBiasSlots == 16, "one 16-byte column of an image");

// Writes the codes of two keys' biases, 16 bytes each at two shared addresses: the greedy split of numerics/bias.h in
// units of the bias weight (powers of two change no rounding), a slot of both keys at a time. All lanes of a warp call
// it together; the split ends when every lane's rest is too small for the smallest code.
__device__ __forceinline__ void write_bias_codes(const uint32_t (&address)[2], const float (&dot)[2], float q_scale,
                                                 float k_scale) {
  constexpr float kNothingLeft = 0x1p-10f;  // half the smallest code: a tie, to even
  float rest[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float units = numerics::bias_units(dot[i], q_scale, k_scale);
    rest[i] =
        (numerics::is_finite(units) ? units : 0.0f) * (1.0f / numerics::kBiasWeight);  // else the scale is NaN too
  }
  uint32_t words[2][4] = {};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (w > 0 && !__any_sync(0xffffffffu, fmaxf(fabsf(rest[0]), fabsf(rest[1])) > kNothingLeft)) break;
    uint32_t pair[4];
#pragma unroll
    for (int slot = 0; slot < 4; ++slot) {
      float value[2];
      asm("{ .reg .b16 pair, low, high; .reg .b32 both; cvt.rn.satfinite.e4m3x2.f32 pair, %4, %3;"
          " cvt.rn.f16x2.e4m3x2 both, pair; mov.b32 {low, high}, both; cvt.f32.f16 %1, low; cvt.f32.f16 %2, high;"
          " cvt.u32.u16 %0, pair; }"
          : "=r"(pair[slot]), "=f"(value[0]), "=f"(value[1])
          : "f"(rest[0]), "f"(rest[1]));
      rest[0] -= value[0], rest[1] -= value[1];  // exact: few bits
    }
    const uint32_t front = __byte_perm(pair[0], pair[1], 0x5140), back = __byte_perm(pair[2], pair[3], 0x5140);
    words[0][w] = __byte_perm(front, back, 0x5410);
    words[1][w] = __byte_perm(front, back, 0x7632);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) ptx::store_shared4(address[i], {words[i][0], words[i][1], words[i][2], words[i][3]});
}

// Fills the constant operand of the bias step (an image of 64 rows x 32 bytes, 2 KB) with `threads` threads.
__device__ __forceinline__ void fill_bias_ones(uint32_t image, int thread, int threads) {
  constexpr uint32_t kOnes = 0x78787878u;  // the code of 256, four times
  static_assert(numerics::kBiasWeight == 256.0f);
  for (int i = thread; i < kImageRows * 2; i += threads) {
    const uint32_t word = i < kImageRows ? kOnes : 0u;
    ptx::store_shared4(image + 16 * i, {word, word, word, word});
  }
}

}  // namespace dmattn::cuda
