// What the host side of the packing kernels shares.
#pragma once

#include <cstdint>
#include <limits>

#include "cuda/collective/launch.h"

namespace dmattn::cuda::pack {

// CTAs go on the grid's x alone, whose limit no workspace that fits a machine reaches.
inline bool fits_grid(int64_t ctas) { return ctas <= std::numeric_limits<int32_t>::max(); }

}  // namespace dmattn::cuda::pack
