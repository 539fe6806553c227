// Copies and stores of 16 bytes of global memory that stay where the program has them.
#pragma once

#include <cstdint>

#include "cuda/ptx/memory.h"

namespace dmattn::cuda::ptx {

// Starts a copy to shared memory; it belongs to this thread's next group.
__device__ __forceinline__ void copy_async4(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// The same, or zeros: then the pointer is not read.
__device__ __forceinline__ void copy_async4_if(void* shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(exists ? 16 : 0)
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
__device__ __forceinline__ void store_global4(float* pointer, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace dmattn::cuda::ptx
