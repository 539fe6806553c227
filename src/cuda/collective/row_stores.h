// BF16 rows out of the accumulator layout, 16 bytes a lane. A lane holds a pair of neighbouring columns (a word) of
// each eight: stored as they lie, a warp's words are eight lines of 16 bytes each. Four lanes of a row turn four words
// among themselves and store 64 bytes together.
#pragma once

#include <cstdint>

namespace dmattn::cuda {

// A quad's words, turned: lane t of four gets word t of each.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
  for (int far = 1; far <= 2; far *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & far) continue;
      const bool upper = (lane & far) != 0;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + far], far);
      (upper ? x[i] : x[i + far]) = other;
    }
}

// Words of 32 columns of a row: words[j] has columns 8 j + 2 t and 8 j + 2 t + 1, t = lane % 4. `row`: its first
// column, null where there is no such row. kWide: every row starts at a multiple of 16 bytes. All lanes of the warp, as
// the words travel.
template <bool kWide>
__device__ __forceinline__ void store_words(uint16_t* row, uint32_t (&words)[4], int lane) {
  if constexpr (kWide) {
    transpose_quad(words, lane);
    if (row) *reinterpret_cast<uint4*>(row + 8 * (lane % 4)) = {words[0], words[1], words[2], words[3]};
  } else if (row) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      row[8 * j + 2 * (lane % 4)] = static_cast<uint16_t>(words[j]);
      row[8 * j + 2 * (lane % 4) + 1] = static_cast<uint16_t>(words[j] >> 16);
    }
  }
}

}  // namespace dmattn::cuda
