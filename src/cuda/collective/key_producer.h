// Producer warps of the key-stationary backward: bulk copies of stages; bias codes and factors of blocks.
#pragma once

#include "cuda/collective/bias.h"
#include "cuda/collective/key_plan.h"
#include "cuda/collective/stage_ring.h"

namespace dmattn::cuda {

// Producers have 24 registers: what they need of the CTA's items is worked out beforehand, by all threads, and waits in
// shared memory. Per item, 32 bytes: 0 block of [Hk][KB] (-1: nothing to do, -2: no more items), 4 block of [KB] alone,
// 8 first of [Hq][2 QB] query tiles, of the group's first head, 12 first tile and 16 end of a head's, counted from
// that, 20 query tiles that share a mean, 24 first row of [Hq][mean blocks].
__device__ __forceinline__ void prepare_work(const KeyParams& p, uint32_t work) {
  for (int n = static_cast<int>(threadIdx.x); n < kMostItems; n += static_cast<int>(blockDim.x)) {
    const int64_t item = key_item_number(n);
    const uint32_t entry = work + kWorkBytes * n;
    KeyItem at;
    if (n * static_cast<int64_t>(gridDim.x) >= p.items) {
      ptx::store_shared_int(entry, -2);
      break;
    }
    if (item >= p.items || !key_item(p, static_cast<int32_t>(item), at)) {
      ptx::store_shared_int(entry, -1);
      continue;
    }
    const int32_t kv_block = at.view.k_block0 + at.block, head = at.kv_head * p.group + p.chunk.group_first;
    const auto mean_rows = static_cast<int32_t>(numerics::query_mean_rows(at.view.q_rows));
    ptx::store_shared_int(entry, at.kv_head * p.shape.sequences.k_blocks + kv_block);
    ptx::store_shared_int(entry + 4, kv_block);
    ptx::store_shared_int(entry + 8, (head * p.shape.sequences.q_blocks + at.view.q_block0) * 2);
    ptx::store_shared_int(entry + 12, at.first_tile);
    ptx::store_shared_int(entry + 16, at.tiles);
    ptx::store_shared_int(entry + 20, mean_rows / kImageRows);
    ptx::store_shared_int(entry + 24, head * p.shape.mean_blocks_max);
  }
}

// body(entry) for the items with something to do, in turn.
template <class Body>
__device__ __forceinline__ void each_work(uint32_t first, Body body) {
#pragma unroll 1
  for (uint32_t work = first; work != first + kMostItems * kWorkBytes; work += kWorkBytes) {
    const int32_t k_block = ptx::load_shared_int(work);
    if (k_block == -2) break;
    if (k_block >= 0) body(work);
  }
}

// One lane: the bulk copies of a stage, query tiles by their number in [Hq][2 QB]; -1 for none.
template <class T>
__device__ __forceinline__ void copy_stage(const KeyParams& p, int32_t next, int32_t tile, uint32_t stage,
                                           uint32_t full) {
  using Plan = KeyPlan<T>;
  constexpr int kTileBytes = Plan::kStageBytes - Plan::kNextBytes;
  ptx::barrier_expect(full, (next < 0 ? 0 : Plan::kNextBytes) + (tile < 0 ? 0 : kTileBytes));
  if (next >= 0) {
    const int64_t from = static_cast<int64_t>(next) * T::kImage;
    ptx::bulk_load(stage + Plan::kQ, p.queries.q + from, T::kImage, full);
    if constexpr (T::kDk) ptx::bulk_load(stage + Plan::kDo, p.gradients.d_o + from, T::kImage, full);
  }
  if (tile >= 0) {
    const int64_t from = static_cast<int64_t>(tile) * T::kImage;
    if constexpr (T::kDk) ptx::bulk_load(stage + Plan::kQt, p.gradients.q_t + from, T::kImage, full);
    if constexpr (T::kDv) ptx::bulk_load(stage + Plan::kDot, p.gradients.d_o_t + from, T::kImage, full);
  }
}

// One lane: K and V of an item, once the consumers have left the last one's.
template <class T>
__device__ __forceinline__ void copy_keys(const KeyParams& p, int32_t k_block, uint32_t shared, uint32_t parity) {
  using Plan = KeyPlan<T>;
  const int64_t image = static_cast<int64_t>(k_block) * 2 * T::kImage;
  ptx::barrier_wait_idle(shared + Plan::kKeysEmpty, parity);
  ptx::barrier_expect(shared + Plan::kKeysFull, (T::kDk ? 4 : 2) * T::kImage);
  ptx::bulk_load(shared + Plan::kKeys, p.keys.k + image, 2 * T::kImage, shared + Plan::kKeysFull);
  if constexpr (T::kDk)
    ptx::bulk_load(shared + Plan::kValues, p.keys.v + image, 2 * T::kImage, shared + Plan::kKeysFull);
}

// A lane for each image of keys: the factors of a block of queries.
template <class T>
__device__ __forceinline__ void write_factors(const KeyParams& p, int32_t q_block, int32_t k_image, float q_scale,
                                              uint32_t scalars, int32_t image) {
  // A zero factor would turn a mask of -infinity into NaN; the scores of a zero block are zero anyway.
  const float score = (q_scale * p.keys.k_scale[k_image]) * p.shape.score_scale;
  ptx::store_shared(scalars + 4 * image, score == 0.0f ? 0x1p-126f : score);
  if constexpr (T::kDk)
    ptx::store_shared(scalars + 8 + 4 * image, p.gradients.d_scale[q_block] * p.keys.v_scale[k_image]);
  ptx::store_shared(scalars + 16 + 4 * image, (image ? p.gradients.q_scale : p.gradients.dv_scale)[q_block]);
}

// One lane: all bulk copies. K and V of an item are due where its first stages are full, so that these fill while the
// consumers write out the item before it.
template <class T>
__device__ __forceinline__ void key_copies(const KeyParams& p, uint32_t shared) {
  using Plan = KeyPlan<T>;
  StageRing<T::kStages> ring;
  uint32_t parity = 1;
  each_work(shared + Plan::kWork, [&](uint32_t work) {
    const int32_t first = ptx::load_shared_int(work + 12), end = ptx::load_shared_int(work + 16);
    const uint32_t due = ring.step + T::kStages;
    // Tiles of the item's heads, one after the other: a stage has a tile and the one before it.
    int32_t last = -1;
#pragma unroll 1
    for (int32_t head = 0, tile = first; first < end;) {
      const bool none = head == p.chunk.group_heads;
      const int32_t next = none ? -1 : ptx::load_shared_int(work + 8) + 2 * head * p.shape.sequences.q_blocks + tile;
      if (ring.step == due) copy_keys<T>(p, ptx::load_shared_int(work), shared, parity);
      ptx::barrier_wait_idle(shared + Plan::empty(ring.stage()), ring.parity() ^ 1);
      copy_stage<T>(p, next, last, shared + Plan::stage(ring.stage()), shared + Plan::full(ring.stage()));
      ring.advance();
      if (none) break;
      last = next;
      if (++tile == end) tile = first, ++head;
    }
    if (static_cast<int32_t>(ring.step - due) <= 0) copy_keys<T>(p, ptx::load_shared_int(work), shared, parity);
    parity ^= 1;
  });
}

// Warps 1, 2 and 3 take the blocks of 128 queries in turn: bias codes of all keys, the factors of their products, and
// by bulk copies 8 - c and delta'. A warp's blocks are nearer to each other than the ring is long, so that a parity
// tells their phases apart.
constexpr int kBlockWarps = 3;
static_assert(kBlockWarps < kBlocks);

template <class T>
__device__ __forceinline__ void key_blocks(const KeyParams& p, uint32_t shared, uint32_t warp) {
  using Plan = KeyPlan<T>;
  StageRing<kBlocks> ring;
  each_work(shared + Plan::kWork, [&](uint32_t work) {
    if (ptx::load_shared_int(work + 12) >= ptx::load_shared_int(work + 16)) return;
#pragma unroll 1
    for (int32_t head = 0; head < p.chunk.group_heads; ++head) {
#pragma unroll 1
      for (int32_t block = ptx::load_shared_int(work + 12) / 2; block < (ptx::load_shared_int(work + 16) + 1) / 2;
           ++block, ring.advance()) {
        if (ring.step % kBlockWarps != warp) continue;
        const uint32_t lane = opaque(static_cast<int32_t>(threadIdx.x)) % 32;
        const uint32_t slot = shared + Plan::block(ring.stage());
        const int32_t q_block = ptx::load_shared_int(work + 8) / 2 + head * p.shape.sequences.q_blocks + block;
        const float q_scale = p.queries.q_scale[q_block];
        const auto enter = [&] {
          const uint32_t full = shared + Plan::block_full(ring.stage());
          ptx::barrier_wait_idle(shared + Plan::block_empty(ring.stage()), ring.parity() ^ 1);
          if (lane == 0) {
            ptx::barrier_expect(full, (T::kDk ? 2 : 1) * kBlockRows * 4);
            const int64_t rows = static_cast<int64_t>(q_block) * kBlockRows;
            ptx::bulk_load(slot + Plan::kShift, p.gradients.shift + rows, kBlockRows * 4, full);
            if constexpr (T::kDk) ptx::bulk_load(slot + Plan::kDelta, p.gradients.delta + rows, kBlockRows * 4, full);
          }
          __syncwarp();
        };
        if (p.shape.mean_blocks_max > 0) {
          // Cut off where a sequence is longer than the caller said.
          const int32_t mean = min(2 * block / ptx::load_shared_int(work + 20), p.shape.mean_blocks_max - 1);
          const int32_t row = ptx::load_shared_int(work + 24) + head * p.shape.mean_blocks_max + mean;
          const float* dots =
              p.queries.bias + lane +
              (static_cast<int64_t>(row) * p.shape.sequences.k_blocks + ptx::load_shared_int(work + 4)) * kBlockRows;
          float dot[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) dot[i] = dots[32 * i];
          enter();  // behind the loads
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t codes = slot + i * kImageRows * kBiasBytes + 16 * lane;
            write_bias_codes({codes, codes + 16 * 32}, {dot[2 * i], dot[2 * i + 1]}, q_scale,
                             p.keys.k_scale[2 * ptx::load_shared_int(work) + i]);
          }
        } else {
          enter();
        }
        if (lane < 2)
          write_factors<T>(p, q_block, 2 * ptx::load_shared_int(work) + static_cast<int32_t>(lane), q_scale,
                           slot + Plan::kScalars, static_cast<int32_t>(lane));
        ptx::async_proxy_fence();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared + Plan::block_full(ring.stage()));
      }
    }
  });
}

template <class T>
__device__ __forceinline__ void key_produce(const KeyParams& p, uint32_t shared) {
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp > 0)
    key_blocks<T>(p, shared, warp - 1);
  else if (threadIdx.x == 0)
    key_copies<T>(p, shared);
}

}  // namespace dmattn::cuda
