// Producer warps of the key-stationary backward: bulk copies, bias codes and factors of every stage.
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
    const int64_t item = static_cast<int64_t>(n) * gridDim.x + blockIdx.x;
    const uint32_t entry = work + kWorkBytes * n;
    KeyItem at;
    if (item >= p.items) {
      ptx::store_shared_int(entry, -2);
      break;
    }
    if (!key_item(p, static_cast<int32_t>(item), at)) {
      ptx::store_shared_int(entry, -1);
      continue;
    }
    const int32_t kv_block = at.view.k_block0 + at.block, head = at.kv_head * p.group;
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

// One lane: K and V of an item, then its query tiles, head after head.
template <class T>
__device__ __forceinline__ void key_copies(const KeyParams& p, uint32_t shared) {
  using Plan = KeyPlan<T>;
  StageRing<T::kStages> ring;
  uint32_t items_parity = 1;
#pragma unroll 1
  for (uint32_t work = shared + Plan::kWork; work < shared + Plan::kWork + kMostItems * kWorkBytes;
       work += kWorkBytes) {
    const int32_t k_block = ptx::load_shared_int(work);
    if (k_block == -2) break;
    if (k_block < 0) continue;
    const int64_t image = static_cast<int64_t>(k_block) * 2 * T::kImage;
    ptx::barrier_wait_idle(shared + Plan::kKeysEmpty, items_parity);
    items_parity ^= 1;
    ptx::barrier_expect(shared + Plan::kKeysFull, (T::kDk ? 4 : 2) * T::kImage);
    ptx::bulk_load(shared + Plan::kKeys, p.keys.k + image, 2 * T::kImage, shared + Plan::kKeysFull);
    if constexpr (T::kDk)
      ptx::bulk_load(shared + Plan::kValues, p.keys.v + image, 2 * T::kImage, shared + Plan::kKeysFull);
#pragma unroll 1
    for (int32_t head = 0; head < p.group; ++head) {
#pragma unroll 1
      for (int32_t tile = ptx::load_shared_int(work + 12); tile < ptx::load_shared_int(work + 16); ++tile) {
        const uint32_t stage = shared + Plan::stage(ring.stage()), full = shared + Plan::full(ring.stage());
        const int32_t index = ptx::load_shared_int(work + 8) + 2 * head * p.shape.sequences.q_blocks + tile;
        ptx::barrier_wait_idle(shared + Plan::empty(ring.stage()), ring.parity() ^ 1);
        ptx::barrier_expect(full, Plan::kCopyBytes);
        const int64_t source = static_cast<int64_t>(index) * T::kImage;
        ptx::bulk_load(stage + Plan::kQ, p.queries.q + source, T::kImage, full);
        if constexpr (T::kDk) {
          ptx::bulk_load(stage + Plan::kDo, p.gradients.d_o + source, T::kImage, full);
          ptx::bulk_load(stage + Plan::kQt, p.gradients.q_t + source, T::kImage, full);
        }
        if constexpr (T::kDv) ptx::bulk_load(stage + Plan::kDot, p.gradients.d_o_t + source, T::kImage, full);
        const int64_t rows = static_cast<int64_t>(index) * kImageRows;
        ptx::bulk_load(stage + Plan::kShift, p.gradients.shift + rows, kImageRows * 4, full);
        if constexpr (T::kDk) ptx::bulk_load(stage + Plan::kDelta, p.gradients.delta + rows, kImageRows * 4, full);
        ring.advance();
      }
    }
  }
}

// Bias codes of both warpgroups' keys for the tile in `bias`, an address of this lane's key.
__device__ __forceinline__ void write_biases(const KeyParams& p, uint32_t work, int32_t head, int32_t tile,
                                             uint32_t bias, int32_t lane) {
  constexpr int kOther = kImageRows * kBiasBytes;  // from one warpgroup's image to the other's
  const int32_t row =
      ptx::load_shared_int(work + 24) + head * p.shape.mean_blocks_max + tile / ptx::load_shared_int(work + 20);
  const float* dots =
      p.queries.bias + lane +
      (static_cast<int64_t>(row) * p.shape.sequences.k_blocks + ptx::load_shared_int(work + 4)) * kBlockRows;
  const float near = dots[0], far = dots[kImageRows];
  const float q_scale =
      p.queries.q_scale[(ptx::load_shared_int(work + 8) + tile) / 2 + head * p.shape.sequences.q_blocks];
  write_bias_codes(bias, near, q_scale, p.keys.k_scale[2 * ptx::load_shared_int(work)]);
  write_bias_codes(bias + kOther, far, q_scale, p.keys.k_scale[2 * ptx::load_shared_int(work) + 1]);
}

// Two lanes: the stage's factors for warpgroup `lane`.
template <class T>
__device__ __forceinline__ void write_factors(const KeyParams& p, uint32_t work, int32_t head, int32_t tile,
                                              uint32_t scalars, int32_t lane) {
  const int32_t q_block = (ptx::load_shared_int(work + 8) + tile) / 2 + head * p.shape.sequences.q_blocks;
  const int32_t image = 2 * ptx::load_shared_int(work) + lane;
  // A zero factor would turn a mask of -infinity into NaN; the scores of a zero block are zero anyway.
  const float score = (p.queries.q_scale[q_block] * p.keys.k_scale[image]) * p.shape.score_scale;
  ptx::store_shared(scalars + 4 * lane, score == 0.0f ? 0x1p-126f : score);
  if constexpr (T::kDk) ptx::store_shared(scalars + 8 + 4 * lane, p.gradients.d_scale[q_block] * p.keys.v_scale[image]);
  ptx::store_shared(scalars + 16 + 4 * lane, (lane ? p.gradients.q_scale : p.gradients.dv_scale)[q_block]);
}

// Warps 1 and 2, lanes 0 ... 63 of them: bias codes of keys `lane` of both warpgroups, and the stage's factors.
template <class T>
__device__ __forceinline__ void key_biases(const KeyParams& p, uint32_t shared) {
  using Plan = KeyPlan<T>;
  constexpr int kOther = kImageRows * kBiasBytes;
  const auto lane = [] { return opaque(static_cast<int32_t>(threadIdx.x)) - 32; };  // read anew: no register to keep it
#pragma unroll 1
  for (int s = 0; s < T::kStages; ++s)
#pragma unroll 1
    for (uint32_t image = shared + Plan::stage(s) + Plan::kBias, w = 0; w < 2; ++w, image += kOther) {
      clear_bias_tail(image, lane(), 64);
      ptx::store_shared4(image + 16 * lane(), {0, 0, 0, 0});
    }
  StageRing<T::kStages> ring;
#pragma unroll 1
  for (uint32_t work = shared + Plan::kWork; work < shared + Plan::kWork + kMostItems * kWorkBytes;
       work += kWorkBytes) {
    if (ptx::load_shared_int(work) == -2) break;
    if (ptx::load_shared_int(work) < 0) continue;
#pragma unroll 1
    for (int32_t head = 0; head < p.group; ++head) {
#pragma unroll 1
      for (int32_t tile = ptx::load_shared_int(work + 12); tile < ptx::load_shared_int(work + 16); ++tile) {
        const uint32_t stage = shared + Plan::stage(ring.stage());
        ptx::barrier_wait_idle(shared + Plan::empty(ring.stage()), ring.parity() ^ 1);
        if (p.shape.mean_blocks_max > 0) {
          const uint32_t bias = stage + Plan::kBias + 16 * lane();
          if (tile % 2 == 0 || tile == ptx::load_shared_int(work + 12)) {
            write_biases(p, work, head, tile, bias, lane());
          } else {  // both tiles of a block of 128 share their codes
            const uint32_t before =
                ring.stage() == 0 ? bias + (T::kStages - 1) * Plan::kStageBytes : bias - Plan::kStageBytes;
            copy_bias_codes(bias, before);
            copy_bias_codes(bias + kOther, before + kOther);
          }
        }
        if (lane() < 2) write_factors<T>(p, work, head, tile, stage + Plan::kScalars, lane());
        ptx::async_proxy_fence();
        __syncwarp();
        if (lane() % 32 == 0) ptx::barrier_arrive(shared + Plan::full(ring.stage()));
        ring.advance();
      }
    }
  }
}

}  // namespace dmattn::cuda
