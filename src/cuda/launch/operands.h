// From the ABI's tensors to the kernels' operands, and the launches that forward and backward share.
#pragma once

#include "core/problem.h"
#include "cuda/kernels/kernels.h"
#include "cuda/schedule/workspace.h"

namespace dmattn::cuda {

// Checks that the tensor is memory of the problem's GPU. A tensor without data, or without rows, gives an empty view.
TensorView tensor_view(const Problem& problem, const dmattn_tensor& tensor, bool is_query, const char* name);

// The device's offsets, clamped, and the block tables made from them. Nothing where all lengths are equal.
void queue_tables(const Launch& launch, const Problem& problem, const Shape& shape, const Tables& tables);

// Codes of k and v, and the mean of k.
void queue_keys(const Launch& launch, const Problem& problem, const Shape& shape, const TensorView& k,
                const TensorView& v, const KeyCodes& keys);

// Codes of q for S; after the codes of the same k.
void queue_queries(const Launch& launch, const Shape& shape, const TensorView& q, const TensorView& k,
                   const KeyCodes& keys, const QueryCodes& queries);

}  // namespace dmattn::cuda
