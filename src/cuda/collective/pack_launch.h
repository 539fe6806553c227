// What the host side of the packing kernels shares.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <type_traits>

namespace dmattn::cuda::pack {

// CTAs go on the grid's x alone, whose limit no workspace that fits a machine reaches.
inline bool fits_grid(int64_t ctas) { return ctas <= std::numeric_limits<int32_t>::max(); }

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

}  // namespace dmattn::cuda::pack
