// The warp's matrix product.
#pragma once

#include <cstdint>

namespace dmattn::cuda::ptx {

// d += a b: 16 x 16 by 16 x 8 BF16, FP32 sums. With g = lane / 4 and t = lane % 4, a holds rows g, g + 8 at columns 2
// t, 2 t + 1, then both at columns 8 further; b0 and b1 hold column g at the same rows; d holds rows g (d[0], d[1]) and
// g + 8 at columns 2 t, 2 t + 1.
__device__ __forceinline__ void multiply_bf16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

}  // namespace dmattn::cuda::ptx
