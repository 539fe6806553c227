#include "cuda/kernels/key_gradients.cuh"
#include "cuda/kernels/key_gradients.h"

namespace dmattn::cuda {

cudaError_t key_gradients_128(const Launch& launch, const KeyParams& p) {
  return start_key_gradients<KeyTraits<128, KeyRole::both>, false>(launch, p);
}
cudaError_t key_gradients_128_rounded(const Launch& launch, const KeyParams& p) {
  return start_key_gradients<KeyTraits<128, KeyRole::both>, true>(launch, p);
}

}  // namespace dmattn::cuda
