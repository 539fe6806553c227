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

// One lane: the bulk copies of a stage, of query tile `index` of [Hq][2 QB].
template <class T>
__device__ __forceinline__ void copy_stage(const KeyParams& p, int32_t index, uint32_t stage, uint32_t full) {
  using Plan = KeyPlan<T>;
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

// A warp: bias codes of image `image`'s 64 keys for a query tile.
__device__ __forceinline__ void write_biases(const KeyParams& p, uint32_t work, int32_t head, int32_t tile,
                                             int32_t image, float q_scale, uint32_t bias, int32_t lane) {
  // Cut off where a sequence is longer than the caller said.
  const int32_t block = min(tile / ptx::load_shared_int(work + 20), p.shape.mean_blocks_max - 1);
  const int32_t row = ptx::load_shared_int(work + 24) + head * p.shape.mean_blocks_max + block;
  const float* dots =
      p.queries.bias + lane + image * kImageRows +
      (static_cast<int64_t>(row) * p.shape.sequences.k_blocks + ptx::load_shared_int(work + 4)) * kBlockRows;
  const float near = dots[0], far = dots[32];
  const float k_scale = p.keys.k_scale[2 * ptx::load_shared_int(work) + image];
  write_bias_codes(bias + 16 * lane, near, q_scale, k_scale);
  write_bias_codes(bias + 16 * (lane + 32), far, q_scale, k_scale);
}

// One lane: the stage's factors for the keys of an image.
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

// Warps 0 ... 3: warp 2 h + i fills half of the stages for the keys of image i; that of image 0 also copies. A warp always
// owns the same stages, two that follow each other where there are four: the two tiles of a block of 128 queries share
// their bias codes, and the second one's are a copy.
template <class T>
__device__ __forceinline__ void key_produce(const KeyParams& p, uint32_t shared) {
  using Plan = KeyPlan<T>;
  // Read anew at every use: there is no register to keep it.
  const auto thread = [] { return opaque(static_cast<int32_t>(threadIdx.x)); };
  StageRing<T::kStages> ring;
  // Loop variables of the outer loops wait in shared memory: 0 the item's work, 4 the head, 8 parity of the keys' barrier.
  const uint32_t own = shared + Plan::kScratch + 16 * (threadIdx.x / 32);
  ptx::store_shared_int(own, static_cast<int32_t>(shared + Plan::kWork));
  ptx::store_shared_int(own + 8, 1);
  __syncwarp();
#pragma unroll 1
  for (;;) {
    {
      const uint32_t work = ptx::load_shared_int(own);
      if (work == shared + Plan::kWork + kMostItems * kWorkBytes || ptx::load_shared_int(work) == -2) break;
      const int32_t parity = ptx::load_shared_int(own + 8);
      __syncwarp();
      if (ptx::load_shared_int(work) < 0) {
        ptx::store_shared_int(own, static_cast<int32_t>(work + kWorkBytes));
        continue;
      }
      if (thread() == 0) copy_keys<T>(p, ptx::load_shared_int(work), shared, parity);
      __syncwarp();
      ptx::store_shared_int(own + 8, parity ^ 1);
      ptx::store_shared_int(own + 4, 0);
    }
#pragma unroll 1
    for (;;) {
#pragma unroll 1
      for (int32_t tile = ptx::load_shared_int(ptx::load_shared_int(own) + 12);
           tile < ptx::load_shared_int(ptx::load_shared_int(own) + 16); ++tile, ring.advance()) {
        if (static_cast<int32_t>(ring.step / (T::kStages / 2) % 2) != thread() / 64) continue;
        const uint32_t work = ptx::load_shared_int(own);
        const int32_t head = ptx::load_shared_int(own + 4);
        const int32_t image = thread() / 32 % 2, lane = thread() % 32;
        const uint32_t stage = shared + Plan::stage(ring.stage()), full = shared + Plan::full(ring.stage());
        const int32_t index = ptx::load_shared_int(work + 8) + 2 * head * p.shape.sequences.q_blocks + tile;
        const float q_scale = p.queries.q_scale[index / 2];
        ptx::barrier_wait_idle(shared + Plan::empty(ring.stage()), ring.parity() ^ 1);
        if (thread() % 64 == 0) copy_stage<T>(p, index, stage, full);
        __syncwarp();
        if (p.shape.mean_blocks_max > 0) {
          const uint32_t bias = stage + Plan::kBias + image * kImageRows * kBiasBytes;
          if (T::kStages == 4 && ring.step % 2 == 1 && tile % 2 == 1 && tile > ptx::load_shared_int(work + 12)) {
            copy_bias_codes(bias + 16 * lane, bias + 16 * lane - Plan::kStageBytes);
            copy_bias_codes(bias + 16 * (lane + 32), bias + 16 * (lane + 32) - Plan::kStageBytes);
          } else {
            write_biases(p, work, head, tile, image, q_scale, bias, lane);
          }
        }
        if (lane == 0)
          write_factors<T>(p, index / 2, 2 * ptx::load_shared_int(work) + image, q_scale, stage + Plan::kScalars,
                           image);
        ptx::async_proxy_fence();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(full);
      }
      const int32_t head = ptx::load_shared_int(own + 4) + 1;
      __syncwarp();
      ptx::store_shared_int(own + 4, head);
      if (head == p.chunk.group_heads) break;
    }
    const int32_t work = ptx::load_shared_int(own);
    __syncwarp();
    ptx::store_shared_int(own, work + kWorkBytes);
  }
}

}  // namespace dmattn::cuda
