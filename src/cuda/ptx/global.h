// Copies and stores of 16 bytes of global memory that stay where the program has them, with hints for the L2 cache.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.h"

namespace dmattn::cuda::ptx {

// What the L2 cache does with a line: it goes before any other, as others, or after them.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t cache_policy(bool once) {
  const uint64_t first = evict_first(), normal = evict_normal();  // both: no branch
  return once ? first : normal;
}

// Starts a copy to shared memory; it belongs to this thread's next group.
__device__ __forceinline__ void copy_async4(void* shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "l"(policy)
               : "memory");
}
// The same, or zeros: then the pointer is not read.
__device__ __forceinline__ void copy_async4_if(void* shared, const void* global, bool exists, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
               "l"(global), "r"(exists ? 16 : 0), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// At most kPending of this thread's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}
// A store whose line the L2 cache need not keep.
__device__ __forceinline__ void store_global4(float* pointer, const float (&x)[4]) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace dmattn::cuda::ptx
