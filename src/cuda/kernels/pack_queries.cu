// Q for S: means of blocks of queries, their biases, and codes of q - mu with scales that let the bias fit
// (docs/numerics.md, section 1: "Q mean", "Column bias"). Without centring: codes of q alone.
//
// Three launches. query_means: a CTA per mean block and query head; its threads add up 64 rows of 8 channels each, then
// those partial sums are added ascending. column_bias: a CTA walks images of 64 keys of a query head, a quarter of one
// a warp (collective/bias_gemm.h). It covers every key, seen or not, as the guard asks for all of the sequence.
// query_codes: a CTA of 2 D threads per block of 128 rows and query head (collective/pack_rows.h); a thread has four
// rows of either image, which wait in shared memory: many copies are in flight at once.
#include <algorithm>

#include "cuda/collective/bias_gemm.h"
#include "cuda/collective/bias_guard.h"
#include "cuda/collective/pack_copies.h"
#include "cuda/collective/pack_launch.h"
#include "cuda/collective/pack_rows.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ptx/global.h"
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
  __shared__ __align__(16) pack::RowRing<Threads::kThreads> ring;
  float total[pack::kChunk] = {};  // of the first kLanes threads
  for (int32_t row0 = 0; row0 < rows; row0 += Threads::kParts * numerics::kMeanRows) {
    float sum[pack::kChunk] = {};
    const int32_t row = row0 + part * numerics::kMeanRows;
    const int32_t count = min(rows - row, numerics::kMeanRows);
    pack::add_rows(first + row * q.seq_stride, q.seq_stride, count, q.aligned, ring, ptx::cache_policy(true), sum);
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
  const float count = static_cast<float>(rows);
  if ((rows & (rows - 1)) == 0) {  // the usual 128: the inverse is exact, so this is the division
    const float inverse = __fdiv_rn(1.0f, count);
#pragma unroll
    for (int i = 0; i < pack::kChunk; ++i) out[i] = numerics::bf16_round(__fmul_rn(total[i], inverse));
  } else {
#pragma unroll
    for (int i = 0; i < pack::kChunk; ++i) out[i] = numerics::bf16_round(__fdiv_rn(total[i], count));
  }
}

// 64 keys of a KV head, for the mean blocks of one query head.
struct BiasItem {
  int32_t head, kv_head, owner;  // owner: sequence, -1 if none
  int32_t image;                 // 2 * padded block + half
  int32_t means;                 // mean blocks of the sequence; 0: nothing to do
  int32_t first, keys;           // first key within the sequence, keys of the sequence
  const uint16_t* row;           // its first key
};

__device__ __forceinline__ BiasItem bias_item(const Shape& shape, const TensorView& k, uint32_t item) {
  const Sequences& s = shape.sequences;
  BiasItem out;
  const uint32_t images = 2 * static_cast<uint32_t>(s.k_blocks);
  out.head = static_cast<int32_t>(item / images);
  out.image = static_cast<int32_t>(item % images);
  out.kv_head = out.head / (shape.q_heads / shape.kv_heads);
  out.owner = k_block_owner(s, out.image / 2);
  out.means = out.first = out.keys = 0;
  out.row = k.data;
  if (out.owner < 0) return out;
  const SequenceView view = sequence_view(s, out.owner);
  const int32_t span = mean_span(view), q_blocks = (view.q_rows + kBlockRows - 1) / kBlockRows;
  out.means = min((q_blocks + span - 1) / span, shape.mean_blocks_max);
  out.first = (out.image - 2 * view.k_block0) * kImageRows;
  out.keys = view.k_rows;
  out.row = row_pointer(k, s, out.owner, view.k_first, out.first, out.kv_head);
  return out;
}

// CTAs of a multiprocessor: what registers and shared memory have room for.
constexpr int bias_ctas(int tiles, bool aligned) { return !aligned ? 2 : tiles == 4 ? 3 : tiles == 2 ? 4 : 5; }

// Items [items * CTA / CTAs, items * (CTA + 1) / CTAs). Rows are loaded a few chunks ahead, also across items of a
// sequence.
template <int kDim, int kTiles, bool kAligned>
__global__ void __launch_bounds__(pack::kBiasThreads, bias_ctas(kTiles, kAligned))
    column_bias(Shape shape, TensorView k, KeyCodes keys, QueryCodes codes, uint32_t items, uint32_t ctas) {
  using Stage = pack::BiasStage<kDim, kTiles>;
  constexpr int kAhead = kDim == 64 || (kDim == 256 && kTiles == 4) ? 2 : 4;  // what shared memory has room for
  const Sequences& s = shape.sequences;
  const auto border = [&](uint32_t cta) { return static_cast<uint32_t>(static_cast<uint64_t>(items) * cta / ctas); };
  const uint32_t end = border(blockIdx.x + 1);
  uint32_t item = border(blockIdx.x);
  __shared__ __align__(16) Stage stage;
  __shared__ __align__(16) uint4 ahead[kAligned ? kAhead : 1][pack::kLaneKeys][pack::kBiasThreads];
  __shared__ uint32_t image_amax[2][pack::kBiasWarps][pack::kMeanTile * kTiles];
  const uint64_t policy = ptx::cache_policy(shape.q_heads == shape.kv_heads);  // else other heads read the keys, too
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key = pack::kBiasKeys * warp + 4 * (lane % 4);  // first of this lane's four results

  // This lane's rows of an item. A key that is missing is the sequence's last one: its results are dropped.
  struct Rows {
    const uint16_t* key[pack::kLaneKeys];
  };
  const auto rows_of = [&](const BiasItem& at) {
    Rows rows;
#pragma unroll
    for (int j = 0; j < pack::kLaneKeys; ++j) {
      const int32_t row = min(pack::kBiasKeys * warp + pack::bias_key(lane, j), at.keys - 1 - at.first);
      rows.key[j] = at.row + row * k.seq_stride + pack::kChunk * (lane % 4);
    }
    return rows;
  };
  // Chunks on their way: a lane copies what it takes itself, so that nobody waits for others. One group a chunk.
  const auto load = [&](const Rows& rows, int chunk) {
    if constexpr (kAligned) {
#pragma unroll
      for (int j = 0; j < pack::kLaneKeys; ++j)
        ptx::copy_async4(&ahead[chunk % kAhead][j][threadIdx.x], rows.key[j] + pack::kBiasChannels * chunk, policy);
      ptx::copy_async_commit();
    }
  };
  const auto take = [&](const Rows& rows, int chunk, Chunk(&x)[pack::kLaneKeys]) {
    if constexpr (kAligned) ptx::copy_async_wait<kAhead - 1>();
#pragma unroll
    for (int j = 0; j < pack::kLaneKeys; ++j) {
      if constexpr (kAligned) {
        const uint4 word = ahead[chunk % kAhead][j][threadIdx.x];
        x[j] = {{word.x, word.y, word.z, word.w}};
      } else {
        x[j] = pack::load_chunk_by_elements(rows.key[j] + pack::kBiasChannels * chunk);
      }
    }
  };

  BiasItem at, next;
  Rows rows, next_rows;
  int32_t staged_head = -1, staged_owner = -1;
  bool loaded = false;  // `ahead` has the first chunks of the next item
  for (int parity = 0; item < end; ++item) {
    if (!loaded) {
      next = bias_item(shape, k, item);
      if (next.means == 0) continue;
      ptx::copy_async_wait<0>();  // of rows that nobody takes
      next_rows = rows_of(next);
#pragma unroll
      for (int chunk = 0; chunk < kAhead; ++chunk) load(next_rows, chunk);
    }
    at = next, rows = next_rows;
    parity ^= 1;
    if (at.head != staged_head || at.owner != staged_owner) {  // nobody reads the stage: a barrier ends every item
      pack::stage_means(stage, codes.mean + mean_index(shape, at.head, at.owner, 0) * kDim, at.means,
                        keys.k_mean + (static_cast<int64_t>(at.kv_head) * s.batch + at.owner) * kDim);
      staged_head = at.head, staged_owner = at.owner;
      __syncthreads();
    }
    // The next item, if it is of the same head and sequence; else `next` stays, and so do its rows.
    loaded = item + 1 < end && at.first + kImageRows < (at.keys + kBlockRows - 1) / kBlockRows * kBlockRows;
    if (loaded) {
      ++next.image;
      next.first += kImageRows;
      next.row += kImageRows * k.seq_stride;
      next_rows = rows_of(next);
    }

    float large[kTiles][pack::kLaneKeys][4] = {}, small[kTiles][pack::kLaneKeys][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < Stage::kChunks; ++chunk) {
      Chunk x[pack::kLaneKeys];
      take(rows, chunk, x);
      pack::multiply_chunk(stage, chunk, x, large, small);
      if (chunk + kAhead < Stage::kChunks) {
        load(rows, chunk + kAhead);
      } else {
        load(next_rows, chunk + kAhead - Stage::kChunks);
      }
    }

    const int64_t line0 = static_cast<int64_t>(at.head) * shape.mean_blocks_max;
    const int64_t line_keys = static_cast<int64_t>(s.k_blocks) * kBlockRows;
    const int32_t left = at.keys - at.first - key;
    float* const out = codes.bias + line0 * line_keys + static_cast<int64_t>(at.image) * kImageRows + key;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = pack::kMeanTile * m + lane / 4 + 8 * h;
        float x[4];
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float bias = __fadd_rn(large[m][i / 2][2 * h + i % 2], small[m][i / 2][2 * h + i % 2]);
          x[i] = i < left ? bias : 0.0f;
          amax = max(amax, pack::magnitude_bits(x[i]));
        }
        if (row < at.means) ptx::store_global4(out + row * line_keys, x);
        amax = max(amax, __shfl_xor_sync(pack::kAllLanes, amax, 1));
        amax = max(amax, __shfl_xor_sync(pack::kAllLanes, amax, 2));
        if (lane % 4 == 0) image_amax[parity][warp][row] = amax;
      }
    __syncthreads();
    const int row = threadIdx.x;
    if (row >= at.means) continue;
    uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < pack::kBiasWarps; ++w) amax = max(amax, image_amax[parity][w][row]);
    float most = __uint_as_float(amax);
    if (!numerics::is_finite(most)) most = numerics::quiet_nan();
    // An all-zero image has no bias; a NaN surfaces through its own scale.
    const float k_scale = keys.k_scale[static_cast<int64_t>(at.kv_head) * 2 * s.k_blocks + at.image];
    codes.bias_amax[(line0 + row) * 2 * s.k_blocks + at.image] = k_scale > 0 ? most : 0.0f;
  }
  ptx::copy_async_wait<0>();
}

constexpr int kHalves = kBlockRows / kImageRows;

template <int kDim>
__global__ void __launch_bounds__(2 * kDim, 512 / kDim)
    query_codes(Shape shape, TensorView q, KeyCodes keys, QueryCodes codes) {
  using Threads = ThreadRows<kDim>;
  using Rows = pack::CopiedRows<kDim>;
  const Sequences& s = shape.sequences;
  const QueryBlock at = query_block(s, blockIdx.x);
  if (at.owner < 0) return;
  const Threads me(threadIdx.x);
  const int32_t kv_head = at.head / (shape.q_heads / shape.kv_heads);
  __shared__ uint32_t scratch[1][Threads::kWarps];
  __shared__ unsigned long long need_scratch[Threads::kWarps];
  extern __shared__ __align__(128) uint8_t storage[];

  const auto x = [&](int half) { return Rows(storage + half * Rows::kBytes); };
#pragma unroll 1  // registers are short
  for (int half = 0; half < kHalves; ++half) {
    const int32_t skip = half * kImageRows;
    pack::copy_rows(pack::row_source(q, s, at.owner, at.view.q_first, at.first + skip, at.head, at.rows - skip), me,
                    x(half), ptx::cache_policy(false));  // the backward reads q once more
  }
  ptx::copy_async_commit();
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

  ptx::copy_async_wait<0>();
  uint32_t amax[1] = {0};
#pragma unroll 1  // registers are short
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i) {
      if (!exists(half, i)) continue;
      const Chunk row = x(half).row(i);
#pragma unroll
      for (int c = 0; c < pack::kChunk; ++c)
        amax[0] = max(amax[0], pack::magnitude_bits(__fsub_rn(pack::channel(row, c), mu[c])));
    }
  pack::block_amax<Threads::kWarps>(amax, scratch);
  const float most = __uint_as_float(amax[0]);
  const numerics::BlockScale scale = centred ? pack::centred_scale(most, need) : numerics::block_scale(most);
  if (threadIdx.x == 0) codes.q_scale[at.at] = scale.scale;
#pragma unroll 1  // registers are short
  for (int half = 0; half < kHalves; ++half) {
    pack::RowCodes code;
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i) {
      const Chunk row = x(half).row(i);
      pack::encode_row(code, i, scale.inverse, exists(half, i),
                       [&](int c) { return __fsub_rn(pack::channel(row, c), mu[c]); });
    }
    pack::store_row_image(codes.q + (at.at * kHalves + half) * (kImageRows * kDim), me, code);
  }

  if (!codes.mean_dot) return;
  const float* const k_mean =
      keys.k_mean + (static_cast<int64_t>(kv_head) * s.batch + at.owner) * kDim + pack::kChunk * me.chunk;
  alignas(16) float mean[pack::kChunk];
  *reinterpret_cast<float4*>(mean) = __ldg(reinterpret_cast<const float4*>(k_mean));
  *reinterpret_cast<float4*>(mean + 4) = __ldg(reinterpret_cast<const float4*>(k_mean + 4));
#pragma unroll 1  // registers are short
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i) {
      const Chunk row = x(half).row(i);
      float dot = 0.0f;
#pragma unroll
      for (int c = 0; c < pack::kChunk; ++c) dot = __fmaf_rn(pack::channel(row, c), mean[c], dot);
      dot = pack::add_row_lanes<kDim>(dot);
      if (me.chunk == 0)
        codes.mean_dot[at.at * kBlockRows + half * kImageRows + me.row(i)] = exists(half, i) ? dot : 0.0f;
    }
}

template <int kDim>
cudaError_t launch_bias(const Launch& launch, const Shape& shape, const TensorView& k, const KeyCodes& keys,
                        const QueryCodes& codes) {
  const int64_t images = int64_t{2} * shape.sequences.k_blocks * shape.q_heads;
  if (images == 0) return cudaSuccess;
  if (!pack::fits_grid(images)) return cudaErrorInvalidConfiguration;
  const auto items = static_cast<uint32_t>(images);
  const auto start = [&](auto kernel, int ctas_each) {
    const auto ctas = static_cast<uint32_t>(std::min<int64_t>(images, int64_t{ctas_each} * launch.multiprocessors));
    kernel<<<ctas, pack::kBiasThreads, 0, launch.stream>>>(shape, k, keys, codes, items, ctas);
    return cudaGetLastError();
  };
  const int32_t tiles = (shape.mean_blocks_max + pack::kMeanTile - 1) / pack::kMeanTile;
  if (tiles > 4) return cudaErrorInvalidValue;
  if (!k.aligned) return start(column_bias<kDim, 4, false>, bias_ctas(4, false));
  if (tiles <= 1) return start(column_bias<kDim, 1, true>, bias_ctas(1, true));
  if (tiles <= 2) return start(column_bias<kDim, 2, true>, bias_ctas(2, true));
  return start(column_bias<kDim, 4, true>, bias_ctas(4, true));
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
    if (const cudaError_t error = launch_bias<kDim>(launch, shape, k, keys, codes); error != cudaSuccess) return error;
  }
  constexpr int kBytes = kHalves * pack::CopiedRows<kDim>::kBytes;
  return start_kernel<query_codes<kDim>, 2 * kDim, kBytes>(launch, blocks, shape, q, keys, codes);
}

}  // namespace

cudaError_t launch_query_pack(const Launch& launch, const Shape& shape, const TensorView& q, const TensorView& k,
                              const KeyCodes& keys, const QueryCodes& codes) {
  return with_head_dim(launch.head_dim,
                       [&](auto dim) { return launch_with<decltype(dim)::value>(launch, shape, q, k, keys, codes); });
}

}  // namespace dmattn::cuda
