#include "cuda/schedule/chunks.h"

#include <algorithm>

#include "cuda/schedule/ds_tiles.h"

namespace dmattn::cuda {
namespace {

constexpr int64_t kCodeBytes = kImageRows * kImageRows;
constexpr int64_t kScaleBytes = sizeof(float);
constexpr int64_t kTilesOfBlock = 2;  // ranges of keys start at padded blocks of 128

int64_t tiles_of_head(const DsShape& shape, int64_t first, int64_t end) {
  const DsIndex index = ds_index(shape.variable, shape.causal, shape.q_len, shape.k_len, static_cast<int32_t>(first),
                                 static_cast<int32_t>(end));
  return index.packed ? shape.batch * index.sequence_tiles : kTilesOfBlock * shape.q_blocks * index.width;
}

// The longest range from `first` on that holds at most `limit` tiles of a head, two key tiles at least.
int64_t range_end(const DsShape& shape, int64_t first, int64_t limit) {
  int64_t fits = first / kTilesOfBlock + 1, most = shape.key_tiles / kTilesOfBlock;
  while (fits < most) {
    const int64_t middle = fits + (most - fits + 1) / 2;
    if (tiles_of_head(shape, first, middle * kTilesOfBlock) <= limit)
      fits = middle;
    else
      most = middle - 1;
  }
  return fits * kTilesOfBlock;
}

int64_t range_count(const DsShape& shape, int64_t limit) {
  int64_t count = 0;
  for (int64_t first = 0; first < shape.key_tiles; first = range_end(shape, first, limit)) ++count;
  return count;
}

// The fewest ranges, and among those about the most even (a limit within 2 % of the best: more would cost host time).
std::vector<TileRange> balanced_ranges(const DsShape& shape, int64_t limit) {
  const int64_t count = range_count(shape, limit);
  int64_t low = tiles_of_head(shape, 0, shape.key_tiles) / count;
  if (count < shape.key_tiles / kTilesOfBlock)
    while (limit - low > limit / 64 + 1) {
      const int64_t middle = low + (limit - low) / 2;
      (range_count(shape, middle) <= count ? limit : low) = middle;
    }
  std::vector<TileRange> ranges;
  for (int64_t first = 0; first < shape.key_tiles; first = ranges.back().end) {
    const int64_t end = range_end(shape, first, limit);
    ranges.push_back({first, end, tiles_of_head(shape, first, end)});
  }
  return ranges;
}

std::vector<HeadRange> balanced_heads(const DsShape& shape, int64_t chunks) {
  std::vector<HeadRange> heads;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t first = shape.kv_heads * i / chunks, end = shape.kv_heads * (i + 1) / chunks;
    heads.push_back({first * shape.group, (end - first) * shape.group});
  }
  return heads;
}

}  // namespace

size_t ChunkPlan::code_bytes() const { return static_cast<size_t>(most_tiles * kCodeBytes); }
size_t ChunkPlan::scale_bytes() const { return static_cast<size_t>(most_tiles * kScaleBytes); }

int64_t ChunkPlan::most_heads() const {
  int64_t most = 0;
  for (const HeadRange& range : heads) most = std::max(most, range.count);
  return most;
}

ChunkPlan single_chunk(const DsShape& shape) {
  const int64_t tiles = tiles_of_head(shape, 0, shape.key_tiles);
  const int64_t heads = shape.kv_heads * shape.group;
  return {{{0, heads}}, {{0, shape.key_tiles, tiles}}, heads * tiles};
}

ChunkPlan plan_chunks(const DsShape& shape, size_t cap) {
  const ChunkPlan all = single_chunk(shape);
  // The kernels count the tiles of a chunk in 32 bits.
  const auto limit = static_cast<int64_t>(std::min<size_t>(cap / (kCodeBytes + kScaleBytes), INT32_MAX));
  if (all.most_tiles <= limit) return all;
  ChunkPlan plan{};
  const int64_t group_tiles = shape.group * all.tiles[0].tiles_per_head;
  if (const int64_t groups = limit / group_tiles; groups > 0) {
    plan.heads = balanced_heads(shape, (shape.kv_heads + groups - 1) / groups);
    plan.tiles = all.tiles;
  } else {
    plan.heads = balanced_heads(shape, shape.kv_heads);
    plan.tiles = balanced_ranges(shape, limit / shape.group);
  }
  int64_t widest = 0;
  for (const TileRange& range : plan.tiles) widest = std::max(widest, range.tiles_per_head);
  plan.most_tiles = plan.most_heads() * widest;
  return plan;
}

}  // namespace dmattn::cuda
