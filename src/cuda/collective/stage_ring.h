// A ring of shared-memory stages: which one is next, and the parity of its barriers. One register.
#pragma once

#include <cstdint>

namespace dmattn::cuda {

template <int kStages>
struct StageRing {
  static_assert((kStages & (kStages - 1)) == 0);
  uint32_t step = 0;

  __device__ __forceinline__ int stage() const { return static_cast<int>(step % kStages); }
  // Of the full barrier; a producer waits for the empty one with parity() ^ 1.
  __device__ __forceinline__ uint32_t parity() const { return step / kStages % 2; }
  __device__ __forceinline__ void advance() { ++step; }
  __device__ __forceinline__ StageRing next() const { return {step + 1}; }
};

}  // namespace dmattn::cuda
