// Producer warps of the key-stationary backward: bulk copies, bias codes and factors of every stage.
#pragma once

#include "cuda/collective/bias.h"
#include "cuda/collective/key_plan.h"
#include "cuda/collective/stage_ring.h"

namespace dmattn::cuda {

// What producers keep of an item. Indices of images fit 32 bits (core checks the sizes).
struct KeyWork {
  int32_t k_block;     // of [Hk][KB]
  int32_t q_tile;      // of [Hq][2 QB]: the first head's first tile
  int32_t tile, end;   // tile is counted from q_tile
  int32_t mean_tiles;  // query tiles of a block of means
};

// Query tiles that share a mean: numerics::query_mean_rows / 64 in 32 bits.
__device__ __forceinline__ int32_t mean_tiles(int32_t q_rows) {
  constexpr auto kSpan = static_cast<int32_t>(numerics::kQueryMeanSpan);
  return max(1, (q_rows + (kSpan - 1)) / kSpan) * (numerics::kQueryScaleRows / kImageRows);
}

__device__ __forceinline__ bool key_work(const KeyParams& p, int32_t item, KeyWork& out) {
  KeyItem at;
  if (!key_item(p, item, at)) return false;
  out.k_block = at.kv_head * p.shape.sequences.k_blocks + at.view.k_block0 + at.block;
  out.q_tile = (at.kv_head * p.group * p.shape.sequences.q_blocks + at.view.q_block0) * 2;
  out.tile = at.first_tile;
  out.end = at.tiles;
  out.mean_tiles = mean_tiles(at.view.q_rows);
  return true;
}

// One lane: K and V of an item, then its query tiles, head after head.
template <class T>
__device__ __forceinline__ void key_copies(const KeyParams& p, uint32_t shared) {
  using Plan = KeyPlan<T>;
  StageRing<T::kStages> ring;
  uint32_t items_parity = 1;
#pragma unroll 1
  for (int32_t item = static_cast<int32_t>(blockIdx.x); item < p.items; item += static_cast<int32_t>(gridDim.x)) {
    KeyWork at;
    if (!key_work(p, item, at)) continue;
    const int64_t image = static_cast<int64_t>(at.k_block) * 2 * T::kImage;
    ptx::barrier_wait_idle(shared + Plan::kKeysEmpty, items_parity);
    items_parity ^= 1;
    ptx::barrier_expect(shared + Plan::kKeysFull, (T::kDk ? 4 : 2) * T::kImage);
    ptx::bulk_load(shared + Plan::kKeys, p.keys.k + image, 2 * T::kImage, shared + Plan::kKeysFull);
    if constexpr (T::kDk)
      ptx::bulk_load(shared + Plan::kValues, p.keys.v + image, 2 * T::kImage, shared + Plan::kKeysFull);
#pragma unroll 1
    for (int32_t head = 0; head < p.group; ++head) {
#pragma unroll 1
      for (int32_t tile = at.tile; tile < at.end; ++tile) {
        const uint32_t stage = shared + Plan::stage(ring.stage()), full = shared + Plan::full(ring.stage());
        const int64_t source = static_cast<int64_t>(at.q_tile + tile) * T::kImage;
        const int64_t rows = static_cast<int64_t>(at.q_tile + tile) * kImageRows;
        ptx::barrier_wait_idle(shared + Plan::empty(ring.stage()), ring.parity() ^ 1);
        ptx::barrier_expect(full, Plan::kCopyBytes);
        ptx::bulk_load(stage + Plan::kQ, p.queries.q + source, T::kImage, full);
        ptx::bulk_load(stage + Plan::kShift, p.gradients.shift + rows, kImageRows * 4, full);
        if constexpr (T::kDk) {
          ptx::bulk_load(stage + Plan::kDo, p.gradients.d_o + source, T::kImage, full);
          ptx::bulk_load(stage + Plan::kQt, p.gradients.q_t + source, T::kImage, full);
          ptx::bulk_load(stage + Plan::kDelta, p.gradients.delta + rows, kImageRows * 4, full);
        }
        if constexpr (T::kDv) ptx::bulk_load(stage + Plan::kDot, p.gradients.d_o_t + source, T::kImage, full);
        ring.advance();
      }
      at.q_tile += 2 * p.shape.sequences.q_blocks;
    }
  }
}

// Two warps, `lane` 0 ... 63: bias codes of keys `lane` of both warpgroups, and the stage's factors.
template <class T>
__device__ __forceinline__ void key_biases(const KeyParams& p, uint32_t shared) {
  using Plan = KeyPlan<T>;
  const int lane = static_cast<int>(threadIdx.x) - 32;
  constexpr int kOther = kImageRows * kBiasBytes;  // from one warpgroup's image to the other's
#pragma unroll 1
  for (int s = 0; s < T::kStages; ++s)
#pragma unroll 1
    for (uint32_t image = shared + Plan::stage(s) + Plan::kBias, w = 0; w < 2; ++w, image += kOther) {
      clear_bias_tail(image, lane, 64);
      ptx::store_shared4(image + 16 * lane, {0, 0, 0, 0});
    }
  StageRing<T::kStages> ring;
  // What an item keeps constant waits in shared memory, a slot for either warp: producers have few registers.
  const auto own = [] { return opaque(static_cast<int32_t>(threadIdx.x)) - 32; };  // read anew: no register to keep it
  const uint32_t slot = shared + Plan::kWork + (lane / 32) * 32;
  if (lane % 32 == 0) ptx::store_shared_int(slot + 20, static_cast<int32_t>(blockIdx.x));
  __syncwarp();
#pragma unroll 1
  for (;;) {
    const int32_t item = ptx::load_shared_int(slot + 20);
    if (item >= p.items) break;
    {
      __syncwarp();
      ptx::store_shared_int(slot + 20, item + static_cast<int32_t>(gridDim.x));  // all lanes the same
      KeyItem at;
      const bool any = key_item(p, item, at);
      ptx::store_shared_int(slot + 4, at.first_tile);
      ptx::store_shared_int(slot + 8, at.tiles);
      ptx::store_shared_int(slot + 12, mean_tiles(at.view.q_rows));
      ptx::store_shared_int(slot, at.kv_head * p.shape.sequences.k_blocks + at.view.k_block0 + at.block);
      ptx::store_shared_int(slot + 16, (at.kv_head * p.group * p.shape.sequences.q_blocks + at.view.q_block0) * 2);
      __syncwarp();
      if (!any) continue;
    }
#pragma unroll 1
    for (int32_t head = 0; head < p.group; ++head) {
#pragma unroll 1
      for (int32_t tile = ptx::load_shared_int(slot + 4); tile < ptx::load_shared_int(slot + 8); ++tile) {
        const uint32_t stage = shared + Plan::stage(ring.stage());
        const uint32_t bias = stage + Plan::kBias + 16 * own();
        ptx::barrier_wait_idle(shared + Plan::empty(ring.stage()), ring.parity() ^ 1);
        if (p.shape.mean_blocks_max > 0) {
          if (tile % 2 == 0 || tile == ptx::load_shared_int(slot + 4)) {
            const int32_t q_tile = ptx::load_shared_int(slot + 16) + 2 * head * p.shape.sequences.q_blocks;
            const float q_scale = p.queries.q_scale[(q_tile + tile) / 2];
            const int32_t mean_row = q_tile / 2 / opaque(p.shape.sequences.q_blocks) * p.shape.mean_blocks_max;
            const int32_t k_block = ptx::load_shared_int(slot);
            const float* dots =
                p.queries.bias + own() +
                (static_cast<int64_t>(mean_row + tile / ptx::load_shared_int(slot + 12)) * p.shape.sequences.k_blocks +
                 k_block % opaque(p.shape.sequences.k_blocks)) *
                    kBlockRows;
            write_bias_codes(bias, dots[0], q_scale, p.keys.k_scale[2 * k_block]);
            write_bias_codes(bias + kOther, dots[kImageRows], q_scale, p.keys.k_scale[2 * k_block + 1]);
          } else {  // both tiles of a block of 128 share their codes
            const uint32_t before =
                ring.stage() == 0 ? bias + (T::kStages - 1) * Plan::kStageBytes : bias - Plan::kStageBytes;
            copy_bias_codes(bias, before);
            copy_bias_codes(bias + kOther, before + kOther);
          }
        }
        if (own() < 2) {
          const int32_t q_block = (ptx::load_shared_int(slot + 16) + tile) / 2 + head * p.shape.sequences.q_blocks;
          const int32_t image = 2 * ptx::load_shared_int(slot) + own();
          const uint32_t scalars = stage + Plan::kScalars + 4 * own();
          // A zero factor would turn a mask of -infinity into NaN; the scores of a zero block are zero anyway.
          const float score = (p.queries.q_scale[q_block] * p.keys.k_scale[image]) * p.shape.score_scale;
          ptx::store_shared(scalars, score == 0.0f ? 0x1p-126f : score);
          if constexpr (T::kDk) ptx::store_shared(scalars + 8, p.gradients.d_scale[q_block] * p.keys.v_scale[image]);
          ptx::store_shared(scalars + 16, (own() ? p.gradients.q_scale : p.gradients.dv_scale)[q_block]);
        }
        ptx::async_proxy_fence();
        __syncwarp();
        if (own() % 32 == 0) ptx::barrier_arrive(shared + Plan::full(ring.stage()));
        ring.advance();
      }
    }
  }
}

}  // namespace dmattn::cuda
