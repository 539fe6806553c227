// How the backward's dS is cut so that no more than a cap of it is held at a time: into KV heads, query heads of each
// group, and ranges of keys. Plain C++; nothing here changes a bit of the result: a chunk's tiles are computed as they
// would be in any other, dV and dK are summed over the query heads of a group and dQ over ranges of keys in ascending
// order.
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
  int64_t kv_heads, group, head_dim;
  int64_t ctas;  // that work side by side: what makes a cut good or bad, never its results
};

struct HeadRange {
  int64_t first, count;
};

struct TileRange {
  int64_t first, end;      // 64-key tiles, even
  int64_t tiles_per_head;  // of dS
};

// The order of chunks: for each range of KV heads, for each range of keys, for each range of the groups' query heads.
struct ChunkPlan {
  std::vector<HeadRange> kv_heads;  // never empty
  std::vector<TileRange> tiles;     // never empty
  std::vector<HeadRange> group;     // never empty; query heads, counted from their group's first
  int64_t most_tiles;               // of dS in one chunk, over its heads

  size_t code_bytes() const;
  size_t scale_bytes() const;
  int64_t most_kv_heads() const;
  int64_t most_blocks() const;  // of 128 keys in a range
  bool splits_keys() const { return tiles.size() > 1; }
  bool splits_groups() const { return group.size() > 1; }
};

// The cut that keeps the CTAs busiest (predicted) of those within `cap`, which covers codes and scales; the FP32 sums
// that a cut needs stay below it as well, where some cut's do. A query head against two key tiles is a chunk even where
// that is above the cap; with variable lengths, whose groups are not cut, a group.
ChunkPlan plan_chunks(const DsShape& shape, size_t cap);

// One chunk of everything: for a backward without dQ, which keeps no dS.
ChunkPlan single_chunk(const DsShape& shape);

}  // namespace dmattn::cuda
