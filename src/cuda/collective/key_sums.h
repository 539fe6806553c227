// FP32 sums of dV and dK over intervals of 512 queries, and their way out.
#pragma once

#include "cuda/collective/key_consumer.h"
#include "numerics/bf16.h"

namespace dmattn::cuda {

__device__ __forceinline__ void store4(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

// to += x without waiting. Each address has one writer, whose additions take effect in program order: no other thread
// ever touches it, so the result does not depend on timing.
__device__ __forceinline__ void add4(float* to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

// The thread's part of the CTA's private sums: float4 number i at partial + 512 i.
template <class T, int N>
__device__ __forceinline__ void flush_sum(const float (&sum)[T::kSlices][N], float factor, float* partial, bool first) {
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 x = {sum[slice][i] * factor, sum[slice][i + 1] * factor, sum[slice][i + 2] * factor,
                        sum[slice][i + 3] * factor};
      float* to = partial + 128 * (slice * N + i);
      if (first)
        store4(to, x);
      else
        add4(to, x);
    }
}

// Rows `row` and row + 8 of the output: (sum factor + earlier intervals) scale, as BF16.
template <class T, int N>
__device__ __forceinline__ void write_sum(const float (&sum)[T::kSlices][N], float factor, const float* partial,
                                          bool first, float scale, uint16_t* row, uint16_t* row8, int pair) {
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float4 x = {0, 0, 0, 0};
      if (!first) x = __ldcg(reinterpret_cast<const float4*>(partial + 128 * (slice * N + i)));
      const int channel = slice * T::kSlice + 2 * i + pair;  // 8 (i / 4) + pair
      const float v[4] = {x.x + sum[slice][i] * factor, x.y + sum[slice][i + 1] * factor,
                          x.z + sum[slice][i + 2] * factor, x.w + sum[slice][i + 3] * factor};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint16_t* out = j < 2 ? row : row8;
        if (out) out[channel + j % 2] = numerics::bf16_encode(v[j] * scale);
      }
    }
}

}  // namespace dmattn::cuda
