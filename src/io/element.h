// Elements of a file as BF16 values.
#pragma once

#include <cstddef>
#include <span>

#include "io/safetensors.h"

namespace dmattn {

// Decodes little-endian BF16, F16 or F32 elements and rounds them to BF16, nearest even. NaN stays NaN, infinity
// stays infinity, and a finite F32 past BF16's largest becomes infinity, as the rounding says.
void decode_to_bf16(safetensors::Dtype dtype, std::span<const std::byte> bytes, float* out);

}  // namespace dmattn
