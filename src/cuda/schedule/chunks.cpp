#include "cuda/schedule/chunks.h"

#include <algorithm>
#include <utility>

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

int64_t most_count(const std::vector<HeadRange>& ranges) {
  int64_t most = 0;
  for (const HeadRange& range : ranges) most = std::max(most, range.count);
  return most;
}

std::vector<HeadRange> even_ranges(int64_t heads, int64_t parts) {
  std::vector<HeadRange> ranges;
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t first = heads * i / parts, end = heads * (i + 1) / parts;
    ranges.push_back({first, end - first});
  }
  return ranges;
}

// Ranges of keys of at most `limit` tiles of a head, for chunks of `kv_heads`. A range's work items (128 keys of a
// head) are about equally long, so where CTAs take one or two each, a few more than a multiple of them would cost a
// round.
std::vector<TileRange> key_ranges(const DsShape& shape, int64_t limit, int64_t kv_heads) {
  std::vector<TileRange> ranges;
  for (int64_t first = 0; first < shape.key_tiles; first = ranges.back().end) {
    int64_t end = range_end(shape, first, limit);
    const int64_t each = kv_heads * shape.batch, rounds = (end - first) / kTilesOfBlock * each / shape.ctas;
    if (end < shape.key_tiles && rounds > 0)
      end = first + kTilesOfBlock * std::max<int64_t>(1, rounds * shape.ctas / each);
    ranges.push_back({first, end, tiles_of_head(shape, first, end)});
  }
  if (ranges.empty()) ranges.push_back({0, 0, 0});
  return ranges;
}

// Query tiles that see a block of 128 keys, of one head.
int64_t item_length(const DsShape& shape, int64_t block) {
  if (shape.variable) return kTilesOfBlock * shape.q_blocks / std::max<int64_t>(shape.batch, 1);
  const int64_t tiles = (shape.q_len + kImageRows - 1) / kImageRows;
  const int64_t first_query = shape.causal ? block * kBlockRows - (shape.k_len - shape.q_len) : 0;
  return tiles - std::clamp<int64_t>(first_query / kImageRows, 0, tiles);
}

// Costs in units of a query tile against 128 keys.
constexpr double kItemCost = 3;    // K and V, the way out
constexpr double kChunkCost = 16;  // two launches, and the time until all CTAs are at work
constexpr double kSumCost = 2;     // 128 rows of dQ that continue from FP32 sums

// Time of the key gradients of a range: items are dealt back and forth, the longest first, so two rounds come out even.
double range_cost(const DsShape& shape, const TileRange& range, int64_t kv_heads, int64_t group) {
  const int64_t each = std::max<int64_t>(kv_heads * shape.batch, 1);
  const int64_t items = (range.end - range.first) / kTilesOfBlock * each;
  const auto length = [&](int64_t item) {
    return static_cast<double>(group * item_length(shape, range.first / kTilesOfBlock + item / each)) + kItemCost;
  };
  double sum = 0;
  bool paired = true;
  for (int64_t item = 0; item < items; item += shape.ctas) {
    paired = !paired;
    const int64_t last = std::min(items, item + shape.ctas) - 1;
    sum += !paired && last + 1 == items ? length(item) : (length(item) + length(last)) / 2;
  }
  return sum;
}

struct Cut {
  int64_t kv_parts, group_parts;
  std::vector<TileRange> ranges;
  double cost;
  double sum_bytes;  // FP32 sums of dQ between ranges of keys, of dV and dK between parts of a group
};

Cut make_cut(const DsShape& shape, int64_t kv_parts, int64_t group_parts, int64_t limit) {
  const int64_t kv_heads = (shape.kv_heads + kv_parts - 1) / kv_parts;
  const int64_t group = (shape.group + group_parts - 1) / group_parts;
  Cut cut{kv_parts, group_parts, key_ranges(shape, limit / (kv_heads * group), kv_heads), 0, 0};
  for (const TileRange& range : cut.ranges) cut.cost += range_cost(shape, range, kv_heads, group) + kChunkCost;
  const auto continued = static_cast<double>((static_cast<int64_t>(cut.ranges.size()) - 1) * kv_heads * group);
  cut.cost += continued * static_cast<double>(shape.q_blocks) * kSumCost / static_cast<double>(shape.ctas);
  cut.cost *= static_cast<double>(kv_parts * group_parts);
  int64_t blocks = 0;
  for (const TileRange& range : cut.ranges) blocks = std::max(blocks, (range.end - range.first) / kTilesOfBlock);
  const auto block_bytes = static_cast<double>(kBlockRows * shape.head_dim * 4);
  if (cut.ranges.size() > 1)
    cut.sum_bytes += static_cast<double>(kv_heads * shape.group * shape.q_blocks) * block_bytes;
  if (group_parts > 1) cut.sum_bytes += 2 * static_cast<double>(kv_heads * shape.batch * blocks) * block_bytes;
  return cut;
}

}  // namespace

size_t ChunkPlan::code_bytes() const { return static_cast<size_t>(most_tiles * kCodeBytes); }
size_t ChunkPlan::scale_bytes() const { return static_cast<size_t>(most_tiles * kScaleBytes); }
int64_t ChunkPlan::most_kv_heads() const { return most_count(kv_heads); }

int64_t ChunkPlan::most_blocks() const {
  int64_t most = 0;
  for (const TileRange& range : tiles) most = std::max(most, (range.end - range.first) / kTilesOfBlock);
  return most;
}

ChunkPlan single_chunk(const DsShape& shape) {
  const int64_t tiles = tiles_of_head(shape, 0, shape.key_tiles);
  return {
      {{0, shape.kv_heads}}, {{0, shape.key_tiles, tiles}}, {{0, shape.group}}, shape.kv_heads * shape.group * tiles};
}

ChunkPlan plan_chunks(const DsShape& shape, size_t cap) {
  const ChunkPlan all = single_chunk(shape);
  // The kernels count the tiles of a chunk in 32 bits.
  const auto limit = static_cast<int64_t>(std::min<size_t>(cap / (kCodeBytes + kScaleBytes), INT32_MAX));
  if (all.most_tiles <= limit) return all;
  const int64_t first_block = tiles_of_head(shape, 0, kTilesOfBlock);  // of the most tiles
  // Variable lengths: how many items a range really has is not known here, so neither is what parted groups need.
  const int64_t most_group_parts = shape.variable ? 1 : shape.group;
  Cut best{};
  const auto part = [](int64_t parts, int64_t most) { return parts == most ? most + 1 : std::min(2 * parts, most); };
  for (int64_t kv_parts = 1; kv_parts <= shape.kv_heads; kv_parts = part(kv_parts, shape.kv_heads))
    for (int64_t group_parts = 1; group_parts <= most_group_parts; group_parts = part(group_parts, most_group_parts)) {
      const int64_t heads =
          (shape.kv_heads + kv_parts - 1) / kv_parts * ((shape.group + group_parts - 1) / group_parts);
      const bool smallest = kv_parts == shape.kv_heads && group_parts == most_group_parts;
      if (heads * first_block > limit && !smallest) continue;
      Cut cut = make_cut(shape, kv_parts, group_parts, limit);
      if (cut.sum_bytes > static_cast<double>(cap) && !smallest) continue;
      if (best.ranges.empty() || cut.cost < 0.99 * best.cost) best = std::move(cut);
    }
  ChunkPlan plan{even_ranges(shape.kv_heads, best.kv_parts), std::move(best.ranges),
                 even_ranges(shape.group, best.group_parts), 0};
  int64_t widest = 0;
  for (const TileRange& range : plan.tiles) widest = std::max(widest, range.tiles_per_head);
  plan.most_tiles = plan.most_kv_heads() * most_count(plan.group) * widest;
  return plan;
}

}  // namespace dmattn::cuda
