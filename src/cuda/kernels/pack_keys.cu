// K mean, codes of k - mean and codes of v (docs/numerics.md, section 1).
//
// Three launches. key_partials: a thread adds up 64 keys of 8 channels, ascending. key_means: a thread adds up the
// partial sums of a channel, ascending, and divides once. key_codes: a CTA of 2 D threads per image of 64 keys and KV
// head (collective/pack_rows.h); it reads K and V once and writes up to four images. Images past a sequence's end
// within its last block of 128 are written too: codes and scale 0.
#include "cuda/collective/pack_copies.h"
#include "cuda/collective/pack_launch.h"
#include "cuda/collective/pack_rows.h"
#include "cuda/kernels/kernels.h"
#include "numerics/scale.h"

namespace dmattn::cuda {
namespace {

using pack::Chunk;
using pack::RowCodes;
using pack::RowOrder;
using pack::ThreadRows;

// One image of 64 keys of a KV head.
struct KeyImage {
  int32_t head, image, owner;  // image: 2 * padded block + half; owner: sequence, -1 if none
  int32_t first, rows;         // first key within the sequence; keys from there on (may be below 1 or above 64)
  int64_t at;                  // index of the image over all heads
  SequenceView view;
};

__device__ __forceinline__ KeyImage key_image(const Sequences& s, int64_t item) {
  KeyImage out;
  const uint32_t images = 2 * static_cast<uint32_t>(s.k_blocks);
  out.head = static_cast<int32_t>(static_cast<uint32_t>(item) / images);
  out.image = static_cast<int32_t>(static_cast<uint32_t>(item) % images);
  out.at = item;
  out.owner = k_block_owner(s, out.image / 2);
  if (out.owner < 0) return out;
  out.view = sequence_view(s, out.owner);
  out.first = (out.image - 2 * out.view.k_block0) * kImageRows;
  out.rows = out.view.k_rows - out.first;
  return out;
}

constexpr int kPartialThreads = 128;

template <int kDim>
__global__ void __launch_bounds__(kPartialThreads) key_partials(Shape shape, TensorView k, KeyCodes codes) {
  constexpr int kLanes = kDim / pack::kChunk;
  const Sequences& s = shape.sequences;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kPartialThreads / kLanes) + threadIdx.x / kLanes;
  if (item >= int64_t{2} * s.k_blocks * shape.kv_heads) return;
  const KeyImage me = key_image(s, item);
  if (me.owner < 0 || me.rows <= 0) return;
  const int channel = pack::kChunk * (static_cast<int>(threadIdx.x) % kLanes);
  const uint16_t* const key = row_pointer(k, s, me.owner, me.view.k_first, me.first, me.head) + channel;
  __shared__ __align__(16) pack::RowRing<kPartialThreads> ring;
  float sum[pack::kChunk] = {};
  pack::add_rows(key, k.seq_stride, min(me.rows, kImageRows), k.aligned, ring, ptx::cache_policy(false), sum);
  float4* const out = reinterpret_cast<float4*>(codes.k_partial + me.at * kDim + channel);
  out[0] = {sum[0], sum[1], sum[2], sum[3]};
  out[1] = {sum[4], sum[5], sum[6], sum[7]};
}

// A CTA of D threads per KV head and sequence.
template <int kDim>
__global__ void __launch_bounds__(kDim) key_means(Shape shape, bool centre, KeyCodes codes) {
  const Sequences& s = shape.sequences;
  const int32_t head = static_cast<int32_t>(blockIdx.x / static_cast<uint32_t>(s.batch));
  const int32_t b = static_cast<int32_t>(blockIdx.x % static_cast<uint32_t>(s.batch));
  const SequenceView view = sequence_view(s, b);
  float mean = 0.0f;
  if (centre && view.k_rows > 0) {
    const int32_t partials = (view.k_rows + kImageRows - 1) / kImageRows;
    const float* const partial = codes.k_partial + 2 * (static_cast<int64_t>(head) * s.k_blocks + view.k_block0) * kDim;
    constexpr int kBatch = 8192 / kDim, kLanes = kDim / 4;  // a line: kLanes times 16 bytes
    __shared__ __align__(16) float stage[kBatch][kDim];
    for (int32_t first = 0; first < partials; first += kBatch) {
      const int32_t count = min(kBatch, partials - first);
      if (first > 0) __syncthreads();
      for (int32_t i = threadIdx.x; i < count * kLanes; i += kDim)
        ptx::copy_async4(&stage[0][4 * i], partial + static_cast<int64_t>(first) * kDim + 4 * i,
                         ptx::cache_policy(true));
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      __syncthreads();
#pragma unroll 8
      for (int32_t i = 0; i < count; ++i) mean = __fadd_rn(mean, stage[i][threadIdx.x]);
    }
    mean = __fdiv_rn(mean, static_cast<float>(view.k_rows));
  }
  codes.k_mean[static_cast<int64_t>(blockIdx.x) * kDim + threadIdx.x] = mean;
}

template <int kDim>
__global__ void __launch_bounds__(2 * kDim, 512 / kDim)
    key_codes(Shape shape, TensorView k, TensorView v, KeyCodes codes) {
  using Threads = ThreadRows<kDim>;
  using Stage = pack::TransposedStage<kDim>;
  const Sequences& s = shape.sequences;
  const KeyImage at = key_image(s, gridDim.x - 1 - blockIdx.x);  // first the keys that the cache still holds
  if (at.owner < 0) return;
  const Threads me(threadIdx.x);
  __shared__ __align__(16) uint8_t stage[2][Stage::kBytes];
  __shared__ uint32_t scratch[2][Threads::kWarps];
  const bool with_v = codes.v != nullptr || codes.v_t != nullptr;

  Chunk k_raw[pack::kThreadRows], v_raw[pack::kThreadRows] = {};
  pack::load_rows(pack::row_source(k, s, at.owner, at.view.k_first, at.first, at.head, at.rows), me, k_raw);
  if (with_v)
    pack::load_rows(pack::row_source(v, s, at.owner, at.view.k_first, at.first, at.head, at.rows), me, v_raw, true);
  alignas(16) float mean[pack::kChunk];
  const float4* const means = reinterpret_cast<const float4*>(
      codes.k_mean + (static_cast<int64_t>(at.head) * s.batch + at.owner) * kDim + pack::kChunk * me.chunk);
  *reinterpret_cast<float4*>(mean) = __ldg(means);
  *reinterpret_cast<float4*>(mean + 4) = __ldg(means + 1);
  const auto centred = [&](int i, int c) { return __fsub_rn(pack::channel(k_raw[i], c), mean[c]); };

  uint32_t amax[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < pack::kThreadRows; ++i) {
    amax[1] = max(amax[1], pack::chunk_amax(v_raw[i]));
    if (me.row(i) >= at.rows) continue;  // a missing row is zero, not -mean
#pragma unroll
    for (int c = 0; c < pack::kChunk; ++c) amax[0] = max(amax[0], pack::magnitude_bits(centred(i, c)));
  }
  pack::block_amax<Threads::kWarps>(amax, scratch);
  const auto k_scale = numerics::block_scale(__uint_as_float(amax[0]));
  const auto v_scale = numerics::power_scale(__uint_as_float(amax[1]));
  if (threadIdx.x == 0) {
    codes.k_scale[at.at] = k_scale.scale;
    if (with_v) codes.v_scale[at.at] = v_scale.scale;
  }

  constexpr int64_t kImageBytes = kImageRows * kDim;
  RowCodes row;
#pragma unroll
  for (int i = 0; i < pack::kThreadRows; ++i)
    pack::encode_row(row, i, k_scale.inverse, me.row(i) < at.rows, [&](int c) { return centred(i, c); });
  if (codes.k) pack::store_row_image(codes.k + at.at * kImageBytes, me, row);
  if (codes.k_t) pack::stage_transposed<kDim, RowOrder::rho>(stage[0], me, row);
  if (with_v) {
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i)
      pack::encode_row(row, i, v_scale.inverse, me.row(i) < at.rows, [&](int c) { return pack::channel(v_raw[i], c); });
    if (codes.v) pack::store_row_image(codes.v + at.at * kImageBytes, me, row);
    if (codes.v_t) pack::stage_transposed<kDim, RowOrder::sigma>(stage[1], me, row);
  }
  if (!codes.k_t && !codes.v_t) return;
  __syncthreads();
  if (codes.k_t) pack::store_transposed_image<kDim>(codes.k_t + at.at * kImageBytes, stage[0]);
  if (codes.v_t) pack::store_transposed_image<kDim>(codes.v_t + at.at * kImageBytes, stage[1]);
}

template <int kDim>
cudaError_t launch_with(const Launch& launch, const Shape& shape, const TensorView& k, const TensorView& v,
                        bool centre_k, const KeyCodes& codes) {
  const Sequences& s = shape.sequences;
  const int64_t images = int64_t{2} * s.k_blocks * shape.kv_heads;
  const int64_t sequences = static_cast<int64_t>(s.batch) * shape.kv_heads;
  if (!pack::fits_grid(images) || !pack::fits_grid(sequences)) return cudaErrorInvalidConfiguration;
  cudaError_t error = cudaSuccess;
  if (centre_k && images > 0) {
    constexpr int kPerCta = kPartialThreads * pack::kChunk / kDim;
    const auto ctas = static_cast<uint32_t>((images + kPerCta - 1) / kPerCta);
    key_partials<kDim><<<ctas, kPartialThreads, 0, launch.stream>>>(shape, k, codes);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess && sequences > 0) {
    key_means<kDim><<<static_cast<uint32_t>(sequences), kDim, 0, launch.stream>>>(shape, centre_k, codes);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess && images > 0) {
    key_codes<kDim><<<static_cast<uint32_t>(images), 2 * kDim, 0, launch.stream>>>(shape, k, v, codes);
    error = cudaGetLastError();
  }
  return error;
}

}  // namespace

cudaError_t launch_key_pack(const Launch& launch, const Shape& shape, const TensorView& k, const TensorView& v,
                            bool centre_k, const KeyCodes& codes) {
  return with_head_dim(launch.head_dim, [&](auto dim) {
    return launch_with<decltype(dim)::value>(launch, shape, k, v, centre_k, codes);
  });
}

}  // namespace dmattn::cuda
