// Producer warps of the query-stationary kernels: bulk copies, bias codes and factors of every stage.
//
// Warp 0 copies. Bias codes of 64 keys are two warps' work, one key a lane; warps 0 and 1 take even tiles, 2 and 3 odd
// ones, so that each of the multiprocessor's four schedulers has the same share of it.
#pragma once

#include "cuda/collective/query_plan.h"
#include "cuda/schedule/query_items.h"
#include "numerics/constants.h"

namespace dmattn::cuda {

struct QueryOperands {
  const uint8_t* query[2];         // [Hq][QB][2] row images: q; delta: dO as well
  const uint8_t *keys, *values;    // [Hk][KB][2] images
  const float* q_scale;            // [Hq][QB]
  const float* d_scale;            // [Hq][QB], or null (forward)
  const float *k_scale, *v_scale;  // [Hk][KB][2]
  const float* bias;               // [Hq][mean_blocks_max][128 KB]
};

// What the producer adds to a stage by ordinary stores: one key's bias and the tile's factors, loaded a tile ahead.
struct StageInputs {
  float dot, k_scale, v_scale;
};

template <class T>
__device__ __forceinline__ void copy_queries(const QueryOperands& from, uint32_t shared, int64_t block,
                                             StageRing<T::kBlocks> ring) {
  using Plan = QueryPlan<T>;
  const uint32_t full = shared + Plan::block_full(ring.stage());
  ptx::barrier_expect(full, Plan::kBlockBytes);
#pragma unroll
  for (int i = 0; i < T::kOperands; ++i)
    ptx::bulk_load(shared + Plan::query(ring.stage(), i, 0), from.query[i] + block * Plan::kOperandBytes,
                   Plan::kOperandBytes, full);
}

template <class T>
__device__ __forceinline__ void copy_keys(const QueryOperands& from, uint32_t shared, int64_t image, int stage) {
  using Plan = QueryPlan<T>;
  const uint32_t full = shared + Plan::full(stage);
  ptx::barrier_expect(full, 2 * T::kImage);
  ptx::bulk_load(shared + Plan::keys(stage), from.keys + image * T::kImage, T::kImage, full);
  ptx::bulk_load(shared + Plan::values(stage), from.values + image * T::kImage, T::kImage, full);
}

template <class T>
__device__ __forceinline__ void produce(const Shape& shape, const QueryOperands& from, int32_t items, uint32_t shared,
                                        int warp, int lane) {
  using Plan = QueryPlan<T>;
  const bool centred = shape.mean_blocks_max > 0;
  const int first_tile = warp / 2, half = warp % 2;
  StageRing<T::kStages> ring;
  StageRing<T::kBlocks> block_ring;
  for (int32_t round = 0, index; (index = query_item_index(round)) < items; ++round) {
    const QueryItem item = query_item(shape, index);
    if (item.tiles == 0) continue;
    const int64_t q_block =
        static_cast<int64_t>(item.head) * shape.sequences.q_blocks + item.view.q_block0 + item.block;
    if (warp == 0) {
      ptx::barrier_wait(shared + Plan::block_empty(block_ring.stage()), block_ring.parity() ^ 1);
      if (lane == 0) copy_queries<T>(from, shared, q_block, block_ring);
      block_ring.advance();
    }
    const int64_t kv_head = item.head / (shape.q_heads / shape.kv_heads);
    const int64_t image0 = (kv_head * shape.sequences.k_blocks + item.view.k_block0) * 2;
    const auto mean_blocks = static_cast<int32_t>(numerics::query_mean_rows(item.view.q_rows) / kBlockRows);
    const int32_t mean_block = min(item.block / mean_blocks, shape.mean_blocks_max - 1);
    const float* dots =
        from.bias +
        (static_cast<int64_t>(item.head) * shape.mean_blocks_max + mean_block) * shape.sequences.k_blocks * kBlockRows +
        static_cast<int64_t>(item.view.k_block0) * kBlockRows + 32 * half + lane;
    const float q_scale = from.q_scale[q_block];
    const float d_scale = from.d_scale != nullptr ? from.d_scale[q_block] : 1.0f;
    const auto load = [&](int32_t tile) -> StageInputs {
      return {centred ? dots[tile * kImageRows] : 0.0f, from.k_scale[image0 + tile], from.v_scale[image0 + tile]};
    };
    StageInputs next = {};
    if (first_tile < item.tiles) next = load(first_tile);
    for (int32_t tile = 0; tile < item.tiles; ++tile, ring.advance()) {
      const uint32_t empty = shared + Plan::empty(ring.stage());
      if (warp == 0) {
        ptx::barrier_wait(empty, ring.parity() ^ 1);
        if (lane == 0) copy_keys<T>(from, shared, image0 + tile, ring.stage());
        __syncwarp();
      }
      if (tile % 2 != first_tile) continue;
      const StageInputs now = next;
      if (tile + 2 < item.tiles) next = load(tile + 2);
      ptx::barrier_wait(empty, ring.parity() ^ 1);
      if (centred)
        write_bias_codes(shared + Plan::bias(ring.stage()) + 16 * (32 * half + lane), now.dot, q_scale, now.k_scale);
      if (half == 0 && lane == 0) {
        const uint32_t scalars = shared + Plan::scalars(ring.stage());
        ptx::store_shared(scalars, (q_scale * now.k_scale) * shape.score_scale);
        ptx::store_shared(scalars + 4, d_scale * now.v_scale);
      }
      ptx::async_proxy_fence();
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(shared + Plan::full(ring.stage()));
    }
  }
}

}  // namespace dmattn::cuda
