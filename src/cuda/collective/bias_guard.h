// Scale of a 128-row block of centred q: large enough for the largest bias that its queries meet (docs/numerics.md,
// section 1, "Guard").
#pragma once

#include "cuda/collective/pack_rows.h"
#include "numerics/bias.h"
#include "numerics/scale.h"

namespace dmattn::cuda::pack {

// Largest |bias| / (k_scale * capacity) over the sequence's keys, in every thread; NaN if a bias is not finite. One
// division an image is enough: dividing by the same number keeps the order.
template <int kWarps>
__device__ __forceinline__ double bias_need(const float* amax, const float* k_scale, int32_t images,
                                            unsigned long long (&scratch)[kWarps]) {
  unsigned long long most = 0;  // bits of non-negative doubles order like the numbers, NaN on top
  for (int32_t i = threadIdx.x; i < images; i += kWarps * 32) {
    const double scale = k_scale[i];
    const double need = __ddiv_rn(static_cast<double>(amax[i]), __dmul_rn(scale, numerics::kBiasCapacity));
    if (scale > 0) most = max(most, static_cast<unsigned long long>(__double_as_longlong(need)));
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, lane));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) most = max(most, scratch[warp]);
  return __longlong_as_double(static_cast<long long>(most));
}

// Scale of one 128-row block of centred q. An all-zero block still has to carry its bias, hence the floor.
__device__ __forceinline__ numerics::BlockScale centred_scale(float amax, double need) {
  const auto scale = numerics::block_scale(amax < numerics::kAmaxFloor ? numerics::kAmaxFloor : amax);
  if (need != need) return {numerics::quiet_nan(), numerics::quiet_nan()};
  if (scale.scale != scale.scale) return scale;
  const int exponent = numerics::bias_guard_exponent(need, scale.scale);  // at most 300
  const double up = __longlong_as_double(static_cast<long long>(1023 + exponent) << 52);
  const double down = __longlong_as_double(static_cast<long long>(1023 - exponent) << 52);
  // Exact in FP64, so one rounding in all, as ldexp has.
  return {__double2float_rn(__dmul_rn(scale.scale, up)), __double2float_rn(__dmul_rn(scale.inverse, down))};
}

}  // namespace dmattn::cuda::pack
