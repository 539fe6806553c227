#include "cuda/devices.h"

#include <cuda_runtime_api.h>

namespace dmattn::cuda {

Gpus gpus() {
  Gpus found{};
  cudaDriverGetVersion(&found.driver);
  cudaRuntimeGetVersion(&found.runtime);
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    found.problem = cudaGetErrorString(error);
    return found;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    found.all.push_back({properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                         properties.totalGlobalMem});
  }
  return found;
}

}  // namespace dmattn::cuda
