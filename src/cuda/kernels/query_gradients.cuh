// dQ from the codes of dS: a product per 64 x 64 tile, promoted to FP32. docs/numerics.md, section 4.
//
// A CTA owns 128 queries of a head, two consumer warpgroups 64 each, and walks over the chunk's key tiles that they
// see, two at a time, in ascending order:
//     T = dS . K     A: dS codes [64 queries x 64 keys] through ldmatrix, which turns them; rows in the order of
//                    ds_tile_query, warp w has the matrices t = w. B: transposed image of K codes (rho order)
//     dQ = fma(T, ds_scale k_scale, dQ)
// T starts from zero for every tile. Where a chunk holds a part of the keys, dQ continues from the FP32 sums of the
// chunk before it, in the order of keys: no chunking changes a bit.
//
// The kernel reads every byte of dS once and should be bound by memory: the stages keep up to 192 KB in flight.
// Roles: warpgroup 0: a lane copies, four lanes of the next warp make factors; warpgroups 1 and 2 consume. Barriers:
// full[stage] (copies and factors), empty[stage] (8 consumer warps).
#pragma once

#include "cuda/collective/key_plan.h"
#include "cuda/collective/row_stores.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/wgmma.h"

namespace dmattn::cuda {

template <int kHeadDim>
struct DqTraits {
  static constexpr int D = kHeadDim;
  static constexpr int kImage = kImageRows * D, kDsTile = kDsTileBytes;
  static constexpr int kSlice = 64;        // channels of a product; two products take turns
  static constexpr bool kPairs = D < 256;  // both tiles of a stage in one go: registers for two tiles' codes
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kStageBytes = 4 * kDsTile + 2 * kImage;  // [warpgroup][2 tiles] dS, then two K images
  static constexpr int kStages = 192 * 1024 / kStageBytes;
  static constexpr int kFactors = kStages * kStageBytes;  // ds_scale k_scale of a stage's [warpgroup][2 tiles]
  static constexpr int kBarriers = kFactors + 16 * kStages, kBytes = kBarriers + 16 * kStages;
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  static_assert(kProducerRegisters * 128 + kConsumerRegisters * 256 <= 168 * kThreads);
  static constexpr int full(int s) { return kBarriers + 8 * s; }
  static constexpr int empty(int s) { return kBarriers + 8 * (kStages + s); }
};

// Which stage is next and its parity, for any number of stages.
template <int kStages>
struct DqRing {
  int32_t stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

struct DqParams {
  Shape shape;
  KeyCodes keys;
  DsChunk chunk;
  DsIndex index;
  QueryGradients output;
  int32_t items;
  Divisor by_item_heads, by_batch, by_group_heads;  // heads of the chunk, times batch; batch; the chunk's of a group
};

// 128 queries of one head.
struct DqItem {
  SequenceView view;
  int32_t sequence, kv_head, head, block;
  int32_t end[2];  // either warpgroup's key tiles: [chunk.tile_first, end)
  int64_t ds[2];   // index in the chunk of their first
};

// False for an item without rows. The last queries see the most keys and come first.
__device__ __forceinline__ bool dq_item(const DqParams& p, int32_t item, DqItem& out) {
  const int32_t rank = p.by_item_heads.divide(item), rest = item - rank * p.by_item_heads.value;
  const int32_t head = p.by_batch.divide(rest), kv_head = p.by_group_heads.divide(head);
  out.sequence = rest - head * p.by_batch.value;
  out.kv_head = p.chunk.kv_first + kv_head;
  out.head = out.kv_head * p.shape.by_group.value + p.chunk.group_first + head - kv_head * p.by_group_heads.value;
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

// Item of this CTA in a round. Items get shorter with their number: every other round goes backwards.
__device__ __forceinline__ int32_t dq_number(int32_t round) {
  const auto grid = static_cast<int32_t>(gridDim.x), cta = static_cast<int32_t>(blockIdx.x);
  return round * grid + (round % 2 == 0 ? cta : grid - 1 - cta);
}

// A bulk copy of bytes that nobody reads again: they leave the codes of K in the L2.
__device__ __forceinline__ void load_once(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

template <class T>
__device__ __forceinline__ void dq_copies(const DqParams& p, uint32_t shared) {
  const uint64_t once = ptx::evict_first();
  DqRing<T::kStages> ring;
#pragma unroll 1
  for (int32_t round = 0, number; (number = dq_number(round)) < p.items; ++round) {
    DqItem item;
    if (!dq_item(p, number, item)) continue;
    const int32_t first = p.chunk.tile_first;
    const int32_t tiles[2] = {item.end[0] - first, item.end[1] - first}, most = max(tiles[0], tiles[1]);
    const int64_t image =
        (static_cast<int64_t>(item.kv_head) * p.shape.sequences.k_blocks + item.view.k_block0) * 2;
    const uint8_t* keys = p.keys.k_t + (image + first) * T::kImage;
    const uint8_t* ds[2] = {p.chunk.codes + item.ds[0] * T::kDsTile, p.chunk.codes + item.ds[1] * T::kDsTile};
#pragma unroll 1
    for (int32_t i = 0; i < most; i += 2) {
      const uint32_t stage = shared + ring.stage * T::kStageBytes, full = shared + T::full(ring.stage);
      const int32_t count[2] = {min(2, max(0, tiles[0] - i)), min(2, max(0, tiles[1] - i))};
      const int32_t both = max(count[0], count[1]);
      ptx::barrier_wait(shared + T::empty(ring.stage), ring.parity ^ 1);
      ptx::barrier_expect(full, (count[0] + count[1]) * T::kDsTile + both * T::kImage);
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        if (count[w] > 0) load_once(stage + w * 2 * T::kDsTile, ds[w], count[w] * T::kDsTile, full, once);
        ds[w] += 2 * T::kDsTile;
      }
      ptx::bulk_load(stage + 4 * T::kDsTile, keys, both * T::kImage, full);
      keys += 2 * T::kImage;
      ring.advance();
    }
  }
}

// Factors of the four tiles of a stage, one a lane, loaded a step ahead.
template <class T>
__device__ __forceinline__ void dq_factors(const DqParams& p, uint32_t shared, int lane) {
  const int w = lane / 2 % 2, t = lane % 2;
  DqRing<T::kStages> ring;
#pragma unroll 1
  for (int32_t round = 0, number; (number = dq_number(round)) < p.items; ++round) {
    DqItem item;
    if (!dq_item(p, number, item)) continue;
    const int32_t first = p.chunk.tile_first, most = max(item.end[0], item.end[1]) - first;
    const int32_t own = (w ? item.end[1] : item.end[0]) - first;
    const float* const ds_scale = p.chunk.scale + (w ? item.ds[1] : item.ds[0]);
    const float* const k_scale =
        p.keys.k_scale +
        (static_cast<int64_t>(item.kv_head) * p.shape.sequences.k_blocks + item.view.k_block0) * 2 + first;
    float next[2] = {0, 0};
    if (t < own) next[0] = ds_scale[t], next[1] = k_scale[t];
#pragma unroll 1
    for (int32_t i = t; i < most + t; i += 2) {
      const float now[2] = {next[0], next[1]};
      if (i + 2 < own) next[0] = ds_scale[i + 2], next[1] = k_scale[i + 2];
      ptx::barrier_wait(shared + T::empty(ring.stage), ring.parity ^ 1);
      if (lane < 4) ptx::store_shared(shared + T::kFactors + 16 * ring.stage + 4 * lane, now[0] * now[1]);
      __syncwarp();
      if (lane == 0) ptx::barrier_arrive(shared + T::full(ring.stage));
      ring.advance();
    }
  }
}

template <class T>
struct DqConsumer {
  const DqParams& p;
  const uint32_t shared;
  const int group, thread, warp, lane;
  float sum[T::D / 2];

  // kTiles tiles of a stage, from the given one on. Products of a slice of channels take turns in two
  // accumulators: one is added while the other runs.
  template <int kTiles>
  __device__ __forceinline__ void tiles(int32_t number, int at) {
    constexpr int kSlices = T::D / T::kSlice, kProducts = kTiles * kSlices;
    const uint32_t stage = shared + number * T::kStageBytes;
    const float2 factors = ptx::load_shared2(shared + T::kFactors + 16 * number + 8 * group);
    const float factor[2] = {at == 0 ? factors.x : factors.y, factors.y};
    // The lane's row of four matrices: both halves of a warp's 16 keys, then of the next warp's.
    const uint32_t row =
        stage + (group * 2 + at) * T::kDsTile + 16 * ds_tile_row(lane / 16, lane / 8 % 2, warp, lane % 8);
    const uint64_t keys = static_cast<uint64_t>(128 >> 4) << 32 | stage >> 4;
    uint32_t left[kTiles][8];
    float product[2][T::kSlice / 2];
    const auto issue = [&](int n) {
      const int i = n / kSlices, slice = n % kSlices;
      const uint64_t b = keys + ((4 * T::kDsTile + (at + i) * T::kImage) / 16 + (static_cast<uint64_t>(T::D) << 16) +
                                 slice * image_rows(T::kSlice));
      uint32_t(&codes)[8] = left[i];
      if (slice == 0) {
        ptx::load_transposed(row + i * T::kDsTile, codes);
        ptx::load_transposed(row + i * T::kDsTile + 16 * ds_tile_row(2, 0, 0, 0), codes + 4);
      }
      ptx::mma_fence();
      ptx::mma(product[n % 2], codes, b, false);
      ptx::mma(product[n % 2], codes + 4, b + image_step(T::D), true);
      ptx::mma_commit();
    };
    issue(0);
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      if (n + 1 < kProducts) {
        issue(n + 1);
        ptx::mma_wait<1>();
      } else {
        ptx::mma_wait<0>();
      }
      ptx::mma_landed(product[n % 2]);
#pragma unroll
      for (int e = 0; e < T::kSlice / 2; ++e) {
        float& to = sum[n % kSlices * (T::kSlice / 2) + e];
        to = fmaf(product[n % 2][e], factor[n / kSlices], to);
      }
    }
  }

  __device__ __forceinline__ float* partial(const DqItem& item) const {
    const int64_t image =
        (static_cast<int64_t>(item.head) * p.shape.sequences.q_blocks + item.view.q_block0 + item.block) * 2 + group;
    return p.output.partial + image * T::kImage + 4 * thread;
  }

  __device__ __forceinline__ void begin(const DqItem& item) {
    if (p.output.first) {
#pragma unroll
      for (int i = 0; i < T::D / 2; ++i) sum[i] = 0.0f;
      return;
    }
    const float* const from = partial(item);
#pragma unroll
    for (int i = 0; i < T::D / 2; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(from + 128 * i);
      sum[i] = x.x, sum[i + 1] = x.y, sum[i + 2] = x.z, sum[i + 3] = x.w;
    }
  }

  // `row`: the row's first channel, null where there is no such row.
  template <bool kWide>
  __device__ __forceinline__ void store_row(uint16_t* row, int half) const {
    float scale = p.shape.softmax_scale;
    asm volatile("" : "+f"(scale));  // products stay on this side of the branches around them
#pragma unroll
    for (int i = 0; i < T::D / 2; i += 16) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const x = &sum[i + 4 * j + 2 * half];
        words[j] = ptx::bf16_pack(x[0] * scale, x[1] * scale);
      }
      store_words<kWide>(row ? row + 2 * i : nullptr, words, lane);
    }
  }

  __device__ __forceinline__ void finish(const DqItem& item) const {
    if (!p.output.last) {
      float* const to = partial(item);
#pragma unroll
      for (int i = 0; i < T::D / 2; i += 4)
        *reinterpret_cast<float4*>(to + 128 * i) = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = item.block * kBlockRows + group * kImageRows + ds_tile_query(half, warp, lane / 4);
      uint16_t* const out =
          row < item.view.q_rows
              ? row_pointer(p.output.dq, p.shape.sequences, item.sequence, item.view.q_first, row, item.head)
              : nullptr;
      if (p.output.dq.aligned)
        store_row<true>(out, half);
      else
        store_row<false>(out, half);
    }
    __syncwarp();  // products want whole warps
    __syncwarp();  // products want whole warps
  }

  __device__ __forceinline__ void run() {
    DqRing<T::kStages> ring;
#pragma unroll 1
    for (int32_t round = 0, number; (number = dq_number(round)) < p.items; ++round) {
      DqItem item;
      if (!dq_item(p, number, item)) continue;
      const int32_t first = p.chunk.tile_first;
      const int32_t own = (group ? item.end[1] : item.end[0]) - first;
      const int32_t most = max(item.end[0], item.end[1]) - first;
      begin(item);
      const auto wait = [&] { ptx::barrier_wait(shared + T::full(ring.stage), ring.parity); };
      const auto release = [&] {
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared + T::empty(ring.stage));
        ring.advance();
      };
      int32_t i = 0;
#pragma unroll 1
      for (; i + (T::kPairs ? 2 : 1) <= own; i += 2) {
        wait();
        if constexpr (T::kPairs) {
          tiles<2>(ring.stage, 0);
        } else {
          tiles<1>(ring.stage, 0);
          if (i + 1 < own) tiles<1>(ring.stage, 1);
        }
        release();
      }
      if (T::kPairs && i < own) {
        wait();
        tiles<1>(ring.stage, 0);
        release();
        i += 2;
      }
#pragma unroll 1
      for (; i < most; i += 2) {  // the other warpgroup's alone
        wait();
        release();
      }
      DqItem again;  // computed anew: the loop has no registers to keep it
      dq_item(p, opaque(number), again);
      finish(again);
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
      ptx::barrier_init(shared + T::full(s), 2);
      ptx::barrier_init(shared + T::empty(s), T::kConsumerWarps);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    ptx::registers_lower<T::kProducerRegisters>();
    if (thread == 0) dq_copies<T>(p, shared);
    if (thread / 32 == 1) dq_factors<T>(p, shared, thread % 32);
  } else {
    ptx::registers_raise<T::kConsumerRegisters>();
    DqConsumer<T> consumer{p, shared, warpgroup - 1, thread, __shfl_sync(0xffffffffu, thread / 32, 0), thread % 32};
    consumer.run();
  }
}

}  // namespace dmattn::cuda
