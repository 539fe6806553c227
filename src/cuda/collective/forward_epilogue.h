// End of a forward item: O and the rows' statistics to the caller's tensors (docs/numerics.md, section 3, "End").
#pragma once

#include "cuda/collective/forward_consumer.h"
#include "cuda/collective/row_stores.h"
#include "cuda/ptx/convert.h"
#include "numerics/constants.h"

namespace dmattn::cuda {

// This thread's channels of row r, times `inverse`, as BF16, and where kLow what they lose by that. high, low: the
// rows' first channels, null where there is no such row.
template <int kDim, bool kWide, bool kLow>
__device__ __forceinline__ void store_row(uint16_t* high, uint16_t* low, const float (&o)[kDim / 2], int r,
                                          float inverse, int lane) {
  float factor = inverse;
  asm volatile("" : "+f"(factor));  // its products stay on this side of the branches around them
#pragma unroll
  for (int j = 0; j < kDim / 8; j += 4) {
    uint32_t rounded[4], lost[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = o[4 * (j + i) + 2 * r] * factor, y = o[4 * (j + i) + 2 * r + 1] * factor;
      rounded[i] = ptx::bf16_pack(x, y);
      if constexpr (kLow) {
        lost[i] = ptx::bf16_pack(x - __uint_as_float(rounded[i] << 16), y - __uint_as_float(rounded[i] & 0xffff0000u));
      }
    }
    store_words<kWide>(high ? high + 8 * j : nullptr, rounded, lane);
    if constexpr (kLow) store_words<kWide>(low ? low + 8 * j : nullptr, lost, lane);
  }
}

template <class T>
__device__ __forceinline__ void store_rows(const Shape& shape, const ForwardOutput& output, const float* mean_dot,
                                           const QueryItem& item, const ConsumerThread& thread,
                                           const ForwardRows<T::kDim>& rows) {
  constexpr int kDim = T::kDim;
  const Sequences& s = shape.sequences;
  const int64_t vector = row_vector(s, shape.q_heads, item.sequence, item.head, item.view.q_first);
  const int64_t padded = (static_cast<int64_t>(item.head) * s.q_blocks + item.view.q_block0 + item.block) * kBlockRows;
  const bool low = output.o_low.data != nullptr;
  const bool wide = output.o.aligned && (!low || output.o_low.aligned);
  float sums[2], roundeds[2];  // of all lanes of a row, in units of 2^-8
#pragma unroll
  for (int r = 0; r < 2; ++r) sums[r] = row_sum(rows.sum[r]), roundeds[r] = row_sum(rows.rounded[r]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float reference = numerics::final_reference(rows.reference[r]);
    const float unit = reference == reference ? 1.0f : reference;
    const float sum = sums[r] * unit, rounded = roundeds[r] * unit;
    const int32_t in_block = thread.row + 8 * r, row = item.block * kBlockRows + in_block;
    const float inverse = rounded == 0.0f ? 0.0f : __frcp_rn(rounded);  // a row without keys is zero
    uint16_t *to = nullptr, *to_low = nullptr;
    if (row < item.view.q_rows) {
      to = row_pointer(output.o, s, item.sequence, item.view.q_first, row, item.head);
      if (low) to_low = row_pointer(output.o_low, s, item.sequence, item.view.q_first, row, item.head);
    }
    if (wide && low)
      store_row<kDim, true, true>(to, to_low, rows.o, r, inverse, thread.lane);
    else if (wide)
      store_row<kDim, true, false>(to, nullptr, rows.o, r, inverse, thread.lane);
    else if (low)
      store_row<kDim, false, true>(to, to_low, rows.o, r, inverse, thread.lane);
    else
      store_row<kDim, false, false>(to, nullptr, rows.o, r, inverse, thread.lane);
    if (thread.column != 0 || row >= item.view.q_rows) continue;
    const int64_t at = vector + row;
    if (output.reference != nullptr) output.reference[at] = reference;
    if (output.sum != nullptr) {
      output.sum[at] = T::kUnrounded ? sum / numerics::kProbabilityScale : numerics::quiet_nan();
      output.sum[output.row_vector_length + at] = rounded / numerics::kProbabilityScale;
    }
    if (T::kUnrounded && output.lse != nullptr) {
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
