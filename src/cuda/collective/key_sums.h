// FP32 sums of dV and dK over intervals of 1,024 queries, and their way out.
#pragma once

#include "cuda/collective/key_codes.h"
#include "cuda/collective/row_stores.h"
#include "cuda/ptx/global.h"

namespace dmattn::cuda {

__device__ __forceinline__ void store4(float* to, float4 x, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w), "l"(policy)
               : "memory");
}

// to += x without waiting. Each address has one writer, whose additions take effect in program order: no other thread
// ever touches it, so the result does not depend on timing. The GPU flushes subnormal sums here (below 2^-126).
__device__ __forceinline__ void add4(float* to, float4 x, uint64_t policy) {
  asm volatile("red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w), "l"(policy)
               : "memory");
}

// The thread's part of the CTA's private sums: float4 number i at partial + 512 i.
template <class T, int N>
__device__ __forceinline__ void flush_sum(const float (&sum)[T::kSlices][N], float factor, float* partial, bool first) {
  const uint64_t policy = ptx::evict_last();  // they are to stay in the L2 until the next interval's are added
#pragma unroll
  for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 x = {sum[slice][i] * factor, sum[slice][i + 1] * factor, sum[slice][i + 2] * factor,
                        sum[slice][i + 3] * factor};
      float* to = partial + 128 * (slice * N + i);
      if (first)
        store4(to, x, policy);
      else
        add4(to, x, policy);
    }
}

// Rows `row` and row + 8 of the output (null: not there), BF16: (earlier intervals + sum factor) scale. kWide: both
// rows start at a multiple of 16 bytes.
template <class T, bool kWide, int N>
__device__ __forceinline__ void write_sum(const float (&sum)[T::kSlices][N], float factor, const float* partial,
                                          bool first, float scale, uint16_t* row, uint16_t* row8, int lane) {
  constexpr int kBatch = N < 64 ? N : 64, kTogether = 16;  // values whose loads are in flight; that are stored together
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
      for (int part = 0; part < kBatch; part += kTogether) {
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = &sum[slice][base + part + 4 * i];
          const float4 y = before[part / 4 + i];
          low[i] = ptx::bf16_pack((y.x + x[0] * factor) * scale, (y.y + x[1] * factor) * scale);
          high[i] = ptx::bf16_pack((y.z + x[2] * factor) * scale, (y.w + x[3] * factor) * scale);
        }
        const int channel = slice * T::kSlice + 2 * (base + part);
        store_words<kWide>(row ? row + channel : nullptr, low, lane);
        store_words<kWide>(row8 ? row8 + channel : nullptr, high, lane);
      }
    }
}

}  // namespace dmattn::cuda
