#include "cuda/kernels/key_gradients.cuh"
#include "cuda/kernels/key_gradients.h"

namespace dmattn::cuda {

cudaError_t key_gradients_256_dv(const Launch& launch, const KeyParams& p) {
  return start_key_gradients<KeyTraits<256, KeyRole::dv>, true>(launch, p);
}
cudaError_t key_gradients_256_dk(const Launch& launch, const KeyParams& p) {
  return start_key_gradients<KeyTraits<256, KeyRole::dk>, false>(launch, p);
}
cudaError_t key_gradients_256_dk_rounded(const Launch& launch, const KeyParams& p) {
  return start_key_gradients<KeyTraits<256, KeyRole::dk>, true>(launch, p);
}

}  // namespace dmattn::cuda
