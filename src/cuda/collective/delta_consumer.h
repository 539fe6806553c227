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

template <class T>
__device__ __forceinline__ void issue_tile(DeltaTile& tile, uint64_t queries, uint64_t gradients, uint32_t shared,
                                           StageRing<T::kStages> at) {
  using Plan = QueryPlan<T>;
  ptx::barrier_wait(shared + Plan::full(at.stage()), at.parity());
  const uint64_t values = stage_image<T>(image_descriptor(shared + Plan::values(0), kImageRows), at.stage());
  ptx::mma_fence();
  issue_scores<T>(tile.s, queries, shared, at.stage());
  issue_product<T>(tile.dp, gradients, values);
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
template <class T>
__device__ __forceinline__ void delta_tiles(const QueryItem& item, bool causal, const ConsumerThread& thread,
                                            uint64_t queries, uint64_t gradients, StageRing<T::kStages>& ring,
                                            DeltaRows& rows) {
  using Plan = QueryPlan<T>;
  const GroupTiles group(item, causal, thread);
  const uint32_t shared = thread.shared;
  const auto process = [&]<bool kMasked>(const DeltaTile& tile, int32_t at) {
    const StageScalars scalars = load_scalars<T>(shared, ring.stage());
    thread.release(shared + Plan::empty(ring.stage()));  // the products have read the rest of it
    ring.advance();
    add_tile<kMasked>(tile, scalars, TileMask(group, at, thread), rows);
  };
  const auto landed = [](DeltaTile& tile) {
    ptx::mma_wait<0>();
    ptx::mma_landed(tile.s);
    ptx::mma_landed(tile.dp);
  };
  DeltaTile tiles[2];
  int32_t tile = 0;
  if (group.tiles > 0) {
    issue_tile<T>(tiles[0], queries, gradients, shared, ring);
    landed(tiles[0]);
  }
  const int32_t pairs_end =
      min(group.whole, group.tiles - 1);  // a tile follows each pair: no branch around its products
#pragma unroll 1
  for (; tile + 2 <= pairs_end; tile += 2) {
    issue_tile<T>(tiles[1], queries, gradients, shared, ring.next());
    process.template operator()<false>(tiles[0], tile);
    landed(tiles[1]);
    issue_tile<T>(tiles[0], queries, gradients, shared, ring.next());
    process.template operator()<false>(tiles[1], tile + 1);
    landed(tiles[0]);
  }
#pragma unroll 1
  for (; tile < group.tiles; ++tile) {
    process.template operator()<true>(tiles[0], tile);
    if (tile + 1 < group.tiles) issue_tile<T>(tiles[0], queries, gradients, shared, ring);
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
