// Launches of dQ.
#include "cuda/kernels/query_gradients.cuh"

#include <algorithm>

#include "cuda/collective/launch.h"

namespace dmattn::cuda {

cudaError_t launch_query_gradients(const Launch& launch, const Shape& shape, const KeyCodes& keys, const DsChunk& chunk,
                                   const QueryGradients& output) {
  const Sequences& all = shape.sequences;
  DqParams p{};
  p.shape = shape;
  p.keys = keys;
  p.chunk = chunk;
  p.index = ds_index(all.variable != 0, shape.causal != 0, all.q_len, all.k_len, chunk.tile_first, chunk.tile_end);
  p.output = output;
  p.by_item_heads = divisor(int64_t{chunk.kv_heads} * chunk.group_heads * all.batch);
  p.by_batch = divisor(all.batch);
  p.by_group_heads = divisor(chunk.group_heads);
  p.items = chunk.kv_heads * chunk.group_heads * all.batch * all.q_blocks_max;
  if (p.items == 0) return cudaSuccess;
  return with_head_dim(launch.head_dim, [&](auto dim) {
    using T = DqTraits<decltype(dim)::value>;
    return start_kernel<query_gradients_kernel<T>, T::kThreads, T::kBytes>(
        launch, std::min(p.items, launch.multiprocessors), p);
  });
}

}  // namespace dmattn::cuda
