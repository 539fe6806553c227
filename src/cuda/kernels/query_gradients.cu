// Launches of dQ.
#include "cuda/kernels/query_gradients.cuh"

#include <algorithm>

#include "cuda/collective/launch.h"

namespace dmattn::cuda {
namespace {

// 256 queries a CTA where that leaves each multiprocessor this many halves of an item; else it would be idle too long
// at the end.
constexpr int64_t kWideRounds = 3;

}  // namespace

cudaError_t launch_query_gradients(const Launch& launch, const Shape& shape, const KeyCodes& keys, const DsChunk& chunk,
                                   const QueryGradients& output) {
  const Sequences& all = shape.sequences;
  const int64_t heads = int64_t{chunk.kv_heads} * chunk.group_heads * all.batch;
  if (heads == 0 || all.q_blocks_max == 0) return cudaSuccess;
  DqParams p{};
  p.shape = shape;
  p.keys = keys;
  p.chunk = chunk;
  p.index = ds_index(all.variable != 0, shape.causal != 0, all.q_len, all.k_len, chunk.tile_first, chunk.tile_end);
  p.output = output;
  p.by_item_heads = divisor(heads);
  p.by_batch = divisor(all.batch);
  p.by_group_heads = divisor(chunk.group_heads);
  const auto start = [&]<class T>(T) {
    p.items = static_cast<int32_t>(heads * ((all.q_blocks_max + T::kGroupTiles - 1) / T::kGroupTiles));
    return start_kernel<query_gradients_kernel<T>, T::kThreads, T::kBytes>(
        launch, std::min(p.items, launch.multiprocessors), p);
  };
  return with_head_dim(launch.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    if constexpr (kDim < 256) {  // twice the queries want twice the sums' registers
      const int64_t wide_items = heads * (all.q_blocks_max / 2);
      if (wide_items * 2 >= kWideRounds * launch.multiprocessors) return start(DqTraits<kDim, 2>());
    }
    return start(DqTraits<kDim, 1>());
  });
}

}  // namespace dmattn::cuda
