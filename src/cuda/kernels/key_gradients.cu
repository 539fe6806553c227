// Launches of the key-stationary backward.
#include "cuda/kernels/key_gradients.h"

#include "cuda/collective/key_plan.h"

namespace dmattn::cuda {

cudaError_t launch_key_gradients(const Launch& launch, const Shape& shape, bool rounded, const KeyCodes& keys,
                                 const QueryCodes& queries, const GradientCodes& gradients, const DsChunk& chunk,
                                 const KeyGradients& output) {
  const Sequences& all = shape.sequences;
  KeyParams p{};
  p.shape = shape;
  p.keys = keys;
  p.queries = queries;
  p.gradients = gradients;
  p.chunk = chunk;
  p.index = ds_index(all.variable != 0, shape.causal != 0, all.q_len, all.k_len, chunk.tile_first, chunk.tile_end);
  p.output = output;
  p.group = shape.q_heads / shape.kv_heads;
  p.item_heads = chunk.kv_heads * all.batch;
  const int64_t blocks = (chunk.tile_end - chunk.tile_first + 1) / 2;
  p.items = static_cast<int32_t>(blocks * p.item_heads);
  if (p.items == 0) return cudaSuccess;
  switch (launch.head_dim) {
    case 64: return rounded ? key_gradients_64_rounded(launch, p) : key_gradients_64(launch, p);
    case 128: return rounded ? key_gradients_128_rounded(launch, p) : key_gradients_128(launch, p);
    case 256: {
      if (output.dv.data)
        if (const cudaError_t error = key_gradients_256_dv(launch, p)) return error;
      if (!output.dk.data && !chunk.codes) return cudaSuccess;
      return rounded ? key_gradients_256_dk_rounded(launch, p) : key_gradients_256_dk(launch, p);
    }
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dmattn::cuda
