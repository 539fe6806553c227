// How the backward's dS is cut so that no more than a cap of it is held at a time: query heads first (whole groups,
// balanced), then, where a single group is too much, ranges of keys. Plain C++; nothing here changes a bit of the result:
// a chunk's tiles are computed as they would be in any other, and dQ is summed over ranges of keys in ascending order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dmattn::cuda {

struct DsShape {
  bool variable, causal;
  int64_t batch;
  int64_t q_len, k_len;  // of a sequence; not looked at with variable lengths
  int64_t q_blocks;      // padded blocks of 128 queries, all sequences
  int64_t key_tiles;     // 64-key tiles of the longest sequence, rounded up to even
  int64_t kv_heads, group;
};

struct HeadRange {
  int64_t first, count;  // query heads; multiples of the group
};

struct TileRange {
  int64_t first, end;      // 64-key tiles, even
  int64_t tiles_per_head;  // of dS
};

struct ChunkPlan {
  std::vector<HeadRange> heads;  // never empty
  std::vector<TileRange> tiles;  // never empty; each chunk of heads goes through all of them, ascending
  int64_t most_tiles;            // of dS in one chunk, over its heads

  size_t code_bytes() const;
  size_t scale_bytes() const;
  int64_t most_heads() const;
  bool splits_keys() const { return tiles.size() > 1; }
};

// `cap` covers codes and scales. A group of heads against two key tiles is a chunk even where that is above the cap.
ChunkPlan plan_chunks(const DsShape& shape, size_t cap);

// One chunk of everything: for a backward without dQ, which keeps no dS.
ChunkPlan single_chunk(const DsShape& shape);

}  // namespace dmattn::cuda
