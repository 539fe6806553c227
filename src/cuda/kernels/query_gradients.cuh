// dQ from the codes of dS: a product per 64 x 64 tile, promoted to FP32. docs/numerics.md, section 4.
//
// A CTA owns 128 queries of a head, two consumer warpgroups 64 each, and walks over the chunk's key tiles that they see,
// two at a time, in ascending order:
//     T = dS . K     A: dS codes [64 queries x 64 keys] through ldmatrix, B: transposed image of K codes (rho order)
//     dQ = fma(T, ds_scale k_scale, dQ)
// T starts from zero for every tile. Where a chunk holds a part of the keys, dQ continues from the FP32 sums of the chunk
// before it, in the order of keys: no chunking changes a bit.
//
// The kernel reads every byte of dS once and is bound by memory: the stages keep about 100 KB in flight.
// Roles: warpgroup 0: one lane copies; warpgroups 1 and 2 consume. Barriers: full[stage] (copies), empty[stage] (8
// consumer warps).
#pragma once

#include "cuda/collective/key_plan.h"
#include "cuda/collective/stage_ring.h"
#include "cuda/ptx/wgmma.h"
#include "numerics/bf16.h"

namespace dmattn::cuda {

template <int kHeadDim>
struct DqTraits {
  static constexpr int D = kHeadDim;
  static constexpr int kImage = kImageRows * D, kDsTile = kImageRows * kImageRows;
  static constexpr int kSlice = D < 128 ? D : 128, kSlices = D / kSlice;
  static constexpr int kStages = D == 64 ? 8 : 4;
  static constexpr int kStageBytes = 4 * kDsTile + 2 * kImage;  // [warpgroup][2 tiles] dS, then two K images
  static constexpr int kBarriers = kStages * kStageBytes, kBytes = kBarriers + 16 * kStages;
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  static constexpr int full(int s) { return kBarriers + 8 * s; }
  static constexpr int empty(int s) { return kBarriers + 8 * (kStages + s); }
};

struct DqParams {
  Shape shape;
  KeyCodes keys;
  DsChunk chunk;
  DsIndex index;
  QueryGradients output;
  int32_t items, item_heads, group;
};

// 128 queries of one head.
struct DqItem {
  SequenceView view;
  int32_t sequence, head, block;
  int32_t end[2];  // either warpgroup's key tiles: [chunk.tile_first, end)
  int64_t ds[2];   // index in the chunk of their first
};

// False for an item without rows. The last queries see the most keys and come first.
__device__ __forceinline__ bool dq_item(const DqParams& p, int32_t item, DqItem& out) {
  const int32_t heads = opaque(p.item_heads), batch = opaque(p.shape.sequences.batch);
  const int32_t rank = item / heads, rest = item - rank * heads, head = rest / batch;
  out.sequence = rest - head * batch;
  out.head = p.chunk.head_first + head;
  out.view = sequence_view(p.shape.sequences, out.sequence);
  out.block = (out.view.q_rows + kBlockRows - 1) / kBlockRows - 1 - rank;
  if (out.block < 0) return false;
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const int32_t tile = 2 * out.block + w;
    const int64_t seen =
        tile * kImageRows < out.view.q_rows ? visible_tiles(tile, out.view.q_rows, out.view.k_rows, p.shape.causal) : 0;
    out.end[w] = max(p.chunk.tile_first, min(static_cast<int32_t>(seen), p.chunk.tile_end));
    out.ds[w] = head * p.chunk.tiles_per_head + p.index.row(out.sequence, out.view.q_block0, tile);
  }
  return true;
}

template <class T>
__device__ __forceinline__ void dq_copies(const DqParams& p, uint32_t shared) {
  StageRing<T::kStages> ring;
#pragma unroll 1
  for (int32_t number = static_cast<int32_t>(blockIdx.x); number < p.items; number += static_cast<int32_t>(gridDim.x)) {
    DqItem item;
    if (!dq_item(p, number, item)) continue;
    const int64_t image =
        (static_cast<int64_t>(item.head / p.group) * p.shape.sequences.k_blocks + item.view.k_block0) * 2;
#pragma unroll 1
    for (int32_t tile = p.chunk.tile_first; tile < max(item.end[0], item.end[1]); tile += 2) {
      const uint32_t stage = shared + ring.stage() * T::kStageBytes, full = shared + T::full(ring.stage());
      const int32_t count[2] = {min(2, max(0, item.end[0] - tile)), min(2, max(0, item.end[1] - tile))};
      const int32_t keys = max(count[0], count[1]);
      ptx::barrier_wait(shared + T::empty(ring.stage()), ring.parity() ^ 1);
      ptx::barrier_expect(full, (count[0] + count[1]) * T::kDsTile + keys * T::kImage);
#pragma unroll
      for (int w = 0; w < 2; ++w)
        if (count[w] > 0)
          ptx::bulk_load(stage + w * 2 * T::kDsTile,
                         p.chunk.codes + (item.ds[w] + tile - p.chunk.tile_first) * T::kDsTile, count[w] * T::kDsTile,
                         full);
      ptx::bulk_load(stage + 4 * T::kDsTile, p.keys.k_t + (image + tile) * T::kImage, keys * T::kImage, full);
      ring.advance();
    }
  }
}

template <class T>
struct DqConsumer {
  static constexpr int N = T::kSlice / 2;
  const DqParams& p;
  const uint32_t shared;
  const int group, thread, warp, lane;
  float sum[T::kSlices][N];

  __device__ __forceinline__ void tile(uint32_t ds, uint32_t keys, float factor) {
    uint32_t left[8];
    const uint32_t row = ds + 16 * (16 * warp + lane % 16) + (lane / 16) * 16 * kImageRows;
    ptx::load_matrices(row, left);
    ptx::load_matrices(row + 2 * 16 * kImageRows, left + 4);
    const uint64_t b = image_descriptor(keys, T::D);
#pragma unroll
    for (int slice = 0; slice < T::kSlices; ++slice) {
      float product[N];
      ptx::mma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k)
        ptx::mma(product, left + 4 * k, b + slice * image_rows(T::kSlice) + k * image_step(T::D), k > 0);
      ptx::mma_commit();
      ptx::mma_wait<0>();
      ptx::mma_landed(product);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[slice][i] = fmaf(product[i], factor, sum[slice][i]);
    }
  }

  __device__ __forceinline__ float* partial(const DqItem& item) const {
    const int64_t image =
        (static_cast<int64_t>(item.head) * p.shape.sequences.q_blocks + item.view.q_block0 + item.block) * 2 + group;
    return p.output.partial + image * T::kImage + 4 * thread;
  }

  __device__ __forceinline__ void begin(const DqItem& item) {
#pragma unroll
    for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        float4 x = {0, 0, 0, 0};
        if (!p.output.first) x = *reinterpret_cast<const float4*>(partial(item) + 128 * (slice * N + i));
        sum[slice][i] = x.x, sum[slice][i + 1] = x.y, sum[slice][i + 2] = x.z, sum[slice][i + 3] = x.w;
      }
  }

  __device__ __forceinline__ void finish(const DqItem& item) const {
    const int32_t row = item.block * kBlockRows + group * kImageRows + 16 * warp + lane / 4;
#pragma unroll
    for (int slice = 0; slice < T::kSlices; ++slice)
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float* x = &sum[slice][i];
        if (!p.output.last) {
          *reinterpret_cast<float4*>(partial(item) + 128 * (slice * N + i)) = {x[0], x[1], x[2], x[3]};
          continue;
        }
        const int channel = slice * T::kSlice + 2 * i + 2 * (lane % 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (row + 8 * half >= item.view.q_rows) continue;
          uint16_t* out =
              row_pointer(p.output.dq, p.shape.sequences, item.sequence, item.view.q_first, row + 8 * half, item.head) +
              channel;
          const uint16_t a = numerics::bf16_encode(x[2 * half] * p.shape.softmax_scale);
          const uint16_t b = numerics::bf16_encode(x[2 * half + 1] * p.shape.softmax_scale);
          if (p.output.dq.aligned) {
            *reinterpret_cast<uint32_t*>(out) = a | static_cast<uint32_t>(b) << 16;
          } else {
            out[0] = a;
            out[1] = b;
          }
        }
      }
  }

  __device__ __forceinline__ void run() {
    StageRing<T::kStages> ring;
#pragma unroll 1
    for (int32_t number = static_cast<int32_t>(blockIdx.x); number < p.items;
         number += static_cast<int32_t>(gridDim.x)) {
      DqItem item;
      if (!dq_item(p, number, item)) continue;
      const int32_t end = group ? item.end[1] : item.end[0];
      const float* ds_scale = p.chunk.scale + (group ? item.ds[1] : item.ds[0]) - p.chunk.tile_first;
      const float* k_scale =
          p.keys.k_scale +
          (static_cast<int64_t>(item.head / p.group) * p.shape.sequences.k_blocks + item.view.k_block0) * 2;
      begin(item);
      int32_t j = p.chunk.tile_first;
      float factor[2] = {0, 0};
#pragma unroll
      for (int t = 0; t < 2; ++t)
        if (j + t < end) factor[t] = ds_scale[j + t] * k_scale[j + t];
#pragma unroll 1
      for (; j < max(item.end[0], item.end[1]); j += 2) {
        float next[2] = {0, 0};  // the following step's, on their way during this one
#pragma unroll
        for (int t = 0; t < 2; ++t)
          if (j + 2 + t < end) next[t] = ds_scale[j + 2 + t] * k_scale[j + 2 + t];
        const uint32_t stage = shared + ring.stage() * T::kStageBytes;
        ptx::barrier_wait(shared + T::full(ring.stage()), ring.parity());
#pragma unroll
        for (int t = 0; t < 2; ++t)
          if (j + t < end)
            tile(stage + (2 * group + t) * T::kDsTile, stage + 4 * T::kDsTile + t * T::kImage, factor[t]);
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared + T::empty(ring.stage()));
        ring.advance();
        factor[0] = next[0], factor[1] = next[1];
      }
      finish(item);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) query_gradients_kernel(const __grid_constant__ DqParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < T::kStages; ++s) {
      ptx::barrier_init(shared + T::full(s), 1);
      ptx::barrier_init(shared + T::empty(s), T::kConsumerWarps);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::registers_lower<40>();
    if (thread == 0) dq_copies<T>(p, shared);
  } else {
    ptx::registers_raise<232>();
    DqConsumer<T> consumer{p, shared, warpgroup - 1, thread, __shfl_sync(0xffffffffu, thread / 32, 0), thread % 32};
    consumer.run();
  }
}

}  // namespace dmattn::cuda
