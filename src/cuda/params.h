// What the kernels read and write, by phase. All pointers are device memory inside the caller's tensors or workspace.
// Hq, Hk: query and KV heads; QB, KB: padded 128-row blocks of all sequences (Sequences::q_blocks, k_blocks);
// D: head_dim. Row arrays "[Hq][128 QB]" are indexed by padded row: 128 block + row, rows past a sequence's end
// included.
#pragma once

#include <cstdint>

#include "cuda/schedule/divide.h"
#include "cuda/schedule/sequences.h"

namespace dmattn::cuda {

enum class DeltaRule : int32_t { matched, onepass, consistent, stale };  // same order as dmattn_mode

struct Shape {
  Sequences sequences;
  int32_t q_heads, kv_heads;
  int32_t causal;  // bottom-right aligned
  float softmax_scale;
  float score_scale;                           // softmax_scale * log2 e, rounded once
  int32_t mean_blocks_max;                     // Q mean blocks of one sequence (at most 64); 0 where Q is not centred
  Divisor by_row_heads, by_q_heads, by_group;  // batch q_heads; q_heads; query heads of a KV head
};

// Made from k and v (and their means) for both phases. An image pointer that a phase does not need is null.
struct KeyCodes {
  uint8_t* k;        // [Hk][KB][2] row images of codes of k - mean
  uint8_t* k_t;      // [Hk][KB][2] transposed images in rho order (backward: dQ)
  uint8_t* v;        // [Hk][KB][2] row images (backward: dP)
  uint8_t* v_t;      // [Hk][KB][2] transposed images in sigma order (forward: O)
  float* k_scale;    // [Hk][KB][2]
  float* v_scale;    // [Hk][KB][2]
  float* k_mean;     // [Hk][batch][D]; zeros where K is not centred
  float* k_partial;  // [Hk][KB][2][D] scratch of the mean: sums of 64 keys
};

// Made from q for S.
struct QueryCodes {
  uint8_t* q;        // [Hq][QB][2] row images of codes of q - mu (of q where Q is not centred)
  float* q_scale;    // [Hq][QB]
  float* mean;       // [Hq][batch][mean_blocks_max][D] mu, BF16 values in FP32
  float* bias;       // [Hq][mean_blocks_max][128 KB] mu . (k - mean), by padded key of the head's group
  float* bias_amax;  // [Hq][mean_blocks_max][KB][2] largest |bias| of 64 keys, NaN if one is not finite and k_scale > 0
  float* mean_dot;   // [Hq][128 QB] <q, k mean>, for the public lse; null in the backward
};

struct ForwardOutput {
  TensorView o, o_low;           // o_low.data null: not wanted
  float *lse, *reference, *sum;  // row vectors, each may be null; sum: two of them (unrounded, then rounded)
  int64_t row_vector_length;
  bool unrounded;  // false: the unrounded sum, which lse needs, is left out and stored as NaN
};

// Made from dO, O, q and the saved statistics for the backward. Blocks of 1,024 rows share a scale, stored for each of
// their 128-row blocks.
struct GradientCodes {
  uint8_t* d_o;     // [Hq][QB][2] row images of codes of w dO
  uint8_t* d_o_t;   // [Hq][QB][2] transposed, sigma order: codes of (2^k / rounded sum) dO
  uint8_t* q_t;     // [Hq][QB][2] transposed, sigma order: codes of plain q
  float* d_scale;   // [Hq][QB]
  float* dv_scale;  // [Hq][QB]
  float* q_scale;   // [Hq][QB] of q_t
  float* shift;     // [Hq][128 QB] 8 - c; -infinity for a row without keys or past the end: its P is zero
  float* delta;     // [Hq][128 QB] delta' (0 for such rows); matched: written by the delta kernel
  float* weight;    // [Hq][128 QB] w, 0 for such rows
};

struct GradientInput {
  TensorView q, o, o_low, d_o;         // o_low.data may be null (onepass without it: O alone)
  const float *reference, *sum, *lse;  // reference, sum: saved; null: start from lse
  const float* delta;                  // row vector, true delta to use, or null
  float* delta_out;                    // row vector, true delta that was used, or null
  int64_t row_vector_length;
  DeltaRule rule;
};

// dS of one chunk: KV heads [kv_first, kv_first + kv_heads), of each group the query heads [group_first, group_first +
// group_heads), key tiles [tile_first, tile_end) of every sequence, all query tiles. Heads are counted KV head after KV
// head. Tile (head, I, J) has 64 queries x 64 keys as tile/image.h lays them out ("dS tiles"); schedule/ds_tiles.h
// finds it.
struct DsChunk {
  uint8_t* codes;  // [heads][tiles per head][4096]
  float* scale;    // [heads][tiles per head]
  int32_t kv_first, kv_heads;
  int32_t group_first, group_heads;  // a chunk with 0 starts the sums of dV and dK, one with the group's last ends them
  int32_t tile_first, tile_end;      // 64-key tiles counted from each sequence's first key; even
  int64_t tiles_per_head;
};

struct KeyGradients {
  TensorView dk, dv;  // data null: not wanted
  float* partial;     // [CTAs][2][128][D] FP32 sums of a CTA's work item; of each item where groups are split
  int32_t by_item;    // which of the two
};

struct QueryGradients {
  TensorView dq;
  float* partial;       // [Hq][128 QB][D] FP32, in accumulator order, less what lies before the chunk's first KV head;
                        // null when the chunk holds all keys
  int32_t first, last;  // this chunk starts / ends the sum over keys
};

}  // namespace dmattn::cuda
