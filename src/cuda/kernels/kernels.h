// Host entry points of the kernels: one call is one or a few launches on `launch.stream`. They check nothing (core
// does), allocate nothing and never synchronise; the return value is the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"

namespace dmattn::cuda {

struct Launch {
  cudaStream_t stream;
  int32_t head_dim;         // 64, 128 or 256
  int32_t multiprocessors;  // of the device: persistent kernels start that many CTAs
  int32_t device;           // which one; it is current
};

// Variable lengths: starts (clamped to the tensors) and block tables from the caller's cu_seqlens.
struct SequenceTables {
  int32_t *q_start, *k_start;                    // [batch + 1]
  int32_t *q_block_first, *k_block_first;        // [batch + 1]
  int32_t *q_block_sequence, *k_block_sequence;  // [q_blocks], [k_blocks]
};
cudaError_t launch_tables(const Launch& launch, int32_t batch, int64_t q_total, int64_t k_total, int32_t q_blocks,
                          int32_t k_blocks, const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k,
                          const SequenceTables& tables);

// K mean (if centre_k; else zeros), codes of k - mean and of v.
cudaError_t launch_key_pack(const Launch& launch, const Shape& shape, const TensorView& k, const TensorView& v,
                            bool centre_k, const KeyCodes& codes);

// Q means, biases and codes for S (shape.mean_blocks_max == 0: Q is not centred, plain codes); mean_dot if wanted.
// After the key pack of the same k, whose FP32 values the biases take.
cudaError_t launch_query_pack(const Launch& launch, const Shape& shape, const TensorView& q, const TensorView& k,
                              const KeyCodes& keys, const QueryCodes& codes);

// Row statistics, delta' (not for matched, which gets w . delta only where input.delta is given) and codes of dO and q.
cudaError_t launch_gradient_pack(const Launch& launch, const Shape& shape, const GradientInput& input,
                                 const KeyCodes& keys, const GradientCodes& codes);

cudaError_t launch_forward(const Launch& launch, const Shape& shape, const KeyCodes& keys, const QueryCodes& queries,
                           const ForwardOutput& output);

// matched: delta' = sum P dP' / sum P into gradients.delta, true delta into delta_out (row vector, may be null).
cudaError_t launch_delta(const Launch& launch, const Shape& shape, const KeyCodes& keys, const QueryCodes& queries,
                         const GradientCodes& gradients, float* delta_out);

// dV, dK of the chunk's keys, and its dS codes (chunk.codes null: not wanted). rounded: dS from the codes of P
// (onepass).
cudaError_t launch_key_gradients(const Launch& launch, const Shape& shape, bool rounded, const KeyCodes& keys,
                                 const QueryCodes& queries, const GradientCodes& gradients, const DsChunk& chunk,
                                 const KeyGradients& output);

// dQ from the chunk's dS.
cudaError_t launch_query_gradients(const Launch& launch, const Shape& shape, const KeyCodes& keys, const DsChunk& chunk,
                                   const QueryGradients& output);

}  // namespace dmattn::cuda
