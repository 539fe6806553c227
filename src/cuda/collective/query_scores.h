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
  int warp;   // of the consumers
  int group;  // warpgroup: 64 queries each
  int lane;
  int row;     // of the block of 128; the other one is 8 further down
  int column;  // 2 t

  __device__ __forceinline__ ConsumerThread(uint32_t storage, int consumer_warp)
      : shared(storage),
        warp(consumer_warp),
        group(consumer_warp / 4),
        lane(fresh(static_cast<int>(threadIdx.x)) % 32),
        row(16 * consumer_warp + lane / 4),
        column(2 * (lane % 4)) {}
  // The same, computed again: the main loop has no registers to keep what comes after it.
  __device__ __forceinline__ ConsumerThread anew() const { return {shared, warp}; }

  // This warp has read what the barrier guards.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(barrier);
  }
};

// The part of an item that one warpgroup has to do: tiles [0, tiles), of which it sees the first `whole` without a
// mask.
struct GroupTiles {
  int32_t tiles, whole;

  __device__ __forceinline__ GroupTiles(const QueryItem& item, bool causal, const ConsumerThread& thread) {
    const int32_t row = item.block * kBlockRows + thread.group * kImageRows;
    tiles = tiles_seen(item.view, causal, row, kImageRows);
    whole = min(visible_keys(item.view, causal, row) / kImageRows, tiles);
  }
};

// Keys that the thread's two rows see.
struct VisibleKeys {
  int32_t keys[2];

  __device__ __forceinline__ VisibleKeys(const QueryItem& item, bool causal, const ConsumerThread& thread) {
    for (int r = 0; r < 2; ++r) keys[r] = visible_keys(item.view, causal, item.block * kBlockRows + thread.row + 8 * r);
  }
};

// Which of a thread's columns of a tile its rows see: column 8 j + i of it (before adding 2 t) if 8 j + i < edge.
struct TileMask {
  int32_t edge[2];
  bool live[2];  // the row sees some key of the tile, whichever thread holds it

  __device__ __forceinline__ TileMask() : edge{}, live{true, true} {}  // a tile without a mask
  __device__ __forceinline__ TileMask(const VisibleKeys& visible, int32_t tile, const ConsumerThread& thread) {
    for (int r = 0; r < 2; ++r) {
      const int32_t keys = visible.keys[r] - tile * kImageRows;
      edge[r] = keys - thread.column;
      live[r] = keys > 0;
    }
  }
};

// Descriptor of a shared address, without rows. Written so that sums with constants are one instruction each.
__device__ __forceinline__ uint64_t address_descriptor(uint32_t shared) {
  return static_cast<uint64_t>(128 >> 4) << 32 | shared >> 4;
}

// Descriptor of a stage's first byte, without rows: one address a stage, in uniform registers. An image of `rows` rows
// at byte `offset` of the stage has the descriptor stage + image_at(offset, rows). Shared addresses have 18 bits.
template <class T>
__device__ __forceinline__ uint64_t stage_descriptor(uint32_t shared, int stage) {
  using Plan = QueryPlan<T>;
  static_assert(Plan::kStageBytes % 16 == 0 && Plan::kStage0 % 16 == 0);
  return address_descriptor(shared) + Plan::kStage0 / 16 +
         static_cast<uint32_t>(stage) * static_cast<uint32_t>(Plan::kStageBytes / 16);
}
__device__ __forceinline__ constexpr uint64_t image_at(int offset, int rows) {
  return static_cast<uint64_t>(offset / 16) + (static_cast<uint64_t>(rows) << 16);
}
constexpr uint32_t kBiasOnes = 0x78787878u;  // the code of the bias weight, four times
static_assert(numerics::kBiasWeight == 256.0f);
constexpr int kKeysInStage = 0;
template <class T>
constexpr int kValuesInStage = T::kImage;
template <class T>
constexpr int kBiasInStage = 2 * T::kImage;

// A warpgroup's row image of 64 queries as the left operand of products: fragments in registers, or its descriptor
// where registers are short.
template <int kDim, bool kInRegisters>
struct LeftImage {
  uint32_t fragments[kDim / 8];

  __device__ __forceinline__ LeftImage(uint32_t address, int consumer_warp, int lane) {
    const uint32_t row = address + 16 * (16 * (consumer_warp % 4) + lane % 16) + lane / 16 * 16 * kImageRows;
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) ptx::load_matrices(row + k * 32 * kImageRows, fragments + 4 * k);
  }
  __device__ __forceinline__ void multiply(float (&d)[32], int k, uint64_t keys) const {
    ptx::mma(d, fragments + 4 * k, keys, k != 0);
  }
};
template <int kDim>
struct LeftImage<kDim, false> {
  uint64_t image;

  __device__ __forceinline__ LeftImage(uint32_t address, int, int) : image(address_descriptor(address)) {}
  __device__ __forceinline__ void multiply(float (&d)[32], int k, uint64_t keys) const {
    ptx::mma(d, image + image_at(k * 32 * kImageRows, kImageRows), keys, k != 0);
  }
};

// d = A . B^T over the head dimension: row images of 64 queries and of 64 keys.
template <int kDim, class Left>
__device__ __forceinline__ void issue_product(float (&d)[32], const Left& queries, uint64_t keys) {
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) queries.multiply(d, k, keys + k * image_step(kImageRows));
}

// S of a stage in units of the accumulator, the bias step last.
template <class T, class Left>
__device__ __forceinline__ void issue_scores(float (&s)[32], const Left& queries, uint32_t shared, uint64_t stage) {
  issue_product<T::kDim>(s, queries, stage + image_at(kKeysInStage, kImageRows));
  const uint64_t bias = stage + image_at(kBiasInStage<T>, kImageRows);
  if constexpr (T::kLeftInRegisters) {
    const uint32_t ones[4] = {kBiasOnes, kBiasOnes, 0, 0};  // what fill_bias_ones writes, as a fragment
    ptx::mma(s, ones, bias, true);
  } else {
    ptx::mma(s, address_descriptor(shared) + image_at(QueryPlan<T>::kOnes, kImageRows), bias, true);
  }
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
