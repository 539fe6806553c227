// Producer warps of the query-stationary kernels: bulk copies, bias codes and factors of every stage.
//
// A warp does all of a stage: it copies, then writes the codes of 64 keys, two a lane. Step n of the CTA belongs to
// warp n % 4, so that a warp always meets the same stages in turn (a parity tells neighbouring phases apart, no others)
// and each of the multiprocessor's four schedulers has the same share of the work. Warp 0 copies queries as well.
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

// What the producer adds to a stage by ordinary stores: two keys' bias and the tile's factors, loaded a turn ahead.
struct StageInputs {
  float dot[2], k_scale, v_scale;
};

// Waits like ptx::barrier_wait, asleep in between: issue slots are the consumers'.
__device__ __forceinline__ void producer_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over_%=;\n"
      "nanosleep.u32 40;\n"
      "bra again_%=;\n"
      "over_%=: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

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
__device__ __forceinline__ void copy_keys(const uint8_t* keys, const uint8_t* values, int32_t tile, uint32_t shared,
                                          int stage) {
  using Plan = QueryPlan<T>;
  const uint32_t full = shared + Plan::full(stage);
  ptx::barrier_expect(full, 2 * T::kImage);
  const int64_t offset = static_cast<int64_t>(tile) * T::kImage;
  ptx::bulk_load(shared + Plan::keys(stage), keys + offset, T::kImage, full);
  ptx::bulk_load(shared + Plan::values(stage), values + offset, T::kImage, full);
}

template <class T>
__device__ __forceinline__ void produce(const Shape& shape, const QueryOperands& from, int32_t items, uint32_t shared,
                                        int warp, int lane) {
  using Plan = QueryPlan<T>;
  const bool centred = shape.mean_blocks_max > 0;
  const float score_scale = shape.score_scale;
  uint32_t step = 0;  // steps of all items before this one
  StageRing<T::kBlocks> block_ring;
  for (int32_t round = 0, index; (index = query_item_index(round)) < items; ++round) {
    const QueryItem item = query_item(shape, index);
    if (item.tiles == 0) continue;
    const int64_t q_block =
        static_cast<int64_t>(item.head) * shape.sequences.q_blocks + item.view.q_block0 + item.block;
    if (warp == 0) {
      producer_wait(shared + Plan::block_empty(block_ring.stage()), block_ring.parity() ^ 1);
      if (lane == 0) copy_queries<T>(from, shared, q_block, block_ring);
      __syncwarp();
      block_ring.advance();
    }
    const int64_t kv_head = shape.by_group.divide(item.head);
    const int64_t image0 = (kv_head * shape.sequences.k_blocks + item.view.k_block0) * 2;
    const auto mean_blocks = static_cast<int32_t>(numerics::query_mean_rows(item.view.q_rows) / kBlockRows);
    const int32_t mean_block = min(item.block / mean_blocks, shape.mean_blocks_max - 1);
    const float* const dots =
        from.bias +
        (static_cast<int64_t>(item.head) * shape.mean_blocks_max + mean_block) * shape.sequences.k_blocks * kBlockRows +
        static_cast<int64_t>(item.view.k_block0) * kBlockRows + lane;
    const float *const k_scales = from.k_scale + image0, *const v_scales = from.v_scale + image0;
    const uint8_t *const keys = from.keys + image0 * T::kImage, *const values = from.values + image0 * T::kImage;
    const float q_scale = from.q_scale[q_block];
    const float d_scale = from.d_scale != nullptr ? from.d_scale[q_block] : 1.0f;
    const float unit = from.d_scale != nullptr ? 1.0f / numerics::kProbabilityScale : 1.0f;  // delta: p carries 2^8
    const auto load = [&](int32_t tile) -> StageInputs {
      StageInputs x = {{0.0f, 0.0f}, k_scales[tile], v_scales[tile]};
      if (centred) x.dot[0] = dots[tile * kImageRows], x.dot[1] = dots[tile * kImageRows + 32];
      return x;
    };
    auto tile = static_cast<int32_t>((warp - step) % T::kProducerWarps);
    StageInputs next = {};
    if (tile < item.tiles) next = load(tile);
#pragma unroll 1
    for (; tile < item.tiles; tile += T::kProducerWarps) {
      const StageRing<T::kStages> ring{step + tile};
      const StageInputs now = next;
      if (tile + T::kProducerWarps < item.tiles) next = load(tile + T::kProducerWarps);
      producer_wait(shared + Plan::empty(ring.stage()), ring.parity() ^ 1);
      if (lane == 0) copy_keys<T>(keys, values, tile, shared, ring.stage());
      __syncwarp();
      const uint32_t bias = shared + Plan::bias(ring.stage()) + 16 * lane;
      if (centred) write_bias_codes({bias, bias + 16 * 32}, now.dot, q_scale, now.k_scale);
      if (lane == 0) {
        const uint32_t scalars = shared + Plan::scalars(ring.stage());
        ptx::store_shared(scalars, (q_scale * now.k_scale) * score_scale);
        ptx::store_shared(scalars + 4, d_scale * now.v_scale * unit);
      }
      ptx::async_proxy_fence();
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(shared + Plan::full(ring.stage()));
    }
    step += item.tiles;
  }
}

}  // namespace dmattn::cuda
