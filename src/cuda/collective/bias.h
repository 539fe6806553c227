// The column bias as codes: one k = 32 step of S whose other operand is constant (numerics/bias.h).
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/ptx/memory.h"
#include "cuda/tile/image.h"
#include "numerics/bias.h"

namespace dmattn::cuda {

static_assert(numerics::kBiasSlots == 16, "one 16-byte column of an image");

// Writes the codes of one key's bias, 16 bytes at a shared address. All lanes of a warp call it together: the greedy
// split ends when no lane has anything left. Word by word, as producers have few registers.
__device__ __forceinline__ void write_bias_codes(uint32_t address, float dot, float q_scale, float k_scale) {
  const float units = numerics::bias_units(dot, q_scale, k_scale);
  float rest = numerics::is_finite(units) ? units : 0.0f;  // else the scale is NaN as well
  bool more = true;
#pragma unroll
  for (int first = 0; first < numerics::kBiasSlots; first += 4) {
    uint32_t word = 0;
    if (more) {
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) {
        uint16_t pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(pair)
            : "f"(0.0f), "f"(rest * (1.0f / numerics::kBiasWeight)));
        word |= static_cast<uint32_t>(pair & 0xffu) << (8 * slot);
        float value[4];
        ptx::e4m3_unpack(pair & 0xffu, value);
        rest -= value[0] * numerics::kBiasWeight;  // exact: a multiple of 2^8 with few bits
      }
      more = __any_sync(0xffffffffu, (word & 0x7f000000u) != 0);
    }
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + first), "r"(word) : "memory");
  }
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
