// Work items of the query-stationary kernels (forward, delta): 128 queries of one head and the keys that they see.
// Items go by rank first, counted from each sequence's last block, then by batch entry and head: in a causal batch the
// longest come first. CTAs take them in turn, every other round backwards, so that the sums of their lengths agree.
#pragma once

#include "cuda/params.h"

namespace dmattn::cuda {

struct QueryItem {
  SequenceView view;
  int32_t sequence, head;
  int32_t block;  // 128 queries, counted from the sequence's first; negative: the sequence has no such block
  int32_t tiles;  // of 64 keys, counted from the sequence's first, that some query of the block sees
};

// All items of a launch, most that a launch may have (indices of the round after the last fit as well), CTAs for them.
constexpr int64_t kMostQueryItems = INT32_MAX / 2;
inline int64_t query_item_count(const Shape& shape) {
  return static_cast<int64_t>(shape.sequences.q_blocks_max) * shape.sequences.batch * shape.q_heads;
}
inline int32_t query_item_grid(int32_t items, int32_t multiprocessors) {
  return items < multiprocessors ? items : multiprocessors;
}

// Keys that a query sees, bottom-right aligned. Past the sequence's last query: as if the mask went on.
__device__ __forceinline__ int32_t visible_keys(const SequenceView& view, bool causal, int32_t row) {
  if (!causal) return view.k_rows;
  return min(max(view.k_rows + (row + 1 - view.q_rows), 0), view.k_rows);
}

// Tiles that the queries [row, row + rows) see; none if the sequence ends before `row`.
__device__ __forceinline__ int32_t tiles_seen(const SequenceView& view, bool causal, int32_t row, int32_t rows) {
  if (row >= view.q_rows) return 0;
  const int32_t keys = visible_keys(view, causal, min(row + rows, view.q_rows) - 1);
  return (keys + kImageRows - 1) / kImageRows;
}

// The same number, but the compiler cannot know: what depends on it is computed again, not kept in registers.
__device__ __forceinline__ int32_t fresh(int32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Item of this CTA in a round; there is none from the first index on that is not below the number of items.
__device__ __forceinline__ int32_t query_item_index(int32_t round) {
  const auto grid = static_cast<int32_t>(gridDim.x), cta = static_cast<int32_t>(blockIdx.x);
  return round * grid + (round % 2 == 0 ? cta : grid - 1 - cta);
}

__device__ __forceinline__ QueryItem query_item(const Shape& shape, int32_t index) {
  QueryItem item;
  const int32_t rank = shape.by_row_heads.divide(index), rest = index - rank * shape.by_row_heads.value;
  item.sequence = shape.by_q_heads.divide(rest);
  item.head = rest - item.sequence * shape.q_heads;
  item.view = sequence_view(shape.sequences, item.sequence);
  item.block = (item.view.q_rows + kBlockRows - 1) / kBlockRows - 1 - rank;
  item.tiles = item.block < 0 ? 0 : tiles_seen(item.view, shape.causal != 0, item.block * kBlockRows, kBlockRows);
  return item;
}

}  // namespace dmattn::cuda
