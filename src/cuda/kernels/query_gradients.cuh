// dQ from the codes of dS: a product per 64 x 64 tile, promoted to FP32. docs/numerics.md, section 4.
//
// A CTA owns 128 or 256 queries of a head, two consumer warpgroups a half each, one or two tiles of 64, and walks over
// the chunk's key tiles that they see, two at a time, in ascending order:
//     T = dS . K     A: dS codes [64 queries x 64 keys] through ldmatrix, which turns them; rows in the order of
//                    ds_tile_query, warp w has the matrices t = w. B: transposed image of K codes (rho order)
//     dQ = fma(T, ds_scale k_scale, dQ)
// T starts from zero for every tile. Where a chunk holds a part of the keys, dQ continues from the FP32 sums of the
// chunk before it, in the order of keys: no chunking changes a bit.
//
// The kernel reads every byte of dS once and should be bound by memory: the stages keep up to 192 KB in flight. With
// 256 queries the codes of K are read half as often, from the L2, whose throughput is what 128 run into.
// Roles: warpgroup 0: a lane copies, four lanes of the next warp make factors; warpgroups 1 and 2 consume. Barriers:
// full[stage] (copies and factors), empty[stage] (8 consumer warps).
#pragma once

#include "cuda/collective/key_plan.h"
#include "cuda/collective/row_stores.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/wgmma.h"

namespace dmattn::cuda {

template <int kHeadDim, int kTilesOfGroup>
struct DqTraits {
  static constexpr int D = kHeadDim;
  static constexpr int kGroupTiles = kTilesOfGroup, kTiles = 2 * kGroupTiles;  // of 64 queries: a warpgroup's, all
  static constexpr int kRows = kTiles * kImageRows;                            // queries of an item
  static constexpr int kImage = kImageRows * D, kDsTile = kDsTileBytes;
  static constexpr int kSlice = 64;  // channels of a product; two products take turns
  static constexpr int kSlices = D / kSlice;
  static constexpr bool kPairs = D < 256;  // both key tiles of a stage in one go: registers for two tiles' codes
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kStageBytes = 2 * kTiles * kDsTile + 2 * kImage;  // dS [query tile][2 key tiles], two K images
  static constexpr int kStages = 192 * 1024 / kStageBytes;
  static constexpr int kFactors = kStages * kStageBytes;  // ds_scale k_scale of a stage's [query tile][2 key tiles]
  static constexpr int kFactorBytes = 8 * kTiles;
  static constexpr int kBarriers = kFactors + kFactorBytes * kStages, kBytes = kBarriers + 16 * kStages;
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

// Queries of one head.
template <class T>
struct DqItem {
  SequenceView view;
  int32_t sequence, kv_head, head;
  int32_t tile;            // the first of the query tiles, counted from the sequence's first
  int32_t end[T::kTiles];  // each query tile's key tiles: [chunk.tile_first, end)
  int64_t ds[T::kTiles];   // index in the chunk of their first

  __device__ __forceinline__ int32_t most() const {
    int32_t most = end[0];
#pragma unroll
    for (int w = 1; w < T::kTiles; ++w) most = max(most, end[w]);
    return most;
  }
};

// False for an item without rows. The last queries see the most keys and come first.
template <class T>
__device__ __forceinline__ bool dq_item(const DqParams& p, int32_t item, DqItem<T>& out) {
  const int32_t rank = p.by_item_heads.divide(item), rest = item - rank * p.by_item_heads.value;
  const int32_t head = p.by_batch.divide(rest), kv_head = p.by_group_heads.divide(head);
  out.sequence = rest - head * p.by_batch.value;
  out.kv_head = p.chunk.kv_first + kv_head;
  out.head = out.kv_head * p.shape.by_group.value + p.chunk.group_first + head - kv_head * p.by_group_heads.value;
  out.view = sequence_view(p.shape.sequences, out.sequence);
  const int32_t block = (out.view.q_rows + T::kRows - 1) / T::kRows - 1 - rank;
  if (block < 0) return false;
  out.tile = T::kTiles * block;
#pragma unroll
  for (int w = 0; w < T::kTiles; ++w) {
    const int32_t tile = out.tile + w;
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
    DqItem<T> item;
    if (!dq_item(p, number, item)) continue;
    const int32_t first = p.chunk.tile_first, most = item.most() - first;
    const int64_t image = (static_cast<int64_t>(item.kv_head) * p.shape.sequences.k_blocks + item.view.k_block0) * 2;
    const uint8_t* keys = p.keys.k_t + (image + first) * T::kImage;
    const uint8_t* ds[T::kTiles];
#pragma unroll
    for (int w = 0; w < T::kTiles; ++w) ds[w] = p.chunk.codes + item.ds[w] * T::kDsTile;
#pragma unroll 1
    for (int32_t i = 0; i < most; i += 2) {
      const uint32_t stage = shared + ring.stage * T::kStageBytes, full = shared + T::full(ring.stage);
      int32_t count[T::kTiles], all = 0;
#pragma unroll
      for (int w = 0; w < T::kTiles; ++w) count[w] = min(2, max(0, item.end[w] - first - i)), all += count[w];
      const int32_t both = min(2, most - i);
      ptx::barrier_wait(shared + T::empty(ring.stage), ring.parity ^ 1);
      ptx::barrier_expect(full, all * T::kDsTile + both * T::kImage);
#pragma unroll
      for (int w = 0; w < T::kTiles; ++w) {
        if (count[w] > 0) load_once(stage + w * 2 * T::kDsTile, ds[w], count[w] * T::kDsTile, full, once);
        ds[w] += 2 * T::kDsTile;
      }
      ptx::bulk_load(stage + 2 * T::kTiles * T::kDsTile, keys, both * T::kImage, full);
      keys += 2 * T::kImage;
      ring.advance();
    }
  }
}

// Factors of a stage's tiles, one a lane, loaded a step ahead.
template <class T>
__device__ __forceinline__ void dq_factors(const DqParams& p, uint32_t shared, int lane) {
  const int w = lane / 2 % T::kTiles, t = lane % 2;
  DqRing<T::kStages> ring;
#pragma unroll 1
  for (int32_t round = 0, number; (number = dq_number(round)) < p.items; ++round) {
    DqItem<T> item;
    if (!dq_item(p, number, item)) continue;
    const int32_t first = p.chunk.tile_first, most = item.most() - first;
    int32_t end = 0;
    int64_t ds = 0;
#pragma unroll
    for (int i = 0; i < T::kTiles; ++i)
      if (w == i) end = item.end[i], ds = item.ds[i];
    const int32_t own = end - first;
    const float* const ds_scale = p.chunk.scale + ds;
    const float* const k_scale =
        p.keys.k_scale + (static_cast<int64_t>(item.kv_head) * p.shape.sequences.k_blocks + item.view.k_block0) * 2 +
        first;
    float next[2] = {0, 0};
    if (t < own) next[0] = ds_scale[t], next[1] = k_scale[t];
#pragma unroll 1
    for (int32_t i = t; i < most + t; i += 2) {
      const float now[2] = {next[0], next[1]};
      if (i + 2 < own) next[0] = ds_scale[i + 2], next[1] = k_scale[i + 2];
      ptx::barrier_wait(shared + T::empty(ring.stage), ring.parity ^ 1);
      if (lane < 2 * T::kTiles)
        ptx::store_shared(shared + T::kFactors + T::kFactorBytes * ring.stage + 4 * lane, now[0] * now[1]);
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
  float sum[T::kGroupTiles][T::D / 2];

  // Of a stage, for query tiles [kFirst, kFirst + kQueries) of the warpgroup's, kKeys key tiles from `at` on. Products
  // of a slice of channels take turns in two accumulators: one is added while the other runs.
  template <int kFirst, int kQueries, int kKeys>
  __device__ __forceinline__ void tiles(int32_t number, int at) {
    constexpr int kOperands = kKeys * kQueries, kProducts = kOperands * T::kSlices;
    const uint32_t stage = shared + number * T::kStageBytes;
    const int tile = group * T::kGroupTiles + kFirst;
    float factor[kQueries][kKeys];
#pragma unroll
    for (int w = 0; w < kQueries; ++w) {
      const float2 x = ptx::load_shared2(shared + T::kFactors + T::kFactorBytes * number + 8 * (tile + w));
      factor[w][0] = kKeys == 1 && at != 0 ? x.y : x.x;
      if constexpr (kKeys == 2) factor[w][1] = x.y;
    }
    // The lane's row of four matrices: both halves of a warp's 16 keys, then of the next warp's.
    const uint32_t row =
        stage + (tile * 2 + at) * T::kDsTile + 16 * ds_tile_row(lane / 16, lane / 8 % 2, warp, lane % 8);
    const uint64_t keys = static_cast<uint64_t>(128 >> 4) << 32 | stage >> 4;
    uint32_t left[2][8];  // of the operand that is multiplied and of the next
    float product[2][T::kSlice / 2];
    const auto issue = [&](int n) {
      const int operand = n / T::kSlices, slice = n % T::kSlices, i = operand / kQueries, w = operand % kQueries;
      const uint64_t b = keys + ((2 * T::kTiles * T::kDsTile + (at + i) * T::kImage) / 16 +
                                 (static_cast<uint64_t>(T::D) << 16) + slice * image_rows(T::kSlice));
      uint32_t(&codes)[8] = left[operand % 2];
      if (slice == 0) {
        const uint32_t from = row + (2 * w + i) * T::kDsTile;
        ptx::load_transposed(from, codes);
        ptx::load_transposed(from + 16 * ds_tile_row(2, 0, 0, 0), codes + 4);
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
      const int operand = n / T::kSlices, w = operand % kQueries;
#pragma unroll
      for (int e = 0; e < T::kSlice / 2; ++e) {
        float& to = sum[kFirst + w][n % T::kSlices * (T::kSlice / 2) + e];
        to = fmaf(product[n % 2][e], factor[w][operand / kQueries], to);
      }
    }
  }

  // Where the FP32 sums of a query tile of the warpgroup's lie between chunks; null if it has no rows.
  __device__ __forceinline__ float* partial(const DqItem<T>& item, int w) const {
    const int32_t tile = item.tile + group * T::kGroupTiles + w;
    if (tile * kImageRows >= item.view.q_rows) return nullptr;
    const int64_t image =
        (static_cast<int64_t>(item.head) * p.shape.sequences.q_blocks + item.view.q_block0) * 2 + tile;
    return p.output.partial + image * T::kImage + 4 * thread;
  }

  __device__ __forceinline__ void begin(const DqItem<T>& item) {
#pragma unroll
    for (int w = 0; w < T::kGroupTiles; ++w) {
      const float* const from = p.output.first ? nullptr : partial(item, w);
      if (from == nullptr) {
#pragma unroll
        for (int i = 0; i < T::D / 2; ++i) sum[w][i] = 0.0f;
        continue;
      }
#pragma unroll
      for (int i = 0; i < T::D / 2; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + 128 * i);
        sum[w][i] = x.x, sum[w][i + 1] = x.y, sum[w][i + 2] = x.z, sum[w][i + 3] = x.w;
      }
    }
  }

  // `row`: the row's first channel, null where there is no such row.
  template <bool kWide>
  __device__ __forceinline__ void store_row(uint16_t* row, int w, int half) const {
    float scale = p.shape.softmax_scale;
    asm volatile("" : "+f"(scale));  // products stay on this side of the branches around them
#pragma unroll
    for (int i = 0; i < T::D / 2; i += 16) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const x = &sum[w][i + 4 * j + 2 * half];
        words[j] = ptx::bf16_pack(x[0] * scale, x[1] * scale);
      }
      store_words<kWide>(row ? row + 2 * i : nullptr, words, lane);
    }
  }

  __device__ __forceinline__ void finish(const DqItem<T>& item) const {
#pragma unroll
    for (int w = 0; w < T::kGroupTiles; ++w) {
      if (!p.output.last) {
        float* const to = partial(item, w);
        if (to == nullptr) continue;
#pragma unroll
        for (int i = 0; i < T::D / 2; i += 4)
          *reinterpret_cast<float4*>(to + 128 * i) = {sum[w][i], sum[w][i + 1], sum[w][i + 2], sum[w][i + 3]};
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = (item.tile + group * T::kGroupTiles + w) * kImageRows + ds_tile_query(half, warp, lane / 4);
        uint16_t* const out = row < item.view.q_rows ? row_pointer(p.output.dq, p.shape.sequences, item.sequence,
                                                                   item.view.q_first, row, item.head)
                                                     : nullptr;
        if (p.output.dq.aligned)
          store_row<true>(out, w, half);
        else
          store_row<false>(out, w, half);
      }
    }
    __syncwarp();  // products want whole warps
  }

  __device__ __forceinline__ void run() {
    DqRing<T::kStages> ring;
#pragma unroll 1
    for (int32_t round = 0, number; (number = dq_number(round)) < p.items; ++round) {
      DqItem<T> item;
      if (!dq_item(p, number, item)) continue;
      int32_t own[T::kGroupTiles], least = 0, most_own = 0;  // key tiles of the warpgroup's query tiles
#pragma unroll
      for (int w = 0; w < T::kGroupTiles; ++w) {
        own[w] = (group ? item.end[T::kGroupTiles + w] : item.end[w]) - p.chunk.tile_first;
        least = w == 0 ? own[w] : min(least, own[w]), most_own = max(most_own, own[w]);
      }
      const int32_t most = item.most() - p.chunk.tile_first;
      begin(item);
      const auto wait = [&] { ptx::barrier_wait(shared + T::full(ring.stage), ring.parity); };
      const auto release = [&] {
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared + T::empty(ring.stage));
        ring.advance();
      };
      int32_t i = 0;
      if constexpr (T::kPairs) {
#pragma unroll 1
        for (; i + 2 <= least; i += 2) {
          wait();
          tiles<0, T::kGroupTiles, 2>(ring.stage, 0);
          release();
        }
      }
#pragma unroll 1
      for (; i < most_own; i += 2) {
        wait();
#pragma unroll
        for (int w = 0; w < T::kGroupTiles; ++w) {
          // A constant for the tile: sums are registers.
          const auto one = [&](int at) {
            if (w == 0)
              tiles<0, 1, 1>(ring.stage, at);
            else
              tiles<T::kGroupTiles - 1, 1, 1>(ring.stage, at);
          };
          if (i < own[w]) one(0);
          if (i + 1 < own[w]) one(1);
        }
        release();
      }
#pragma unroll 1
      for (; i < most; i += 2) {  // the other warpgroup's alone
        wait();
        release();
      }
      DqItem<T> again;  // computed anew: the loop has no registers to keep it
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
