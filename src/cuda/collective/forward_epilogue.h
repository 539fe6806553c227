// End of a forward item: O and the rows' statistics to the caller's tensors (docs/numerics.md, section 3, "End").
#pragma once

#include <cuda_bf16.h>

#include "cuda/collective/forward_consumer.h"
#include "numerics/constants.h"

namespace dmattn::cuda {

__device__ __forceinline__ void store_pair(uint16_t* to, __nv_bfloat162 x, bool aligned) {
  if (aligned) {
    *reinterpret_cast<__nv_bfloat162*>(to) = x;
  } else {
    to[0] = __bfloat16_as_ushort(x.x);
    to[1] = __bfloat16_as_ushort(x.y);
  }
}

// This thread's channels of row r, times `inverse`, as BF16, and what they lose by that (`low` null: not wanted).
template <int kDim>
__device__ __forceinline__ void store_row(uint16_t* high, uint16_t* low, const float (&o)[kDim / 2], int r,
                                          float inverse) {
  const bool high_aligned = (reinterpret_cast<uintptr_t>(high) & 3) == 0;
  const bool low_aligned = (reinterpret_cast<uintptr_t>(low) & 3) == 0;
  if (high_aligned && low == nullptr) {  // the usual case, without a branch for each pair
    float factor = inverse;
    asm volatile("" : "+f"(factor));  // its products stay here
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j)
      store_pair(high + 8 * j, __floats2bfloat162_rn(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor), true);
    return;
  }
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    const float x = o[4 * j + 2 * r] * inverse, y = o[4 * j + 2 * r + 1] * inverse;
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
    store_pair(high + 8 * j, rounded, high_aligned);
    if (low == nullptr) continue;
    const float2 kept = __bfloat1622float2(rounded);
    store_pair(low + 8 * j, __floats2bfloat162_rn(x - kept.x, y - kept.y), low_aligned);
  }
}

template <int kDim>
__device__ __forceinline__ void store_rows(const Shape& shape, const ForwardOutput& output, const float* mean_dot,
                                           const QueryItem& item, const ConsumerThread& thread,
                                           const ForwardRows<kDim>& rows) {
  const Sequences& s = shape.sequences;
  const int64_t vector = row_vector(s, shape.q_heads, item.sequence, item.head, item.view.q_first);
  const int64_t padded = (static_cast<int64_t>(item.head) * s.q_blocks + item.view.q_block0 + item.block) * kBlockRows;
  float sums[2], roundeds[2];  // of all lanes of a row, in units of 2^-8
#pragma unroll
  for (int r = 0; r < 2; ++r) sums[r] = row_sum(rows.sum[r]), roundeds[r] = row_sum(rows.rounded[r]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float reference = numerics::final_reference(rows.reference[r]);
    const float unit = reference == reference ? 1.0f : reference;
    const float sum = sums[r] * unit, rounded = roundeds[r] * unit;
    const int32_t in_block = thread.row + 8 * r, row = item.block * kBlockRows + in_block;
    if (row >= item.view.q_rows) continue;
    const float inverse = rounded == 0.0f ? 0.0f : __frcp_rn(rounded);  // a row without keys is zero
    uint16_t* const high = row_pointer(output.o, s, item.sequence, item.view.q_first, row, item.head) + thread.column;
    uint16_t* low = nullptr;
    if (output.o_low.data != nullptr)
      low = row_pointer(output.o_low, s, item.sequence, item.view.q_first, row, item.head) + thread.column;
    store_row<kDim>(high, low, rows.o, r, inverse);
    if (thread.column != 0) continue;
    const int64_t at = vector + row;
    if (output.reference != nullptr) output.reference[at] = reference;
    if (output.sum != nullptr) {
      output.sum[at] = sum / numerics::kProbabilityScale;
      output.sum[output.row_vector_length + at] = rounded / numerics::kProbabilityScale;
    }
    if (output.lse != nullptr) {
      float lse = numerics::negative_infinity();
      if (sum != 0.0f) {
        lse = numerics::fused(reference, numerics::kLn2, logf(sum / numerics::kProbabilityScale));
        if (mean_dot != nullptr) lse = numerics::fused(shape.softmax_scale, mean_dot[padded + in_block], lse);
      }
      output.lse[at] = lse;
    }
  }
  __syncwarp();  // products want whole warps
}

}  // namespace dmattn::cuda
