// FP32 sums of dV and dK over intervals of 512 queries, and their way out.
#pragma once

#include "cuda/collective/key_consumer.h"
#include "numerics/bf16.h"

namespace dmattn::cuda {

__device__ __forceinline__ void store4(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

// to += x without waiting. Each address has one writer, whose additions take effect in program order: no other thread
// ever touches it, so the result does not depend on timing. The GPU flushes subnormal sums here (below 2^-126).
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

__device__ __forceinline__ void store_pair(uint16_t* to, float a, float b, bool aligned) {
  const uint32_t x = numerics::bf16_encode(a), y = numerics::bf16_encode(b);
  if (aligned) {
    *reinterpret_cast<uint32_t*>(to) = x | y << 16;
  } else {
    to[0] = static_cast<uint16_t>(x);
    to[1] = static_cast<uint16_t>(y);
  }
}

// Rows `row` and row + 8 of the output (null: not there): (earlier intervals + sum factor) scale, as BF16.
template <class T, int N>
__device__ __forceinline__ void write_sum(float (&sum)[T::kSlices][N], float factor, const float* partial, bool first,
                                          float scale, uint16_t* row, uint16_t* row8, int pair) {
  constexpr int kBatch = N < 64 ? N : 64;  // values whose loads are in flight together
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
    for (int base = 0; base < N; base += kBatch) {
      float4 before[kBatch / 4];
#pragma unroll
      for (int i = 0; i < kBatch / 4; ++i) {
        before[i] = {0, 0, 0, 0};
        if (!first) before[i] = __ldcg(reinterpret_cast<const float4*>(partial + 128 * (slice * N + base + 4 * i)));
      }
#pragma unroll
      for (int i = 0; i < kBatch / 4; ++i) {
        const float* x = &sum[slice][base + 4 * i];
        const int channel = slice * T::kSlice + 2 * (base + 4 * i) + pair;
        const bool aligned =
            (reinterpret_cast<uintptr_t>(row) & 3) == 0 && (reinterpret_cast<uintptr_t>(row8) & 3) == 0;
        if (row)
          store_pair(row + channel, (before[i].x + x[0] * factor) * scale, (before[i].y + x[1] * factor) * scale,
                     aligned);
        if (row8)
          store_pair(row8 + channel, (before[i].z + x[2] * factor) * scale, (before[i].w + x[3] * factor) * scale,
                     aligned);
      }
    }
}

}  // namespace dmattn::cuda
