// The biases of 64 keys for all mean blocks of a query head, mu . (k - mean), on the tensor cores.
//
// mu is BF16. k - mean in FP32 is the sum of three BF16 numbers, each the upper half of what is left (8 of its 24
// bits), so products are exact; those of the two small terms have accumulators of their own, added at the end.
//
// Grade: bounded. One step of 16 channels truncates its terms at 2^-24 or less of the largest of them and of the
// accumulator, then its sum to 24 bits. After D / 16 steps a bias is off by about D 2^-24 of sum |mu| |k - mean| at
// worst, which is also what D fused multiply-adds may lose. Simulated on normal numbers (D = 256): 0.1 2^-20 with mixed
// signs, 0.9 2^-20 if all products have one sign; hence the grade, 2^-20. The order is fixed: the bits follow from the
// inputs alone, and forward and backward see the same biases. What is not finite stays so: an infinity leaves NaN in
// the lower terms, and a NaN is one in every term.
//
// A warp has 16 keys and up to 64 mean blocks. Channels are contracted in an order in which a lane's share of a chunk
// of 32 channels is 8 neighbours, one load: of step s (0, 1) lane t of four has channels 8 t + 4 s ... 8 t + 4 s + 3.
#pragma once

#include "cuda/collective/pack_rows.h"
#include "cuda/ptx/mma.h"

namespace dmattn::cuda::pack {

constexpr int kBiasThreads = 128;
constexpr int kBiasWarps = kBiasThreads / 32;
constexpr int kBiasKeys = kImageRows / kBiasWarps;  // of a warp
constexpr int kBiasChannels = 32;                   // of a chunk
constexpr int kMeanTile = 16;                       // mean blocks of a product

// Fragments of mu as ptx::multiply_bf16 takes them, and the K mean.
template <int kDim, int kTiles>
struct BiasStage {
  static constexpr int kChunks = kDim / kBiasChannels;
  uint4 mu[kChunks][2][kTiles][32];
  float4 k_mean[kDim / 4];
};

// Two BF16 numbers from the upper halves of a and b.
__device__ __forceinline__ uint32_t upper_halves(float a, float b) {
  return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
}
__device__ __forceinline__ float below_upper_half(float x) {
  return __fsub_rn(x, __uint_as_float(__float_as_uint(x) & 0xffff0000u));
}

// mu of the mean blocks [0, blocks), rows of kDim floats; zero beyond. The caller synchronises.
template <int kDim, int kTiles>
__device__ __forceinline__ void stage_means(BiasStage<kDim, kTiles>& stage, const float* mean, int blocks,
                                            const float* k_mean) {
  using Stage = BiasStage<kDim, kTiles>;
  const int lane = threadIdx.x % 32, row = lane / 4, channel = kChunk * (lane % 4);
  for (int at = threadIdx.x / 32; at < Stage::kChunks * kTiles; at += kBiasWarps) {
    const int chunk = at / kTiles, tile = at % kTiles;
    float4 x[2][2] = {};  // rows row and row + 8, steps
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int block = kMeanTile * tile + row + 8 * h;
      if (block >= blocks) continue;
      const auto* const from = reinterpret_cast<const float4*>(mean + block * kDim + kBiasChannels * chunk + channel);
      x[h][0] = from[0];
      x[h][1] = from[1];
    }
#pragma unroll
    for (int s = 0; s < 2; ++s)
      stage.mu[chunk][s][tile][lane] = {upper_halves(x[0][s].x, x[0][s].y), upper_halves(x[1][s].x, x[1][s].y),
                                        upper_halves(x[0][s].z, x[0][s].w), upper_halves(x[1][s].z, x[1][s].w)};
  }
  for (int at = threadIdx.x; at < kDim / 4; at += kBiasThreads)
    stage.k_mean[at] = reinterpret_cast<const float4*>(k_mean)[at];
}

// A lane's two keys of a warp's 16: keys bias_key(lane, 0) and 2 more. So that its results are of four neighbouring
// keys, column n of product j is key 4 (n / 2) + 2 j + n % 2.
constexpr int kLaneKeys = 2;
__device__ __forceinline__ int bias_key(int lane, int j) { return 4 * (lane / 8) + 2 * j + lane / 4 % 2; }

// The accumulators take one chunk of channels of the warp's keys.
template <int kDim, int kTiles>
__device__ __forceinline__ void multiply_chunk(const BiasStage<kDim, kTiles>& stage, int chunk,
                                               const Chunk (&k)[kLaneKeys], float (&large)[kTiles][kLaneKeys][4],
                                               float (&small)[kTiles][kLaneKeys][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const float4 mean = stage.k_mean[(kBiasChannels * chunk + kChunk * (lane % 4)) / 4 + s];
    uint32_t high[kLaneKeys][2], middle[kLaneKeys][2], low[kLaneKeys][2];
#pragma unroll
    for (int j = 0; j < kLaneKeys; ++j)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float a = __fsub_rn(channel(k[j], 4 * s + 2 * pair), pair ? mean.z : mean.x);
        float b = __fsub_rn(channel(k[j], 4 * s + 2 * pair + 1), pair ? mean.w : mean.y);
        high[j][pair] = upper_halves(a, b);
        a = below_upper_half(a), b = below_upper_half(b);
        middle[j][pair] = upper_halves(a, b);
        low[j][pair] = upper_halves(below_upper_half(a), below_upper_half(b));
      }
    uint4 mu[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) mu[m] = stage.mu[chunk][s][m][lane];
    const auto multiply = [&](float(&sum)[kTiles][kLaneKeys][4], const uint32_t(&x)[kLaneKeys][2]) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int j = 0; j < kLaneKeys; ++j) ptx::multiply_bf16(sum[m][j], mu[m], x[j][0], x[j][1]);
    };
    multiply(small, low);
    multiply(large, high);
    multiply(small, middle);
  }
}

}  // namespace dmattn::cuda::pack
