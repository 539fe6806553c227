// The column bias as codes: one k = 32 step of S whose other operand is constant (numerics/bias.h).
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/memory.h"
#include "cuda/tile/image.h"
#include "numerics/bias.h"

namespace dmattn::cuda {

static_assert(numerics::kBiasSlots == 16, "one 16-byte column of an image");

// Codes of one key's bias. All lanes of a warp call it together: the greedy split ends when no lane has anything left.
__device__ __forceinline__ uint4 bias_codes(float dot, float q_scale, float k_scale) {
  const float units = numerics::bias_units(dot, q_scale, k_scale);
  float rest = numerics::is_finite(units) ? units : 0.0f;  // else the scale is NaN as well
  uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
  for (int slot = 0; slot < numerics::kBiasSlots; ++slot) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(rest * (1.0f / numerics::kBiasWeight)));
    word[slot / 4] |= static_cast<uint32_t>(pair & 0xffu) << (8 * (slot % 4));
    float value[4];
    ptx::e4m3_unpack(pair & 0xffu, value);
    rest -= value[0] * numerics::kBiasWeight;  // exact: a multiple of 2^8 with few bits
    if (slot % 4 == 3 && !__any_sync(0xffffffffu, (pair & 0x7fu) != 0)) break;
  }
  return {word[0], word[1], word[2], word[3]};
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
// Zeroes the second column of a stage's bias image, which its writer leaves alone.
__device__ __forceinline__ void clear_bias_tail(uint32_t image, int thread, int threads) {
  for (int i = thread; i < kImageRows; i += threads) ptx::store_shared4(image + 16 * (kImageRows + i), {0, 0, 0, 0});
}

}  // namespace dmattn::cuda
