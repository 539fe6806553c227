// The instances of the key-stationary backward, one file per head_dim so that they compile side by side.
#pragma once

#include "cuda/kernels/kernels.h"

namespace dmattn::cuda {

struct KeyParams;
cudaError_t key_gradients_64(const Launch& launch, const KeyParams& p);
cudaError_t key_gradients_64_rounded(const Launch& launch, const KeyParams& p);
cudaError_t key_gradients_128(const Launch& launch, const KeyParams& p);
cudaError_t key_gradients_128_rounded(const Launch& launch, const KeyParams& p);
cudaError_t key_gradients_256_dv(const Launch& launch, const KeyParams& p);  // P's codes: the same for all modes
cudaError_t key_gradients_256_dk(const Launch& launch, const KeyParams& p);
cudaError_t key_gradients_256_dk_rounded(const Launch& launch, const KeyParams& p);

}  // namespace dmattn::cuda
