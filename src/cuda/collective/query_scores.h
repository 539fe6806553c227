// Consumer side of the query-stationary kernels: where a thread's rows lie, products against a stage, masks.
#pragma once

#include "cuda/collective/query_plan.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/schedule/query_items.h"

namespace dmattn::cuda {

// A consumer thread: lane (g = lane / 4, t = lane % 4) of warp w holds rows 16 w + g and 16 w + g + 8 of the
// warpgroup's 64, columns 8 j + 2 t and 8 j + 2 t + 1 (ptx/wgmma.h).
struct ConsumerThread {
  uint32_t shared;
  int group;  // warpgroup: 64 queries each
  int lane;
  int row;     // of the block of 128; the other one is 8 further down
  int column;  // 2 t

  __device__ __forceinline__ ConsumerThread(uint32_t storage, int consumer_warp)
      : shared(storage),
        group(consumer_warp / 4),
        lane(static_cast<int>(threadIdx.x) % 32),
        row(16 * consumer_warp + lane / 4),
        column(2 * (lane % 4)) {}

  // This warp has read what the barrier guards.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(barrier);
  }
};

// The part of an item that one warpgroup has to do: tiles [0, tiles), of which it sees the first `whole` without a mask.
struct GroupTiles {
  int32_t tiles, whole;
  int32_t visible[2];  // keys that the thread's two rows see

  __device__ __forceinline__ GroupTiles(const QueryItem& item, bool causal, const ConsumerThread& thread) {
    const int32_t row = item.block * kBlockRows + thread.group * kImageRows;
    tiles = tiles_seen(item.view, causal, row, kImageRows);
    whole = min(visible_keys(item.view, causal, row) / kImageRows, tiles);
    for (int r = 0; r < 2; ++r)
      visible[r] = visible_keys(item.view, causal, item.block * kBlockRows + thread.row + 8 * r);
  }
};

// Which of a thread's columns of a tile its rows see: column 8 j + i of it (before adding 2 t) if 8 j + i < edge.
struct TileMask {
  int32_t edge[2];
  bool live[2];  // the row sees some key of the tile, whichever thread holds it

  __device__ __forceinline__ TileMask(const GroupTiles& group, int32_t tile, const ConsumerThread& thread) {
    for (int r = 0; r < 2; ++r) {
      const int32_t keys = group.visible[r] - tile * kImageRows;
      edge[r] = keys - thread.column;
      live[r] = keys > 0;
    }
  }
};

// d = A . B^T over the head dimension: row images of 64 queries and of 64 keys.
template <class T>
__device__ __forceinline__ void issue_product(float (&d)[32], uint64_t queries, uint64_t keys) {
#pragma unroll
  for (int k = 0; k < T::kDim / 32; ++k)
    ptx::mma(d, queries + k * image_step(kImageRows), keys + k * image_step(kImageRows), k != 0);
}

// Descriptor of a stage's image, from that of the first stage.
template <class T>
__device__ __forceinline__ uint64_t stage_image(uint64_t first, int stage) {
  return first + static_cast<uint32_t>(stage * (QueryPlan<T>::kStageBytes / 16));
}

// S of a stage in units of the accumulator, the bias step last.
template <class T>
__device__ __forceinline__ void issue_scores(float (&s)[32], uint64_t queries, uint32_t shared, int stage) {
  using Plan = QueryPlan<T>;
  const uint64_t keys = stage_image<T>(image_descriptor(shared + Plan::keys(0), kImageRows), stage);
  issue_product<T>(s, queries, keys);
  ptx::mma(s, image_descriptor(shared + Plan::kOnes, kImageRows), keys + (Plan::bias(0) - Plan::keys(0)) / 16, true);
}

template <class T>
__device__ __forceinline__ StageScalars load_scalars(uint32_t shared, int stage) {
  const float2 x = ptx::load_shared2(shared + QueryPlan<T>::scalars(stage));
  return {x.x, x.y};
}

// Over the four lanes that hold a row.
__device__ __forceinline__ float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace dmattn::cuda
