// Key-stationary backward: dV, dK and the codes of dS. docs/numerics.md, section 4.
//
// A CTA owns 128 keys of a KV head, two consumer warpgroups 64 each, and walks over the query tiles (64) that see them,
// query head after query head of the group. All products have keys as rows, so that P and dS are A operands straight
// from registers:
//     S^T  = K Q^T (+ bias step)     acc[64 keys x 64 queries]      P = 2^(acc f + shift - E), codes -> registers
//     dV  += P^T dO                  B: transposed image of dO (sigma order)
//     dP^T = V dO^T                  dS = P (dP - delta'), codes -> registers
//     dK  += dS^T Q                  B: transposed image of q (sigma order)
// The codes of dS leave from registers as well: dQ's kernel turns them (tile/image.h, "dS tiles").
//
// dV and dK stay in the tensor core for 1,024 queries (an interval), then go to FP32 sums. The exponent E of P (one per
// 16 keys: a warp) and G of dS (one per 64 keys) only rise, when a code saturates; the accumulator is then rescaled by
// a power of two. On random heads one step in twenty does, most of them the first after exponents were forgotten.
//
// A step (key_walk.h): issue the next tile's S and dP, then dV and dK from this one's codes; store dS; once S and dP
// have landed, the next tile's P; once dV and dK have, its codes. Roles: warpgroup 0: a lane copies, three warps make
// bias codes and factors (key_producer.h); warpgroups 1 and 2 consume. Barriers: full (copies) and empty (8 consumer
// warps) of stages, block full (a warp and its copies) / empty (8), keys full / empty; named barriers 1 + w for
// warpgroup w's agreement on G.
#pragma once

#include <algorithm>

#include "cuda/collective/key_producer.h"
#include "cuda/collective/key_walk.h"
#include "cuda/collective/launch.h"

namespace dmattn::cuda {

template <class T, bool kRounded>
__global__ void __launch_bounds__(T::kThreads, 1) key_gradients_kernel(const __grid_constant__ KeyParams p) {
  using Plan = KeyPlan<T>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < T::kStages; ++s) {
      ptx::barrier_init(shared + Plan::full(s), 1);
      ptx::barrier_init(shared + Plan::empty(s), T::kConsumerWarps);
    }
    for (int b = 0; b < kBlocks; ++b) {
      ptx::barrier_init(shared + Plan::block_full(b), 2);
      ptx::barrier_init(shared + Plan::block_empty(b), T::kConsumerWarps);
    }
    ptx::barrier_init(shared + Plan::kKeysFull, 1);
    ptx::barrier_init(shared + Plan::kKeysEmpty, T::kConsumerWarps);
    ptx::barrier_init_fence();
  }
  prepare_work(p, shared + Plan::kWork);
  fill_bias_ones(shared + Plan::kOnes, static_cast<int>(threadIdx.x), T::kThreads);
  for (int b = 0; b < kBlocks; ++b)  // codes too: nobody writes them where Q is not centred
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kImageRows * kBiasBytes / 16; i += T::kThreads)
      ptx::store_shared4(shared + Plan::block(b) + 16 * i, {0, 0, 0, 0});
  ptx::async_proxy_fence();
  __syncthreads();
  if (warpgroup == 0) {
    ptx::registers_lower<T::kProducerRegisters>();
    key_produce<T>(p, shared);
  } else {
    ptx::registers_raise<T::kConsumerRegisters>();
    const int group = warpgroup - 1;
    const uint32_t image16 = group * (T::kImage / 16);
    KeyConsumer<T, kRounded> consumer{p,
                                      shared,
                                      group,
                                      LaneMap(thread),
                                      (shared >> 4) + image16,
                                      image16,
                                      static_cast<uint32_t>(group * (kImageRows * kBiasBytes / 16))};
    consume_keys(consumer);
  }
}

template <class T, bool kRounded>
cudaError_t start_key_gradients(const Launch& launch, const KeyParams& p) {
  for (int64_t first = 0; first < p.items;) {
    KeyParams part = p;
    part.item_first = static_cast<int32_t>(first);
    part.items = static_cast<int32_t>(std::min<int64_t>(p.items - first, int64_t{kMostItems} * launch.multiprocessors));
    const cudaError_t error = start_kernel<key_gradients_kernel<T, kRounded>, T::kThreads, KeyPlan<T>::kBytes>(
        launch, std::min(part.items, launch.multiprocessors), part);
    if (error != cudaSuccess) return error;
    first += part.items;
  }
  return cudaSuccess;
}

}  // namespace dmattn::cuda
