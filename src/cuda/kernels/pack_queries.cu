// Q for S: means of blocks of queries, their biases, and codes of q - mu with scales that let the bias fit
// (docs/numerics.md, section 1: "Q mean", "Column bias"). Without centring: codes of q alone.
//
// Three launches. query_means: a CTA per mean block and query head; its threads add up 64 rows of 8 channels each, and
// those partial sums are added ascending. column_bias: a CTA per 128 keys and query head (collective/bias_gemm.h). It
// covers every key, seen or not, as the guard asks for all of the sequence. query_codes: a CTA of 2 D threads per block
// of 128 rows and query head (collective/pack_rows.h); a thread has four rows of either image.
#include "cuda/collective/bias_gemm.h"
#include "cuda/collective/bias_guard.h"
#include "cuda/collective/pack_launch.h"
#include "cuda/collective/pack_rows.h"
#include "cuda/kernels/kernels.h"
#include "numerics/bf16.h"
#include "numerics/scale.h"

namespace dmattn::cuda {
namespace {

using pack::Chunk;
using pack::ThreadRows;

// A block of 128 queries of one head.
struct QueryBlock {
  int32_t head, owner;  // owner: sequence, -1 if none
  int32_t local;        // block within the sequence
  int32_t first, rows;  // first query within the sequence; queries from there on
  int64_t at;           // index of the block over all heads
  SequenceView view;
};

__device__ __forceinline__ QueryBlock query_block(const Sequences& s, int64_t item) {
  QueryBlock out;
  const uint32_t blocks = static_cast<uint32_t>(s.q_blocks);
  const auto block = static_cast<int32_t>(static_cast<uint32_t>(item) % blocks);
  out.head = static_cast<int32_t>(static_cast<uint32_t>(item) / blocks);
  out.at = item;
  out.owner = q_block_owner(s, block);
  if (out.owner < 0) return out;
  out.view = sequence_view(s, out.owner);
  out.local = block - out.view.q_block0;
  out.first = out.local * kBlockRows;
  out.rows = out.view.q_rows - out.first;
  return out;
}

__device__ __forceinline__ int32_t mean_span(const SequenceView& view) {  // in blocks of 128 rows
  return static_cast<int32_t>(numerics::query_mean_rows(view.q_rows) / kBlockRows);
}

__device__ __forceinline__ int64_t mean_index(const Shape& shape, int32_t head, int32_t b, int32_t block) {
  return (static_cast<int64_t>(head) * shape.sequences.batch + b) * shape.mean_blocks_max + block;
}

// Enough lanes for the two partial sums of the usual mean block of 128 rows.
template <int kDim>
struct MeanThreads {
  static constexpr int kLanes = kDim / pack::kChunk;
  static constexpr int kThreads = 2 * kLanes < 32 ? 32 : 2 * kLanes;
  static constexpr int kParts = kThreads / kLanes;
};

template <int kDim>
__global__ void __launch_bounds__(MeanThreads<kDim>::kThreads)
    query_means(Shape shape, TensorView q, QueryCodes codes) {
  using Threads = MeanThreads<kDim>;
  const Sequences& s = shape.sequences;
  const QueryBlock at = query_block(s, blockIdx.x);
  if (at.owner < 0) return;
  const int32_t span = mean_span(at.view), block = at.local / span;
  if (at.local % span != 0 || block >= shape.mean_blocks_max) return;  // not the first of a mean block
  const int part = threadIdx.x / Threads::kLanes, channel = pack::kChunk * (threadIdx.x % Threads::kLanes);
  const int32_t rows = min(at.rows, span * kBlockRows);
  const uint16_t* const first = row_pointer(q, s, at.owner, at.view.q_first, at.first, at.head) + channel;
  __shared__ float partial[Threads::kParts][kDim];
  float total[pack::kChunk] = {};  // of the first kLanes threads
  for (int32_t row0 = 0; row0 < rows; row0 += Threads::kParts * numerics::kMeanRows) {
    float sum[pack::kChunk] = {};
    const int32_t row = row0 + part * numerics::kMeanRows;
    const int32_t count = min(rows - row, numerics::kMeanRows);
    pack::add_rows(first + row * q.seq_stride, q.seq_stride, count, q.aligned, sum);
#pragma unroll
    for (int i = 0; i < pack::kChunk; ++i) partial[part][channel + i] = sum[i];
    __syncthreads();
    if (part == 0) {
      for (int p = 0; p < Threads::kParts && row0 + p * numerics::kMeanRows < rows; ++p)
#pragma unroll
        for (int i = 0; i < pack::kChunk; ++i) total[i] = __fadd_rn(total[i], partial[p][channel + i]);
    }
    __syncthreads();
  }
  if (part != 0) return;
  float* const out = codes.mean + mean_index(shape, at.head, at.owner, block) * kDim + channel;
#pragma unroll
  for (int i = 0; i < pack::kChunk; ++i) out[i] = numerics::bf16_round(__fdiv_rn(total[i], static_cast<float>(rows)));
}

template <int kRows>
__global__ void __launch_bounds__(pack::kBiasThreads, 4)
    column_bias(Shape shape, int32_t head_dim, TensorView k, KeyCodes keys, QueryCodes codes) {
  using Stage = pack::BiasStage<kRows>;
  const Sequences& s = shape.sequences;
  const int32_t head = static_cast<int32_t>(blockIdx.x / static_cast<uint32_t>(s.k_blocks));
  const int32_t block = static_cast<int32_t>(blockIdx.x % static_cast<uint32_t>(s.k_blocks));
  const int32_t b = k_block_owner(s, block);
  if (b < 0) return;
  const SequenceView view = sequence_view(s, b);
  const int32_t span = mean_span(view), q_blocks = (view.q_rows + kBlockRows - 1) / kBlockRows;
  const int32_t means = min((q_blocks + span - 1) / span, shape.mean_blocks_max);
  const int32_t kv_head = head / (shape.q_heads / shape.kv_heads);
  const int32_t first_key = (block - view.k_block0) * kBlockRows, keys_left = view.k_rows - first_key;
  const pack::RowSource source = pack::row_source(k, s, b, view.k_first, first_key, kv_head, keys_left);
  const float* const k_mean = keys.k_mean + (static_cast<int64_t>(kv_head) * s.batch + b) * head_dim;
  const float* const mean = codes.mean + mean_index(shape, head, b, 0) * head_dim;

  __shared__ __align__(16) Stage stage;
  const int row = kRows * (threadIdx.x / pack::kBiasKeyThreads), key = 4 * (threadIdx.x % pack::kBiasKeyThreads);
  const bool busy = kRows * (threadIdx.x / 32 * 2) < means;  // some row of this warp exists
  float sum[kRows][pack::kBiasKeys] = {};
  for (int first = 0; first < head_dim; first += pack::kBiasStep) {
    if (first > 0) __syncthreads();
    pack::stage_means<kRows>(stage, mean, means, head_dim, first);
    pack::stage_keys<kRows>(stage, source, k_mean, first);
    __syncthreads();
    if (busy) pack::multiply_stage<kRows>(stage, row, key, sum);
  }
  if (!busy) return;

  const float* const k_scale = keys.k_scale + (static_cast<int64_t>(kv_head) * s.k_blocks + block) * 2;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t line = static_cast<int64_t>(head) * shape.mean_blocks_max + row + r;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[4];
      uint32_t amax = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = kImageRows * half + key + j < keys_left ? sum[r][4 * half + j] : 0.0f;
        amax = max(amax, pack::magnitude_bits(x[j]));
      }
#pragma unroll
      for (int lane = pack::kBiasKeyThreads / 2; lane > 0; lane /= 2)
        amax = max(amax, __shfl_xor_sync(pack::kAllLanes, amax, lane));
      if (row + r >= means) continue;
      float* const out = codes.bias + (line * s.k_blocks + block) * kBlockRows + kImageRows * half + key;
      *reinterpret_cast<float4*>(out) = {x[0], x[1], x[2], x[3]};
      if (key != 0) continue;
      float most = __uint_as_float(amax);
      if (!numerics::is_finite(most)) most = numerics::quiet_nan();
      // An all-zero image has no bias; a NaN surfaces through its own scale.
      codes.bias_amax[(line * s.k_blocks + block) * 2 + half] = k_scale[half] > 0 ? most : 0.0f;
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(2 * kDim, kDim == 256 ? 1 : 256 / kDim)
    query_codes(Shape shape, TensorView q, KeyCodes keys, QueryCodes codes) {
  using Threads = ThreadRows<kDim>;
  constexpr int kHalves = kBlockRows / kImageRows;
  const Sequences& s = shape.sequences;
  const QueryBlock at = query_block(s, blockIdx.x);
  if (at.owner < 0) return;
  const Threads me(threadIdx.x);
  const int32_t kv_head = at.head / (shape.q_heads / shape.kv_heads);
  __shared__ uint32_t scratch[1][Threads::kWarps];
  __shared__ unsigned long long need_scratch[Threads::kWarps];

  Chunk x[kHalves][pack::kThreadRows];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int32_t skip = half * kImageRows;
    pack::load_rows(pack::row_source(q, s, at.owner, at.view.q_first, at.first + skip, at.head, at.rows - skip), me,
                    x[half]);
  }
  const bool centred = shape.mean_blocks_max > 0;
  alignas(16) float mu[pack::kChunk] = {};
  double need = 0;
  if (centred) {
    const int32_t block = min(at.local / mean_span(at.view), shape.mean_blocks_max - 1);
    const float* const mean = codes.mean + mean_index(shape, at.head, at.owner, block) * kDim + pack::kChunk * me.chunk;
    *reinterpret_cast<float4*>(mu) = *reinterpret_cast<const float4*>(mean);
    *reinterpret_cast<float4*>(mu + 4) = *reinterpret_cast<const float4*>(mean + 4);
    const int64_t line = static_cast<int64_t>(at.head) * shape.mean_blocks_max + block;
    need = pack::bias_need<Threads::kWarps>(
        codes.bias_amax + (line * s.k_blocks + at.view.k_block0) * 2,
        keys.k_scale + (static_cast<int64_t>(kv_head) * s.k_blocks + at.view.k_block0) * 2,
        (at.view.k_rows + kImageRows - 1) / kImageRows, need_scratch);
  }
  const auto exists = [&](int half, int i) { return half * kImageRows + me.row(i) < at.rows; };
  const auto value = [&](int half, int i, int c) { return __fsub_rn(pack::channel(x[half][i], c), mu[c]); };

  uint32_t amax[1] = {0};
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i) {
      if (!exists(half, i)) continue;
#pragma unroll
      for (int c = 0; c < pack::kChunk; ++c) amax[0] = max(amax[0], pack::magnitude_bits(value(half, i, c)));
    }
  pack::block_amax<Threads::kWarps>(amax, scratch);
  const float most = __uint_as_float(amax[0]);
  const numerics::BlockScale scale = centred ? pack::centred_scale(most, need) : numerics::block_scale(most);
  if (threadIdx.x == 0) codes.q_scale[at.at] = scale.scale;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    pack::RowCodes row;
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i)
      pack::encode_row(row, i, scale.inverse, exists(half, i), [&](int c) { return value(half, i, c); });
    pack::store_row_image(codes.q + (at.at * kHalves + half) * (kImageRows * kDim), me, row);
  }

  if (!codes.mean_dot) return;
  const float* const k_mean =
      keys.k_mean + (static_cast<int64_t>(kv_head) * s.batch + at.owner) * kDim + pack::kChunk * me.chunk;
  alignas(16) float mean[pack::kChunk];
  *reinterpret_cast<float4*>(mean) = __ldg(reinterpret_cast<const float4*>(k_mean));
  *reinterpret_cast<float4*>(mean + 4) = __ldg(reinterpret_cast<const float4*>(k_mean + 4));
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i) {
      float dot = 0.0f;
#pragma unroll
      for (int c = 0; c < pack::kChunk; ++c) dot = __fmaf_rn(pack::channel(x[half][i], c), mean[c], dot);
      dot = pack::add_row_lanes<kDim>(dot);
      if (me.chunk == 0)
        codes.mean_dot[at.at * kBlockRows + half * kImageRows + me.row(i)] = exists(half, i) ? dot : 0.0f;
    }
}

cudaError_t launch_bias(const Launch& launch, const Shape& shape, const TensorView& k, const KeyCodes& keys,
                        const QueryCodes& codes) {
  const int64_t ctas = static_cast<int64_t>(shape.sequences.k_blocks) * shape.q_heads;
  if (ctas == 0) return cudaSuccess;
  if (!pack::fits_grid(ctas)) return cudaErrorInvalidConfiguration;
  const auto start = [&](auto kernel) {
    kernel<<<static_cast<uint32_t>(ctas), pack::kBiasThreads, 0, launch.stream>>>(shape, launch.head_dim, k, keys,
                                                                                  codes);
    return cudaGetLastError();
  };
  const int32_t rows = (shape.mean_blocks_max + pack::kBiasRowThreads - 1) / pack::kBiasRowThreads;
  if (rows <= 1) return start(column_bias<1>);
  if (rows <= 2) return start(column_bias<2>);
  if (rows <= 4) return start(column_bias<4>);
  return rows <= 8 ? start(column_bias<8>) : cudaErrorInvalidValue;
}

template <int kDim>
cudaError_t launch_with(const Launch& launch, const Shape& shape, const TensorView& q, const TensorView& k,
                        const KeyCodes& keys, const QueryCodes& codes) {
  const int64_t blocks = static_cast<int64_t>(shape.sequences.q_blocks) * shape.q_heads;
  if (blocks == 0) return cudaSuccess;
  if (!pack::fits_grid(blocks)) return cudaErrorInvalidConfiguration;
  if (shape.mean_blocks_max > 0) {
    query_means<kDim>
        <<<static_cast<uint32_t>(blocks), MeanThreads<kDim>::kThreads, 0, launch.stream>>>(shape, q, codes);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    if (const cudaError_t error = launch_bias(launch, shape, k, keys, codes); error != cudaSuccess) return error;
  }
  query_codes<kDim><<<static_cast<uint32_t>(blocks), 2 * kDim, 0, launch.stream>>>(shape, q, keys, codes);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_query_pack(const Launch& launch, const Shape& shape, const TensorView& q, const TensorView& k,
                              const KeyCodes& keys, const QueryCodes& codes) {
  return pack::with_head_dim(
      launch.head_dim, [&](auto dim) { return launch_with<decltype(dim)::value>(launch, shape, q, k, keys, codes); });
}

}  // namespace dmattn::cuda
