// Block amaxes across the CTAs of a cluster: every CTA writes its own into the others' shared memory.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.h"

namespace dmattn::cuda::pack {

// Barrier of the cluster's threads. Threads that have exited are not waited for.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Stores to the variable of CTA `rank` that lies where `pointer` does in this one.
__device__ __forceinline__ void store_remote(uint32_t* pointer, uint32_t rank, uint32_t value) {
  asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.u32 [a], %2; }" ::"r"(
                   ptx::shared_address(pointer)),
               "r"(rank), "r"(value)
               : "memory");
}

}  // namespace dmattn::cuda::pack
