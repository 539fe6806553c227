// What the host side of the kernels shares.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/kernels.h"

namespace dmattn::cuda {

// Allows a kernel on the current GPU what the runtime wants to be asked for: dynamic shared memory above 48 KB and
// clusters of more than 8 CTAs.
template <auto kKernel, int kBytes>
cudaError_t allow_kernel() {
  const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// kKernel<<<ctas, kThreads, kBytes>>>(arguments) on the launch's stream. What it needs is asked for once for each GPU,
// since that takes as long as a launch, and again where the GPU has forgotten it (a reset, another context).
template <auto kKernel, int kThreads, int kBytes, class... Arguments>
cudaError_t start_kernel(const Launch& launch, int64_t ctas, const Arguments&... arguments) {
  static std::atomic<uint64_t> allowed{0};  // a bit for each of the first GPUs
  const uint64_t bit = launch.device < 64 ? uint64_t{1} << launch.device : 0;
  const auto start = [&] {
    kKernel<<<static_cast<uint32_t>(ctas), kThreads, kBytes, launch.stream>>>(arguments...);
    return cudaGetLastError();
  };
  if ((allowed.load(std::memory_order_relaxed) & bit) != 0)
    if (const cudaError_t error = start(); error != cudaErrorInvalidValue && error != cudaErrorInvalidClusterSize)
      return error;
  if (const cudaError_t error = allow_kernel<kKernel, kBytes>(); error != cudaSuccess) return error;
  allowed.fetch_or(bit, std::memory_order_relaxed);
  return start();
}

// call(std::integral_constant<int, D>) for the head dimension.
template <class Call>
cudaError_t with_head_dim(int32_t head_dim, Call call) {
  switch (head_dim) {
    case 64: return call(std::integral_constant<int, 64>{});
    case 128: return call(std::integral_constant<int, 128>{});
    case 256: return call(std::integral_constant<int, 256>{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dmattn::cuda
