// From images and padded blocks back to plain rows: what dmattn_quantise hands out.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/kernels.h"

namespace dmattn::cuda {

// Row images [heads][blocks][2] to codes [batch, rows, heads, head_dim] ([total, heads, head_dim]).
cudaError_t launch_unpack_codes(const Launch& launch, const Shape& shape, bool is_query, const uint8_t* images,
                                uint8_t* codes);

// Scales [heads][blocks][per_block] to [batch, heads, per_sequence]; entries past a sequence's end are 0.
cudaError_t launch_unpack_scales(const Launch& launch, const Shape& shape, bool is_query, int32_t per_block,
                                 int64_t per_sequence, const float* scales, float* out);

// Means [heads][batch][width] to [batch, heads, width]; means null: zeros.
cudaError_t launch_unpack_means(const Launch& launch, int64_t batch, int64_t heads, int64_t width, const float* means,
                                float* out);

}  // namespace dmattn::cuda
