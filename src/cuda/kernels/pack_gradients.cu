// What the backward takes from dO, O, q and the saved statistics: row references and weights, delta', codes of w dO, of
// (2^k / rounded sum) dO and of plain q (docs/numerics.md, section 4).
//
// Scales hold over 1,024 rows. A cluster of 16 CTAs has such an interval of a query head, 64 rows (one image) each, 2 D
// threads a CTA (collective/pack_rows.h). Every tensor is read once: rows stay in shared memory while the CTAs tell
// each other their amaxes. CTAs past the sequence's last block leave at once and are asked for nothing.
//
// Statistics of a row belong to the first 64 threads, in padded row order. From a public lse alone, a kernel in front
// puts references and sums where this one finds them: into gradients.shift and gradients.weight, which it overwrites.
#include "cuda/collective/pack_cluster.h"
#include "cuda/collective/pack_copies.h"
#include "cuda/collective/pack_delta.h"
#include "cuda/collective/pack_intervals.h"
#include "cuda/collective/pack_launch.h"
#include "cuda/collective/pack_rows.h"
#include "cuda/kernels/kernels.h"
#include "numerics/softmax.h"

namespace dmattn::cuda {
namespace {

using pack::Chunk;
using pack::RowCodes;
using pack::RowOrder;
using pack::ThreadRows;

// From the public lse alone: M and the sum such that 2^M sum = 2^(lse log2 e), scores centred as Q's codes have them.
// M goes into gradients.shift, the sum into gradients.weight. Grade: bounded (FP64 exp2 differs between libraries).
template <int kDim>
__global__ void __launch_bounds__(2 * kDim)
    rows_from_lse(Shape shape, GradientInput input, KeyCodes keys, GradientCodes codes) {
  const Sequences& s = shape.sequences;
  const pack::GradientImage at = pack::gradient_image(shape);
  if (at.rank >= at.peers) return;
  const ThreadRows<kDim> me(threadIdx.x);
  __shared__ float dot[kImageRows];
  Chunk q[pack::kThreadRows];
  pack::load_rows(pack::row_source(input.q, s, at.sequence, at.view.q_first, at.first, at.head, at.rows), me, q);
  const float* const mean =
      keys.k_mean + (static_cast<int64_t>(at.kv_head) * s.batch + at.sequence) * kDim + pack::kChunk * me.chunk;
#pragma unroll
  for (int i = 0; i < pack::kThreadRows; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < pack::kChunk; ++c) sum = __fmaf_rn(pack::channel(q[i], c), mean[c], sum);
    sum = pack::add_row_lanes<kDim>(sum);
    if (me.chunk == 0) dot[me.row(i)] = sum;
  }
  __syncthreads();
  const int row = threadIdx.x;
  if (row >= kImageRows) return;
  float reference = numerics::negative_infinity(), sum = 0.0f;
  if (row < at.rows) {
    const float lse = input.lse[row_vector(s, shape.q_heads, at.sequence, at.head, at.view.q_first) + at.first + row];
    if (lse != numerics::negative_infinity()) {
      constexpr double kLn2 = 0.693147180559945309417;
      const double shifted = __dsub_rn(lse, __dmul_rn(shape.softmax_scale, dot[row]));
      const double log2_sum = __ddiv_rn(shifted, kLn2), floor_of = floor(log2_sum);
      reference = static_cast<float>(floor_of);
      sum = static_cast<float>(exp2(__dsub_rn(log2_sum, floor_of)));
    }
  }
  codes.shift[at.image() * kImageRows + row] = reference;
  codes.weight[at.image() * kImageRows + row] = sum;
}

// What the CTA's threads share of a row.
struct RowStatistics {
  float weight[kImageRows];     // w; 0 for a row without keys or past the end
  float dv_weight[kImageRows];  // 2^k / rounded sum, likewise
  float delta[kImageRows];      // delta'; onepass: first what O's codes leave of it
  float o_scale[kImageRows];    // onepass: of O's codes
};

// Threads 0 ... 63: references, weights, and delta' where the caller gave delta.
__device__ __forceinline__ void row_statistics(const Shape& shape, const GradientInput& input,
                                               const pack::GradientImage& at, const GradientCodes& codes,
                                               RowStatistics& shared) {
  const int row = threadIdx.x;
  const int64_t padded = at.image() * kImageRows + row;
  const int64_t own =
      row_vector(shape.sequences, shape.q_heads, at.sequence, at.head, at.view.q_first) + at.first + row;
  float reference = 0.0f, sum = 0.0f, rounded = 0.0f, delta = 0.0f;
  if (row < at.rows) {
    if (input.reference != nullptr) {
      reference = input.reference[own];
      sum = input.sum[own];
      rounded = input.sum[input.row_vector_length + own];
    } else {
      reference = codes.shift[padded];
      sum = rounded = codes.weight[padded];
    }
    if (input.delta != nullptr) delta = input.delta[own];
  }
  const bool onepass = input.rule == DeltaRule::onepass;
  const auto [weight, exponent] = numerics::row_weight(onepass ? rounded : sum);
  const bool dead = weight == 0.0f;  // without keys: no gradient, whatever dO holds
  const float c = __fadd_rn(reference, exponent);
  codes.shift[padded] = dead ? numerics::negative_infinity() : __fsub_rn(numerics::kProbabilityExponent, c);
  codes.weight[padded] = weight;
  shared.weight[row] = weight;
  shared.dv_weight[row] = dead || onepass ? weight : __fdiv_rn(numerics::power_of_two(exponent), rounded);
  shared.delta[row] = dead ? 0.0f : __fmul_rn(weight, delta);
}

// <a, b> over the row's channels in the contract's order, in all lanes of the row.
template <int kDim, class A, class B>
__device__ __forceinline__ float row_dot(A a, B b) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < pack::kChunk; ++c) sum = __fmaf_rn(a(c), b(c), sum);
  return pack::add_row_lanes<kDim>(sum);
}

// Shared memory: the CTA's rows of dO, q and O. The transposed images take the place of O and, later, of dO.
template <int kDim>
constexpr int kGradientBytes = 3 * pack::CopiedRows<kDim>::kBytes;

template <int kDim>
__global__ void __cluster_dims__(pack::kClusterCtas, 1, 1) __launch_bounds__(2 * kDim, 512 / kDim)
    gradient_codes(Shape shape, GradientInput input, GradientCodes codes) {
  using Threads = ThreadRows<kDim>;
  using Rows = pack::CopiedRows<kDim>;
  constexpr int64_t kImageBytes = kImageRows * kDim;
  static_assert(pack::TransposedStage<kDim>::kBytes <= Rows::kBytes);
  enum { kD, kDv, kQ, kOperands };
  const Sequences& s = shape.sequences;
  const pack::GradientImage at = pack::gradient_image(shape);
  if (at.rank >= at.peers) return;
  const Threads me(threadIdx.x);
  extern __shared__ __align__(128) uint8_t storage[];
  __shared__ RowStatistics rows;
  __shared__ uint32_t scratch[kOperands][Threads::kWarps];
  __shared__ uint32_t peer_amax[kOperands][pack::kClusterCtas];  // written by the peers
  uint8_t* const d_o_rows = storage;
  uint8_t* const o_rows = storage + 2 * Rows::kBytes;
  const Rows d_o(d_o_rows), q(storage + Rows::kBytes), o(o_rows);
  const bool with_o = input.delta == nullptr && input.rule != DeltaRule::matched;
  const bool with_low = with_o && input.rule == DeltaRule::onepass && input.o_low.data != nullptr;
  const auto source = [&](const TensorView& x) {
    return pack::row_source(x, s, at.sequence, at.view.q_first, at.first, at.head, at.rows);
  };

  const uint64_t policy = ptx::cache_policy(true);
  pack::cluster_arrive();  // this CTA has started
  pack::copy_rows(source(input.d_o), me, d_o, policy);
  pack::copy_rows(source(input.q), me, q, policy);
  ptx::copy_async_commit();
  if (with_o) pack::copy_rows(source(input.o), me, o, policy);
  ptx::copy_async_commit();
  if (with_low) pack::prefetch_rows(source(input.o_low), me);
  if (threadIdx.x < kImageRows) row_statistics(shape, input, at, codes, rows);
  __syncthreads();

  ptx::copy_async_wait<1>();
  float weight[pack::kThreadRows];
  uint32_t amax[kOperands] = {};
#pragma unroll
  for (int i = 0; i < pack::kThreadRows; ++i) {
    weight[i] = rows.weight[me.row(i)];
    if (weight[i] == 0.0f) d_o[i] = uint4{};
    const float most = __uint_as_float(pack::chunk_amax(d_o.row(i)));  // a product's rounding keeps the order
    amax[kD] = max(amax[kD], pack::magnitude_bits(__fmul_rn(weight[i], most)));
    amax[kDv] = max(amax[kDv], pack::magnitude_bits(__fmul_rn(rows.dv_weight[me.row(i)], most)));
    amax[kQ] = max(amax[kQ], pack::chunk_amax(q.row(i)));
  }
  pack::block_amax<Threads::kWarps>(amax, scratch);
  pack::cluster_wait();  // the peers have started
  if (static_cast<int>(threadIdx.x) < at.peers)
#pragma unroll
    for (int x = 0; x < kOperands; ++x) pack::store_remote(&peer_amax[x][at.rank], threadIdx.x, amax[x]);
  pack::cluster_arrive();
  pack::cluster_wait();
#pragma unroll
  for (int x = 0; x < kOperands; ++x) {
    const int lane = threadIdx.x % 32;
    amax[x] = __reduce_max_sync(pack::kAllLanes, lane < at.peers ? peer_amax[x][lane] : 0u);
  }
  const auto d_scale = numerics::block_scale(__uint_as_float(amax[kD]));
  const auto dv_scale = numerics::block_scale(__uint_as_float(amax[kDv]));
  const auto q_scale = numerics::block_scale(__uint_as_float(amax[kQ]));
  if (threadIdx.x == 0 && at.half() == 0) {
    codes.d_scale[at.block] = d_scale.scale;
    codes.dv_scale[at.block] = dv_scale.scale;
    codes.q_scale[at.block] = q_scale.scale;
  }

  RowCodes row;
#pragma unroll
  for (int i = 0; i < pack::kThreadRows; ++i) {
    const Chunk x = d_o.row(i);
    pack::encode_row(row, i, d_scale.inverse, me.row(i) < at.rows,
                     [&](int c) { return __fmul_rn(weight[i], pack::channel(x, c)); });
  }
  pack::store_row_image(codes.d_o + at.image() * kImageBytes, me, row);

  ptx::copy_async_wait<0>();
  if (with_o) {
    Chunk o_low[pack::kThreadRows] = {};
    if (with_low) pack::load_rows(source(input.o_low), me, o_low);
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i) {
      const Chunk o_row = o.row(i);
      float code[2][4];
      ptx::e4m3_unpack(row.word[i][0], code[0]);
      ptx::e4m3_unpack(row.word[i][1], code[1]);
      const auto d_code = [&](int c) { return code[c / 4][c % 4]; };
      float delta;
      if (input.rule == DeltaRule::stale) {
        const Chunk x = d_o.row(i);
        delta = row_dot<kDim>([&](int c) { return __fmul_rn(weight[i], pack::channel(x, c)); },
                              [&](int c) { return pack::channel(o_row, c); });
      } else if (input.rule == DeltaRule::consistent) {
        delta = __fmul_rn(d_scale.scale, row_dot<kDim>(d_code, [&](int c) { return pack::channel(o_row, c); }));
      } else {
        float x[pack::kChunk];
#pragma unroll
        for (int c = 0; c < pack::kChunk; ++c)
          x[c] = __fadd_rn(pack::channel(o_row, c), with_low ? pack::channel(o_low[i], c) : 0.0f);
        const pack::OutputCodes of_o = pack::encode_output<kDim>(x);  // leaves the rest of O in x
        delta = row_dot<kDim>(d_code, [&](int c) { return x[c]; });
        o[i] = {row.word[i][0], row.word[i][1], of_o.word[0], of_o.word[1]};
        if (me.chunk == 0) rows.o_scale[me.row(i)] = of_o.scale;
      }
      if (me.chunk == 0 && weight[i] != 0.0f) rows.delta[me.row(i)] = delta;
    }
    if (input.rule == DeltaRule::onepass) {
      __syncwarp();
      const pack::TruncatedDot<kDim> dot(o);
      if (dot.first && rows.weight[dot.row] != 0.0f)
        rows.delta[dot.row] =
            __fmul_rn(d_scale.scale, __fmaf_rn(rows.o_scale[dot.row], dot.value, rows.delta[dot.row]));
    }
  }
  __syncthreads();                         // O has been read
  if (input.rule != DeltaRule::onepass) {  // there both weights are the same, and so are the codes
#pragma unroll
    for (int i = 0; i < pack::kThreadRows; ++i) {
      const Chunk x = d_o.row(i);
      const float dv_weight = rows.dv_weight[me.row(i)];
      pack::encode_row(row, i, dv_scale.inverse, me.row(i) < at.rows,
                       [&](int c) { return __fmul_rn(dv_weight, pack::channel(x, c)); });
    }
  }
  pack::stage_transposed<kDim, RowOrder::sigma>(o_rows, me, row);
  __syncthreads();  // and so has dO
  pack::store_transposed_image<kDim>(codes.d_o_t + at.image() * kImageBytes, o_rows);
#pragma unroll
  for (int i = 0; i < pack::kThreadRows; ++i) {
    const Chunk x = q.row(i);
    pack::encode_row(row, i, q_scale.inverse, me.row(i) < at.rows, [&](int c) { return pack::channel(x, c); });
  }
  pack::stage_transposed<kDim, RowOrder::sigma>(d_o_rows, me, row);
  __syncthreads();
  pack::store_transposed_image<kDim>(codes.q_t + at.image() * kImageBytes, d_o_rows);
  if (threadIdx.x >= kImageRows) return;
  const bool known = with_o || input.delta != nullptr;  // else matched: its kernel writes delta' of live rows
  const float w = rows.weight[threadIdx.x], delta = rows.delta[threadIdx.x];
  if (known || w == 0.0f) codes.delta[at.image() * kImageRows + threadIdx.x] = delta;
  if (known && input.delta_out != nullptr && static_cast<int>(threadIdx.x) < at.rows)
    input.delta_out[row_vector(s, shape.q_heads, at.sequence, at.head, at.view.q_first) + at.first + threadIdx.x] =
        w == 0.0f ? 0.0f : __fdiv_rn(delta, w);
}

template <int kDim>
cudaError_t launch_with(const Launch& launch, const Shape& shape, const GradientInput& input, const KeyCodes& keys,
                        const GradientCodes& codes) {
  const int64_t ctas = pack::interval_count(shape.sequences) * shape.q_heads * pack::kClusterCtas;
  if (ctas == 0 || shape.sequences.q_blocks == 0) return cudaSuccess;
  if (!pack::fits_grid(ctas)) return cudaErrorInvalidConfiguration;
  const auto grid = static_cast<uint32_t>(ctas);
  if (input.reference == nullptr) {
    rows_from_lse<kDim><<<grid, 2 * kDim, 0, launch.stream>>>(shape, input, keys, codes);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return start_kernel<gradient_codes<kDim>, 2 * kDim, kGradientBytes<kDim>>(launch, ctas, shape, input, codes);
}

}  // namespace

cudaError_t launch_gradient_pack(const Launch& launch, const Shape& shape, const GradientInput& input,
                                 const KeyCodes& keys, const GradientCodes& codes) {
  return with_head_dim(launch.head_dim,
                       [&](auto dim) { return launch_with<decltype(dim)::value>(launch, shape, input, keys, codes); });
}

}  // namespace dmattn::cuda
