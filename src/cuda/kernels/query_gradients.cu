// Launches of dQ.
#include "cuda/kernels/query_gradients.cuh"

namespace dmattn::cuda {
namespace {

template <int kHeadDim>
cudaError_t start(const Launch& launch, const DqParams& p) {
  using T = DqTraits<kHeadDim>;
  auto* kernel = query_gradients_kernel<T>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kBytes))
    return error;
  const auto grid = static_cast<unsigned>(p.items < launch.multiprocessors ? p.items : launch.multiprocessors);
  kernel<<<grid, T::kThreads, T::kBytes, launch.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_query_gradients(const Launch& launch, const Shape& shape, const KeyCodes& keys, const DsChunk& chunk,
                                   const QueryGradients& output) {
  const Sequences& all = shape.sequences;
  DqParams p{};
  p.shape = shape;
  p.keys = keys;
  p.chunk = chunk;
  p.index = ds_index(all.variable != 0, shape.causal != 0, all.q_len, all.k_len, chunk.tile_first, chunk.tile_end);
  p.output = output;
  p.group = shape.q_heads / shape.kv_heads;
  p.item_heads = chunk.heads * all.batch;
  p.items = all.q_blocks_max * p.item_heads;
  if (p.items == 0) return cudaSuccess;
  switch (launch.head_dim) {
    case 64: return start<64>(launch, p);
    case 128: return start<128>(launch, p);
    case 256: return start<256>(launch, p);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dmattn::cuda
