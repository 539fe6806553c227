// Main loop of a delta consumer warpgroup: sums of P dP and of P over the keys of 64 queries (kernels/delta.cu).
#pragma once

#include "cuda/collective/query_scores.h"
#include "numerics/hd.h"

namespace dmattn::cuda {

// A thread's two rows. Sums are of its own columns until the end adds the four lanes of a row.
struct DeltaRows {
  float shift[2];     // 8 - c; -infinity: P of the row is zero
  float weighted[2];  // sum of p dP'
  float total[2];     // sum of p
};

// Two accumulators of one tile: scores and dP = dO V^T, in units of the tensor core.
struct DeltaTile {
  float s[32], dp[32];
};

template <class T, class Left>
__device__ __forceinline__ void issue_tile(DeltaTile& tile, const Left& queries, const Left& gradients, uint32_t shared,
                                           StageRing<T::kStages> at, bool full) {
  using Plan = QueryPlan<T>;
  if (!full) ptx::barrier_wait(shared + Plan::full(at.stage()), at.parity());
  const uint64_t stage = stage_descriptor<T>(shared, at.stage());
  ptx::mma_fence();
  issue_scores<T>(tile.s, queries, shared, stage);
  issue_product<T::kDim>(tile.dp, gradients, stage + image_at(kValuesInStage<T>, kImageRows));
  ptx::mma_commit();
}

// Adds a finished tile.
template <bool kMasked>
__device__ __forceinline__ void add_tile(const DeltaTile& tile, StageScalars scalars, const TileMask& mask,
                                         DeltaRows& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float weighted[2], total[2];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * j + 2 * r + i;
        float p = ptx::exp2_approx(numerics::fused(tile.s[at], scalars.score, rows.shift[r]));
        if (kMasked && 8 * j + i >= mask.edge[r]) p = 0.0f;
        weighted[i] = j == 0 ? p * tile.dp[at] : numerics::fused(p, tile.dp[at], weighted[i]);
        total[i] = j == 0 ? p : total[i] + p;
      }
    const float sum = numerics::fused(weighted[0] + weighted[1], scalars.value, rows.weighted[r]);
    rows.weighted[r] = !kMasked || mask.live[r] ? sum : rows.weighted[r];  // V may hold NaN where the row sees nothing
    rows.total[r] += total[0] + total[1];
  }
}

// All tiles of an item. The ring enters at the item's first stage and leaves behind its last.
template <class T, class Left>
__device__ __forceinline__ void delta_tiles(const Shape& shape, int32_t index, const ConsumerThread& thread,
                                            const Left& queries, const Left& gradients, StageRing<T::kStages>& ring,
                                            DeltaRows& rows) {
  using Plan = QueryPlan<T>;
  const bool causal = shape.causal != 0;
  const uint32_t shared = thread.shared;
  const GroupTiles group(query_item(shape, fresh(index)), causal, thread);
  bool full = false;  // the stage after the next is known to be
  const auto process = [&]<bool kMasked>(const DeltaTile& tile, const TileMask& mask) {
    const StageScalars scalars = load_scalars<T>(shared, ring.stage());
    thread.release(shared + Plan::empty(ring.stage()));  // the products have read the rest of it
    ring.advance();
    add_tile<kMasked>(tile, scalars, mask, rows);
    if (!kMasked) full = ptx::barrier_try(shared + Plan::full(ring.next().stage()), ring.next().parity());
  };
  const auto landed = [](DeltaTile& tile) {
    ptx::mma_wait<0>();
    ptx::mma_landed(tile.s);
    ptx::mma_landed(tile.dp);
  };
  DeltaTile tiles[2];
  int32_t tile = 0;
  if (group.tiles > 0) {
    issue_tile<T>(tiles[0], queries, gradients, shared, ring, false);
    landed(tiles[0]);
  }
  const int32_t pairs_end =
      min(group.whole, group.tiles - 1);  // a tile follows each pair: no branch around its products
#pragma unroll 1
  for (; tile + 2 <= pairs_end; tile += 2) {
    issue_tile<T>(tiles[1], queries, gradients, shared, ring.next(), full);
    process.template operator()<false>(tiles[0], TileMask());
    landed(tiles[1]);
    issue_tile<T>(tiles[0], queries, gradients, shared, ring.next(), full);
    process.template operator()<false>(tiles[1], TileMask());
    landed(tiles[0]);
  }
  const QueryItem item = query_item(shape, fresh(index));
  const ConsumerThread late = thread.anew();
  const VisibleKeys visible(item, causal, late);
#pragma unroll 1
  for (; tile < group.tiles; ++tile) {
    process.template operator()<true>(tiles[0], TileMask(visible, tile, late));
    if (tile + 1 < group.tiles) issue_tile<T>(tiles[0], queries, gradients, shared, ring, false);
    landed(tiles[0]);
  }
#pragma unroll 1
  for (; tile < item.tiles; ++tile) {  // the other warpgroup's alone
    ptx::barrier_wait(shared + Plan::full(ring.stage()), ring.parity());
    thread.release(shared + Plan::empty(ring.stage()));
    ring.advance();
  }
}

}  // namespace dmattn::cuda
