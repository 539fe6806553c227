// Where a batch's sequences lie: in the caller's tensors and in padded blocks of 128 rows.
#pragma once

#include <cstdint>

#include "cuda/tile/image.h"

namespace dmattn::cuda {

// One sequence. Rows are counted from its first row, keys from its first key.
struct SequenceView {
  int64_t q_first, k_first;    // row of the tensors (variable lengths) or 0 (then `batch` picks the entry)
  int32_t q_rows, k_rows;      // lengths
  int32_t q_block0, k_block0;  // first padded block of 128 rows
};

struct Sequences {
  int32_t batch;
  int32_t variable;                    // 1: cu_seqlens, else every sequence has q_len and k_len rows
  int64_t q_len, k_len;                // rows of a sequence; variable: of the whole tensor
  int32_t q_blocks, k_blocks;          // padded blocks in all (variable: an upper bound)
  int32_t q_blocks_max, k_blocks_max;  // of one sequence (variable: an upper bound)
  // Variable lengths only, device memory. Starts and block tables are written by the table kernel, which also clamps
  // offsets that fall or leave the tensor, so that nothing here can point outside it.
  const int32_t* q_start;           // [batch + 1] first row of each sequence
  const int32_t* k_start;           // [batch + 1]
  const int32_t* q_block_first;     // [batch + 1] first block of each sequence
  const int32_t* k_block_first;     // [batch + 1]
  const int32_t* q_block_sequence;  // [q_blocks] sequence of a block, -1 if none
  const int32_t* k_block_sequence;  // [k_blocks]
};

#if defined(__CUDACC__)
__device__ __forceinline__ SequenceView sequence_view(const Sequences& s, int32_t b) {
  if (!s.variable)
    return {0, 0, static_cast<int32_t>(s.q_len), static_cast<int32_t>(s.k_len), b * s.q_blocks_max, b * s.k_blocks_max};
  return {s.q_start[b],       s.k_start[b],      s.q_start[b + 1] - s.q_start[b], s.k_start[b + 1] - s.k_start[b],
          s.q_block_first[b], s.k_block_first[b]};
}
// Sequence of a padded block, -1 for a block that no sequence has.
__device__ __forceinline__ int32_t q_block_owner(const Sequences& s, int32_t block) {
  return s.variable ? s.q_block_sequence[block] : block / s.q_blocks_max;
}
__device__ __forceinline__ int32_t k_block_owner(const Sequences& s, int32_t block) {
  return s.variable ? s.k_block_sequence[block] : block / s.k_blocks_max;
}
#endif

// A BF16 tensor of the caller: row `r` of head `h` of sequence `b` starts at
// data + (variable ? 0 : b) batch_stride + (first + r) seq_stride + h head_stride.
struct TensorView {
  uint16_t* data;
  int64_t batch_stride, seq_stride, head_stride;  // elements
  int32_t aligned;                                // every row starts at a multiple of 16 bytes
};

#if defined(__CUDACC__)
__device__ __forceinline__ uint16_t* row_pointer(const TensorView& x, const Sequences& s, int32_t b, int64_t first,
                                                 int64_t row, int64_t head) {
  return x.data + (s.variable ? 0 : b * x.batch_stride) + (first + row) * x.seq_stride + head * x.head_stride;
}
// Position of a sequence's first entry in a row vector (lse, delta, saved statistics).
__device__ __forceinline__ int64_t row_vector(const Sequences& s, int32_t q_heads, int32_t b, int32_t head,
                                              int64_t q_first) {
  return s.variable ? head * s.q_len + q_first : (static_cast<int64_t>(b) * q_heads + head) * s.q_len;
}
#endif

}  // namespace dmattn::cuda
