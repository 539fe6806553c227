// Intervals of 1,024 queries that share the scales of the backward's codes, one cluster of CTAs each, one image of 64
// rows a CTA.
#pragma once

#include "cuda/params.h"
#include "numerics/constants.h"

namespace dmattn::cuda::pack {

constexpr int kIntervalBlocks = numerics::kFlushRows / kBlockRows;
constexpr int kClusterCtas = 2 * kIntervalBlocks;  // one an image
constexpr int kHalves = kBlockRows / kImageRows;

// Clusters of a head. An interval of sequence b whose first block is f and that starts i intervals into it has index
// f / 8 + b + i with variable lengths: no two share one, as a sequence's last interval reaches at most 7 blocks too
// far.
__host__ __device__ __forceinline__ int64_t interval_count(const Sequences& s) {
  if (s.variable) return s.q_blocks / kIntervalBlocks + static_cast<int64_t>(s.batch);
  return static_cast<int64_t>(s.batch) * ((s.q_blocks_max + kIntervalBlocks - 1) / kIntervalBlocks);
}

struct Interval {
  int32_t sequence, first_block;  // block counted from the sequence's first; may be past its last
};
__device__ __forceinline__ Interval interval_at(const Sequences& s, int32_t index) {
  if (!s.variable) {
    const int32_t each = (s.q_blocks_max + kIntervalBlocks - 1) / kIntervalBlocks;
    return {index / each, index % each * kIntervalBlocks};
  }
  const auto first_index = [&](int32_t b) { return s.q_block_first[b] / kIntervalBlocks + b; };
  int32_t low = 0, high = s.batch;  // the last sequence whose first interval is at or before this one
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    (first_index(middle) <= index ? low : high) = middle;
  }
  return {low, (index - first_index(low)) * kIntervalBlocks};
}

// One image of 64 queries of a head.
struct GradientImage {
  int32_t head, sequence, kv_head;
  int32_t first, rows;  // first query within the sequence; queries from there on (may be below 1)
  int32_t peers;        // CTAs of the cluster that have an image, this one among them; below 1 for none
  int32_t rank;         // of this CTA
  int64_t block;        // padded block over all heads
  SequenceView view;
  __device__ int half() const { return rank % kHalves; }
  __device__ int64_t image() const { return block * kHalves + half(); }
};

__device__ __forceinline__ GradientImage gradient_image(const Shape& shape) {
  const Sequences& s = shape.sequences;
  GradientImage out;
  // From the last on: of q, that is what the cache still holds.
  const uint32_t cluster = (gridDim.x - 1 - blockIdx.x) / kClusterCtas;
  const auto intervals = static_cast<uint32_t>(interval_count(s));
  out.rank = static_cast<int32_t>(blockIdx.x % kClusterCtas);
  out.head = static_cast<int32_t>(cluster / intervals);
  out.kv_head = out.head / (shape.q_heads / shape.kv_heads);
  const Interval interval = interval_at(s, static_cast<int32_t>(cluster % intervals));
  out.sequence = interval.sequence;
  out.view = sequence_view(s, interval.sequence);
  const int32_t blocks = (out.view.q_rows + kBlockRows - 1) / kBlockRows;
  out.peers = kHalves * min(blocks - interval.first_block, kIntervalBlocks);
  const int32_t local = interval.first_block + out.rank / kHalves;
  out.first = local * kBlockRows + out.half() * kImageRows;
  out.rows = out.view.q_rows - out.first;
  out.block = static_cast<int64_t>(out.head) * s.q_blocks + out.view.q_block0 + local;
  return out;
}

}  // namespace dmattn::cuda::pack
