// The biases of one 128-key block of a KV head for all mean blocks of a query head: mu . (k - mean), in FP32.
//
// 128 threads, 8 x 16: a thread has kRows mean blocks and the keys 4 n ... 4 n + 3 of both images of the block, so 8 kRows
// accumulators, each one chain of fused multiply-adds over ascending channels (docs/numerics.md, section 1). Sixteen
// neighbouring lanes have the same rows: an image's largest bias needs four shuffles.
//
// Operands pass through shared memory 32 channels at a time, as [channel][row or key]. Loads take whole lines of a row;
// an exclusive-or on the row or key, by channel, spreads the transposed stores over the banks and keeps fours together.
#pragma once

#include "cuda/collective/pack_rows.h"

namespace dmattn::cuda::pack {

constexpr int kBiasThreads = 128;
constexpr int kBiasStep = 32;                                            // channels in shared memory
constexpr int kBiasRowThreads = 8, kBiasKeyThreads = 16, kBiasKeys = 8;  // kBiasKeys: of a thread

template <int kRows>
struct BiasStage {
  static constexpr int kMeans = kBiasRowThreads * kRows;
  static constexpr int kFours = kMeans / 4;  // a power of two
  float mean[kBiasStep][kMeans];
  float key[kBiasStep][kBlockRows];

  static __device__ __forceinline__ int mean_at(int channel, int row) {
    return row ^ (4 * ((channel / 4) % (kFours < 8 ? kFours : 8)));
  }
  static __device__ __forceinline__ int key_at(int channel, int key) { return key ^ (8 * ((channel / kChunk) % 4)); }
};

// mu of the mean blocks [0, blocks), rows of `head_dim` floats; zero beyond.
template <int kRows>
__device__ __forceinline__ void stage_means(BiasStage<kRows>& stage, const float* mean, int blocks, int head_dim,
                                            int first) {
  using Stage = BiasStage<kRows>;
#pragma unroll
  for (int at = threadIdx.x; at < Stage::kMeans * kBiasStep / 4; at += kBiasThreads) {
    const int row = at / (kBiasStep / 4), c = 4 * (at % (kBiasStep / 4));
    float4 x = {0, 0, 0, 0};
    if (row < blocks) x = *reinterpret_cast<const float4*>(mean + row * head_dim + first + c);
    const int column = Stage::mean_at(c, row);
    stage.mean[c][column] = x.x;
    stage.mean[c + 1][column] = x.y;
    stage.mean[c + 2][column] = x.z;
    stage.mean[c + 3][column] = x.w;
  }
}

// k - mean of the block's keys; zero where there is no key.
template <int kRows>
__device__ __forceinline__ void stage_keys(BiasStage<kRows>& stage, const RowSource& keys, const float* k_mean,
                                           int first) {
  using Stage = BiasStage<kRows>;
  constexpr int kChunks = kBiasStep / kChunk, kPasses = kBlockRows * kChunks / kBiasThreads;
  const int chunk = threadIdx.x % kChunks, key0 = threadIdx.x / kChunks;
  alignas(16) float mean[kChunk];
  *reinterpret_cast<float4*>(mean) = __ldg(reinterpret_cast<const float4*>(k_mean + first + kChunk * chunk));
  *reinterpret_cast<float4*>(mean + 4) = __ldg(reinterpret_cast<const float4*>(k_mean + first + kChunk * chunk + 4));
  const auto key_of = [&](int pass) { return key0 + pass * (kBiasThreads / kChunks); };
  const auto address = [&](int pass) { return keys.first + key_of(pass) * keys.stride + first + kChunk * chunk; };
  const auto put = [&](int pass, const Chunk& x) {
    const int key = key_of(pass);
#pragma unroll
    for (int c = 0; c < kChunk; ++c)
      stage.key[kChunk * chunk + c][Stage::key_at(kChunk * chunk, key)] =
          key < keys.rows ? __fsub_rn(channel(x, c), mean[c]) : 0.0f;
  };
  if (keys.aligned) {
#pragma unroll 1  // registers are short
    for (int pass = 0; pass < kPasses; pass += 2) {
      Chunk x[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (key_of(pass + i) < keys.rows) x[i] = load_chunk(address(pass + i));
#pragma unroll
      for (int i = 0; i < 2; ++i) put(pass + i, x[i]);
    }
  } else {
#pragma unroll 1  // rare, and registers are short
    for (int pass = 0; pass < kPasses; ++pass)
      put(pass, key_of(pass) < keys.rows ? load_chunk_by_elements(address(pass)) : Chunk{});
  }
}

// This thread's accumulators take the staged channels. `row`: its first mean block, `key`: 4 n.
template <int kRows>
__device__ __forceinline__ void multiply_stage(const BiasStage<kRows>& stage, int row, int key,
                                               float (&sum)[kRows][kBiasKeys]) {
  using Stage = BiasStage<kRows>;
#pragma unroll 1  // eight channels at a time: more addresses than that would not fit the registers
  for (int first = 0; first < kBiasStep; first += kChunk)
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int c = first + i;
      const float* const mean = &stage.mean[c][0];
      alignas(16) float mu[kRows], k[kBiasKeys];
      if constexpr (kRows >= 4) {
#pragma unroll
        for (int r = 0; r < kRows; r += 4)
          *reinterpret_cast<float4*>(mu + r) = *reinterpret_cast<const float4*>(mean + Stage::mean_at(c, row + r));
      } else if constexpr (kRows == 2) {
        *reinterpret_cast<float2*>(mu) = *reinterpret_cast<const float2*>(mean + Stage::mean_at(c, row));
      } else {
        mu[0] = mean[Stage::mean_at(c, row)];
      }
      const float* const keys = &stage.key[c][Stage::key_at(c, key)];
      *reinterpret_cast<float4*>(k) = *reinterpret_cast<const float4*>(keys);
      *reinterpret_cast<float4*>(k + 4) = *reinterpret_cast<const float4*>(keys + kImageRows);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int j = 0; j < kBiasKeys; ++j) sum[r][j] = __fmaf_rn(k[j], mu[r], sum[r][j]);
    }
}

}  // namespace dmattn::cuda::pack
