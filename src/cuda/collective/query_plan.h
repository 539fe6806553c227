// What the query-stationary kernels (forward, delta) share: threads, shared memory, barriers.
//
// 384 threads: warps 0 to 3 fill shared memory, two warpgroups compute, 64 queries each. Queries stay for an item; keys
// pass through a ring of stages of 64.
//   full[stage]       2 arrivals (the copies are on their way; bias codes and factors are written) and the copies' bytes
//   empty[stage]      8 arrivals, one of each consumer warp
//   block_full[b]     1 arrival and the bytes of the item's query images; block_empty[b]: 8 arrivals
#pragma once

#include "cuda/collective/bias.h"
#include "cuda/collective/stage_ring.h"
#include "cuda/params.h"

namespace dmattn::cuda {

template <int kHeadDim, int kQueryOperands>
struct QueryTraits {
  static constexpr int kDim = kHeadDim;
  static constexpr int kOperands = kQueryOperands;     // row images per 64 queries: q; delta: q, dO
  static constexpr int kImage = kImageRows * kDim;     // bytes of an image
  static constexpr int kStages = kDim == 256 ? 4 : 8;  // multiple of the producer warps: each owns the same stages
  static constexpr int kBlocks = kDim == 256 && kOperands == 2 ? 1 : 2;  // items whose queries are held; 227 KB at most
  // The left operands of S and dP stay in registers: products then read half as much shared memory. Forward 128 has no
  // registers left for them, nor has any head of 256.
  static constexpr bool kLeftInRegisters = kDim == 64 || (kDim == 128 && kOperands == 2);
  static constexpr int kThreads = 384, kProducerWarps = 4, kConsumerWarps = 8;
  // Registers can only change hands within what the CTA was launched with: 168 a thread.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kStages % kProducerWarps == 0);
  static_assert(kProducerRegisters * 128 + kConsumerRegisters * 256 <= 168 * kThreads);
};

// Factors of a stage's tile.
//   score: (q_scale k_scale) (softmax_scale log2 e), each product rounded once
//   value: forward v_scale; delta 2^-8 d_scale v_scale (p carries 2^8)
struct StageScalars {
  float score, value;
};

// Byte offsets in dynamic shared memory.
template <class T>
struct QueryPlan {
  static constexpr int kBiasImage = kImageRows * kBiasBytes;
  static constexpr int kOperandBytes = 2 * T::kImage;  // both halves of 128 queries
  static constexpr int kBlockBytes = T::kOperands * kOperandBytes;
  static constexpr int kStageBytes = 2 * T::kImage + kBiasImage;  // K, V, bias codes
  static constexpr int kStage0 = T::kBlocks * kBlockBytes;
  static constexpr int kOnes = kStage0 + T::kStages * kStageBytes;  // constant operand of the bias step
  static constexpr int kScalars = kOnes + kBiasImage;               // StageScalars of each stage
  static constexpr int kBarriers = kScalars + T::kStages * static_cast<int>(sizeof(StageScalars));
  static constexpr int kBytes = kBarriers + 16 * (T::kStages + T::kBlocks);
  static_assert(kBytes <= 227 * 1024 && kBarriers % 8 == 0);

  // Image `half` of operand `operand` (0: q, 1: dO) of the block held in buffer b.
  static constexpr int query(int b, int operand, int half) {
    return b * kBlockBytes + operand * kOperandBytes + half * T::kImage;
  }
  static constexpr int keys(int stage) { return kStage0 + stage * kStageBytes; }
  static constexpr int values(int stage) { return keys(stage) + T::kImage; }
  static constexpr int bias(int stage) { return keys(stage) + 2 * T::kImage; }
  static constexpr int scalars(int stage) { return kScalars + stage * static_cast<int>(sizeof(StageScalars)); }
  static constexpr int full(int stage) { return kBarriers + 8 * stage; }
  static constexpr int empty(int stage) { return kBarriers + 8 * (T::kStages + stage); }
  static constexpr int block_full(int b) { return kBarriers + 8 * (2 * T::kStages + b); }
  static constexpr int block_empty(int b) { return kBarriers + 8 * (2 * T::kStages + T::kBlocks + b); }
};

// Barriers and constants; all threads, before the roles part.
template <class T>
__device__ __forceinline__ void prepare_storage(uint32_t shared) {
  using Plan = QueryPlan<T>;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int s = 0; s < T::kStages; ++s) {
      ptx::barrier_init(shared + Plan::full(s), 2);
      ptx::barrier_init(shared + Plan::empty(s), T::kConsumerWarps);
    }
    for (int b = 0; b < T::kBlocks; ++b) {
      ptx::barrier_init(shared + Plan::block_full(b), 1);
      ptx::barrier_init(shared + Plan::block_empty(b), T::kConsumerWarps);
    }
    ptx::barrier_init_fence();
  }
  fill_bias_ones(shared + Plan::kOnes, thread, T::kThreads);
  for (int s = 0; s < T::kStages; ++s)  // codes too: nobody writes them where Q is not centred
    for (int i = thread; i < kImageRows * 2; i += T::kThreads)
      ptx::store_shared4(shared + Plan::bias(s) + 16 * i, {0, 0, 0, 0});
  ptx::async_proxy_fence();
  __syncthreads();
}

}  // namespace dmattn::cuda
