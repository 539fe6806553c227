// Index of a dS tile in its chunk. A causal batch of equal lengths stores only tiles that some query sees, row after
// row of tiles; otherwise every query tile has a row of all the chunk's key tiles.
#pragma once

#include <cstdint>

#include "cuda/tile/image.h"

namespace dmattn::cuda {

// Key tiles that query tile I sees, of [first, end): keys of the last query of the tile, bottom-right aligned.
DMATTN_CUDA_HD int64_t visible_tiles(int64_t query_tile, int64_t q_rows, int64_t k_rows, bool causal) {
  const int64_t tiles = (k_rows + kImageRows - 1) / kImageRows;
  if (!causal) return tiles;
  const int64_t end = (query_tile + 1) * kImageRows, last = end < q_rows ? end : q_rows;
  const int64_t keys = last + k_rows - q_rows;  // seen by query last - 1
  const int64_t seen = keys <= 0 ? 0 : (keys + kImageRows - 1) / kImageRows;
  return seen < tiles ? seen : tiles;
}

// Sum over i < query_tile of clamp(i + 1 + shift, 0, width): where the packed rows of a causal chunk start.
DMATTN_CUDA_HD int64_t causal_tile_base(int64_t query_tile, int64_t shift, int64_t width) {
  if (width <= 0) return 0;
  const int64_t zero = shift < 0 ? -shift : 0;  // rows below see nothing
  if (query_tile <= zero) return 0;
  const int64_t full = width - 1 - shift > zero ? width - 1 - shift : zero;  // rows from here on are full
  const int64_t ramp = (query_tile < full ? query_tile : full) - zero;
  const int64_t base = ramp * (zero + 1 + shift) + ramp * (ramp - 1) / 2;
  return base + (query_tile > full ? (query_tile - full) * width : 0);
}

// Chunk of key tiles [first, end) of sequences with q_rows, k_rows (variable: q tiles counted over the whole batch).
struct DsIndex {
  int32_t packed;          // causal, equal lengths
  int32_t first, width;    // key tiles
  int64_t shift;           // packed: row I of a sequence holds clamp(I + 1 + shift, 0, width) tiles
  int64_t sequence_tiles;  // packed: tiles of one sequence
  // Tiles of a head up to query tile `tile` (counted from the sequence's first) of sequence b whose first padded
  // 128-row block is `block0`.
  DMATTN_CUDA_HD int64_t row(int64_t b, int64_t block0, int64_t tile) const {
    return packed ? b * sequence_tiles + causal_tile_base(tile, shift, width) : (2 * block0 + tile) * width;
  }
};

// ceil(x / 64) for any sign.
DMATTN_CUDA_HD int64_t ceil_tiles(int64_t x) { return x >= 0 ? (x + 63) / 64 : -(-x / 64); }

DMATTN_CUDA_HD DsIndex ds_index(bool variable, bool causal, int64_t q_len, int64_t k_len, int32_t first, int32_t end) {
  DsIndex index{};
  index.packed = causal && !variable;
  index.first = first;
  index.width = end - first;
  if (index.packed) {
    index.shift = ceil_tiles(k_len - q_len) - first;
    index.sequence_tiles = causal_tile_base((q_len + kImageRows - 1) / kImageRows, index.shift, index.width);
  }
  return index;
}

}  // namespace dmattn::cuda
