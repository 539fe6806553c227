// Main loop of a forward consumer warpgroup: S, P, O of 64 queries (kernels/forward.cu).
#pragma once

#include "cuda/collective/query_scores.h"
#include "numerics/softmax.h"

namespace dmattn::cuda {

// kUnrounded: the sum of P before it is rounded is wanted as well, by lse and by every backward but onepass's.
template <int kHeadDim, bool kUnroundedSum>
struct ForwardTraits : QueryTraits<kHeadDim, 1> {
  static constexpr bool kUnrounded = kUnroundedSum;
};

// A thread's share of its two rows. Sums are of its own columns until the epilogue adds the four lanes of a row.
template <int kDim>
struct ForwardRows {
  float o[kDim / 2];         // accumulator layout, slices of 64 channels
  float reference[2];        // M
  float sum[2], rounded[2];  // l (0 where it is not wanted), l^ in units of 2^-8

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) reference[r] = numerics::negative_infinity(), sum[r] = rounded[r] = 0.0f;
  }
  __device__ __forceinline__ void rescale(int r, float factor) {
    sum[r] *= factor, rounded[r] *= factor;
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) o[4 * i + 2 * r] *= factor, o[4 * i + 2 * r + 1] *= factor;
  }
};

// Sum of four codes. Pairs are added in FP16: exact unless they lie eight binades apart.
__device__ __forceinline__ float code_sum(uint32_t codes) {
  uint32_t pairs;
  asm("{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h;"
      " add.rn.f16x2 %0, x, y; }"
      : "=r"(pairs)
      : "r"(codes));
  const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&pairs));
  return two.x + two.y;
}

// References of the tile's groups: b of either row.
template <bool kMasked>
__device__ __forceinline__ void group_references(const float (&s)[32], float factor, const TileMask& mask,
                                                 float (&b)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top[2];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = s[4 * j + 2 * r + i];
        if (kMasked && 8 * j + i >= mask.edge[r]) x = numerics::negative_infinity();
        top[i] = j == 0 ? x : fmaxf(top[i], x);
      }
    b[r] = numerics::group_reference(row_maximum(fmaxf(top[0], top[1])) * factor);
  }
}

// The running M, with everything in its units; returns 2^(b - M) in `power`. To ask for NaN in the sums changes nothing
// but the order of instructions: the sums are ready before the branch, while a product runs, and not after it.
template <bool kMasked, int kDim>
__device__ __forceinline__ void raise_references(const float (&b)[2], const float (&rounded)[2], const TileMask& mask,
                                                 ForwardRows<kDim>& rows, float (&power)[2]) {
  bool rise = false;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    rise = rise || ((!kMasked || mask.live[r]) && !(b[r] <= rows.reference[r])) || !(rounded[r] >= 0.0f);
  if (__any_sync(0xffffffffu, rise)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (kMasked && !mask.live[r]) continue;
      const float raised = numerics::raise_reference(rows.reference[r], b[r]);
      rows.rescale(r, raised == rows.reference[r] ? 1.0f : ptx::exp2_approx(rows.reference[r] - raised));
      rows.reference[r] = raised;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) power[r] = kMasked && !mask.live[r] ? 0.0f : ptx::exp2_approx(b[r] - rows.reference[r]);
}

// Codes of P as the A fragments of two k = 32 steps over keys in sigma order; where kUnrounded the sums of p as well.
template <bool kMasked, bool kUnrounded>
__device__ __forceinline__ void probabilities(const float (&s)[32], float factor, const TileMask& mask,
                                              const float (&b)[2], uint32_t (&codes)[8], float (&total)[2]) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float offset = static_cast<float>(numerics::kProbabilityExponent) - b[r];
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 2 * k + i / 2;
        p[i] = ptx::exp2_approx(numerics::fused(s[4 * j + 2 * r + i % 2], factor, offset));
        if (kMasked && 8 * j + i % 2 >= mask.edge[r]) p[i] = 0.0f;
      }
      codes[2 * k + r] = ptx::e4m3_pack(p[0], p[1], p[2], p[3]);
      if constexpr (kUnrounded) {
        const float sum = (p[0] + p[1]) + (p[2] + p[3]);
        total[r] = k == 0 ? sum : total[r] + sum;
      }
    }
}

// T of a slice of channels = codes . V, from zero. `values`: the slice's descriptor.
template <int kDim, int kSlice>
__device__ __forceinline__ void issue_values(float (&t)[kSlice / 2], const uint32_t (&codes)[8], uint64_t values) {
  ptx::mma_fence();
  ptx::mma(t, codes, values, false);
  ptx::mma(t, codes + 4, values + image_step(kDim), true);
  ptx::mma_commit();
}

// One tile: P from s, then O += 2^(b - M) v_scale T. What can be done while T runs is: sums, a new M with everything in
// its units, and `meanwhile`. Products in flight have landed when this returns.
template <class T, bool kMasked, class Meanwhile>
__device__ __forceinline__ void attend(const float (&s)[32], StageScalars scalars, uint64_t values,
                                       const TileMask& mask, ForwardRows<T::kDim>& rows, Meanwhile meanwhile) {
  constexpr int kDim = T::kDim, kSlice = kDim == 128 ? 128 : 64, kSlices = kDim / kSlice;
  float b[2], power[2], total[2], factor[2];
  uint32_t codes[8];
  group_references<kMasked>(s, scalars.score, mask, b);
  probabilities<kMasked, T::kUnrounded>(s, scalars.score, mask, b, codes, total);
  float t[kSlice / 2];
  issue_values<kDim, kSlice>(t, codes, values);
  meanwhile();
  float rounded[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rounded[r] = (code_sum(codes[r]) + code_sum(codes[2 + r])) + (code_sum(codes[4 + r]) + code_sum(codes[6 + r]));
  }
  raise_references<kMasked>(b, rounded, mask, rows, power);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    factor[r] = scalars.value * power[r];
    if constexpr (T::kUnrounded) rows.sum[r] = numerics::fused(total[r], power[r], rows.sum[r]);
    rows.rounded[r] = numerics::fused(rounded[r], power[r], rows.rounded[r]);
  }
#pragma unroll
  for (int h = 0; h < kSlices; ++h) {
    ptx::mma_wait<0>();
    ptx::mma_landed(t);
#pragma unroll
    for (int i = 0; i < kSlice / 2; ++i) {
      float& o = rows.o[kSlice / 2 * h + i];
      const int r = i / 2 % 2;
      const float sum = numerics::fused(t[i], factor[r], o);
      o = !kMasked || mask.live[r] ? sum : o;  // V may hold NaN where the row looks at nothing
    }
    if (h + 1 < kSlices) issue_values<kDim, kSlice>(t, codes, values + (h + 1) * image_rows(kSlice));
  }
}

// All tiles of an item. The ring enters at the item's first stage and leaves behind its last.
template <class T, class Left>
__device__ __forceinline__ void forward_tiles(const Shape& shape, int32_t index, const ConsumerThread& thread,
                                              const Left& queries, StageRing<T::kStages>& ring,
                                              ForwardRows<T::kDim>& rows) {
  using Plan = QueryPlan<T>;
  using Ring = StageRing<T::kStages>;
  constexpr bool kPipelined = T::kDim <= 128;  // S of the next tile has registers of its own
  const bool causal = shape.causal != 0;
  const uint32_t shared = thread.shared;
  const GroupTiles group(query_item(shape, fresh(index)), causal, thread);
  const auto issue = [&](float(&s)[32], Ring at, bool full) {
    if (!full) ptx::barrier_wait(shared + Plan::full(at.stage()), at.parity());
    ptx::mma_fence();
    issue_scores<T>(s, queries, shared, stage_descriptor<T>(shared, at.stage()));
    ptx::mma_commit();
  };
  const auto process = [&]<bool kMasked>(const float(&s)[32], const TileMask& mask, auto meanwhile) {
    attend<T, kMasked>(s, load_scalars<T>(shared, ring.stage()),
                       stage_descriptor<T>(shared, ring.stage()) + image_at(kValuesInStage<T>, T::kDim), mask, rows,
                       meanwhile);
    thread.release(shared + Plan::empty(ring.stage()));
    ring.advance();
  };
  float s0[32];
  int32_t tile = 0;
  if (group.tiles > 0) {
    issue(s0, ring, false);
    ptx::mma_wait<0>();
    ptx::mma_landed(s0);
  }
  bool full = false;  // the next tile's stage is known to be
  const auto peek = [&] {
    const Ring at{ring.step + (kPipelined ? 2 : 1)};
    full = ptx::barrier_try(shared + Plan::full(at.stage()), at.parity());
  };
  const int32_t fast_end = min(group.whole, group.tiles - 1);  // a tile follows each: no branch around its products
  if constexpr (kPipelined) {
    float s1[32];
#pragma unroll 1
    for (; tile + 2 <= fast_end; tile += 2) {
      issue(s1, ring.next(), false);
      process.template operator()<false>(s0, TileMask(), peek);
      ptx::mma_landed(s1);
      issue(s0, ring.next(), full);
      process.template operator()<false>(s1, TileMask(), [] {});
      ptx::mma_landed(s0);
    }
  } else {
#pragma unroll 1
    for (; tile < fast_end; ++tile) {
      process.template operator()<false>(s0, TileMask(), peek);
      issue(s0, ring, full);
      ptx::mma_wait<0>();
      ptx::mma_landed(s0);
    }
  }
  const QueryItem item = query_item(shape, fresh(index));
  const ConsumerThread late = thread.anew();
  const VisibleKeys visible(item, causal, late);
#pragma unroll 1
  for (; tile < group.tiles; ++tile) {
    process.template operator()<true>(s0, TileMask(visible, tile, late), [] {});
    if (tile + 1 < group.tiles) issue(s0, ring, false);
    ptx::mma_wait<0>();
    ptx::mma_landed(s0);
  }
#pragma unroll 1
  for (; tile < item.tiles; ++tile) {  // the other warpgroup's alone
    ptx::barrier_wait(shared + Plan::full(ring.stage()), ring.parity());
    thread.release(shared + Plan::empty(ring.stage()));
    ring.advance();
  }
}

}  // namespace dmattn::cuda
