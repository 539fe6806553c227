// How packing kernels spread an image of 64 rows over their threads, and how they read rows, find block amaxes and
// write images.
//
// 2 D threads hold an image: D / 8 neighbouring lanes share a row, 8 channels (16 bytes of BF16) each, and a thread has
// the four rows 2 p, 2 p + 1, 2 p + 8, 2 p + 9 of a 16-row group. That choice serves three ends:
//   loads   every row is read whole by one warp;
//   rows    two lanes swap halves and each writes 16 bytes; rows 2 p and 2 p + 1 fill a sector of the row image;
//   columns the four rows are one word of the transposed image in either order (tile/image.h):
//             sigma: 2p, 2p+1, 2p+8, 2p+9     rho: 2p, 2p+8, 2p+1, 2p+9.
// It is also the lane order of numerics/reduce.h: dot products need no data moved.
#pragma once

#include "cuda/ptx/convert.h"
#include "cuda/schedule/sequences.h"
#include "cuda/tile/image.h"
#include "numerics/hd.h"

namespace dmattn::cuda::pack {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kThreadRows = 4;
constexpr int kChunk = 8;  // channels of a thread

template <int kDim>
struct ThreadRows {
  static constexpr int kLanes = kDim / kChunk;  // of a row
  static constexpr int kThreads = 2 * kDim;
  static constexpr int kWarps = kThreads / 32;

  int quad;   // 0 ... 15: four rows
  int chunk;  // 0 ... kLanes - 1

  __device__ __forceinline__ explicit ThreadRows(int thread) : quad(thread / kLanes), chunk(thread % kLanes) {}
  __device__ __forceinline__ int group() const { return quad >> 2; }  // of 16 rows
  __device__ __forceinline__ int pair() const { return quad & 3; }    // p
  __device__ __forceinline__ int row(int i) const { return 16 * group() + 2 * pair() + (i & 1) + 8 * (i >> 1); }
};

// ---- reading ----

struct Chunk {
  uint32_t word[4];  // 8 BF16 channels
};

__device__ __forceinline__ float channel(const Chunk& x, int i) {
  return __uint_as_float(i & 1 ? x.word[i / 2] & 0xffff0000u : x.word[i / 2] << 16);
}

// `once`: the L2 cache need not keep it.
__device__ __forceinline__ Chunk load_chunk(const uint16_t* x, bool once = false) {
  const auto* const from = reinterpret_cast<const uint4*>(x);
  const uint4 v = once ? __ldcs(from) : __ldg(from);
  return {{v.x, v.y, v.z, v.w}};
}
// The same from an address that is only a multiple of 2 bytes.
__device__ __forceinline__ Chunk load_chunk_by_elements(const uint16_t* x) {
  Chunk out;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out.word[i] = static_cast<uint32_t>(__ldg(x + 2 * i)) | (static_cast<uint32_t>(__ldg(x + 2 * i + 1)) << 16);
  return out;
}

// Consecutive rows of one head.
struct RowSource {
  const uint16_t* first;
  int64_t stride;
  int32_t rows;  // that exist; may be above 64, or below 1
  int32_t aligned;
};
__device__ __forceinline__ RowSource row_source(const TensorView& x, const Sequences& s, int32_t b, int64_t first,
                                                int64_t row, int64_t head, int32_t rows) {
  return {row_pointer(x, s, b, first, row, head), x.seq_stride, rows, x.aligned};
}

// This thread's four rows; zero where there is no row.
template <int kDim>
__device__ __forceinline__ void load_rows(const RowSource& source, const ThreadRows<kDim>& me, Chunk (&x)[kThreadRows],
                                          bool once = false) {
  const uint16_t* const base = source.first + kChunk * me.chunk;
  if (source.aligned) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
      x[i] = me.row(i) < source.rows ? load_chunk(base + me.row(i) * source.stride, once) : Chunk{};
  } else {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
      x[i] = me.row(i) < source.rows ? load_chunk_by_elements(base + me.row(i) * source.stride) : Chunk{};
  }
}

// ---- amax: magnitudes as bits, which order like the numbers with infinity and NaN on top (numerics/scale.h) ----

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ uint32_t chunk_amax(const Chunk& x) {
  uint32_t most = x.word[0] & 0x7fff7fffu;
#pragma unroll
  for (int i = 1; i < 4; ++i) most = __vmaxu2(most, x.word[i] & 0x7fff7fffu);
  return max(most << 16, most & 0xffff0000u);
}

// Largest of each of N values over the CTA's threads, in every thread. Called once per kernel and `scratch`.
template <int kWarps, int N>
__device__ __forceinline__ void block_amax(uint32_t (&bits)[N], uint32_t (*scratch)[kWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    bits[i] = __reduce_max_sync(kAllLanes, bits[i]);
    if (lane == 0) scratch[i][warp] = bits[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) bits[i] = __reduce_max_sync(kAllLanes, lane < kWarps ? scratch[i][lane] : 0u);
}

// ---- writing: images go out past what the L2 cache keeps, as packing kernels read their inputs again ----

struct RowCodes {
  uint32_t word[kThreadRows][2];  // 8 codes of each row
};

// Codes of value(0) ... value(7); 0 for a row that does not exist, even in a block that is NaN.
template <class Value>
__device__ __forceinline__ void encode_row(RowCodes& codes, int i, float inverse, bool exists, Value value) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t word = ptx::e4m3_pack(__fmul_rn(value(4 * h), inverse), __fmul_rn(value(4 * h + 1), inverse),
                                         __fmul_rn(value(4 * h + 2), inverse), __fmul_rn(value(4 * h + 3), inverse));
    codes.word[i][h] = exists ? word : 0u;
  }
}

// The row image. Whole warps call it.
template <int kDim>
__device__ __forceinline__ void store_row_image(uint8_t* image, const ThreadRows<kDim>& me, const RowCodes& codes) {
  const bool odd = (me.chunk & 1) != 0;
#pragma unroll
  for (int i = 0; i < kThreadRows; i += 2) {  // the even lane takes row i, the odd one row i + 1
    const uint32_t low = __shfl_xor_sync(kAllLanes, odd ? codes.word[i][0] : codes.word[i + 1][0], 1);
    const uint32_t high = __shfl_xor_sync(kAllLanes, odd ? codes.word[i][1] : codes.word[i + 1][1], 1);
    const uint4 column = odd ? uint4{low, high, codes.word[i + 1][0], codes.word[i + 1][1]}
                             : uint4{codes.word[i][0], codes.word[i][1], low, high};
    const int row = me.row(i) + (odd ? 1 : 0);
    __stcs(reinterpret_cast<uint4*>(image + image_offset(kImageRows, row, 16 * (me.chunk / 2))), column);
  }
}

enum class RowOrder { sigma, rho };

// Bytes a, b, c, d of four rows become four words, one a channel.
__device__ __forceinline__ uint4 transpose_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t ab0 = __byte_perm(a, b, 0x5140), cd0 = __byte_perm(c, d, 0x5140);  // a0 b0 a1 b1
  const uint32_t ab2 = __byte_perm(a, b, 0x7362), cd2 = __byte_perm(c, d, 0x7362);  // a2 b2 a3 b3
  return {__byte_perm(ab0, cd0, 0x5410), __byte_perm(ab0, cd0, 0x7632), __byte_perm(ab2, cd2, 0x5410),
          __byte_perm(ab2, cd2, 0x7632)};
}

// A transposed image in shared memory. Four columns of D x 16 bytes as in global memory, but with 16 bytes left free
// after every 8 channels, so that the lanes of a row write to different banks.
template <int kDim>
struct TransposedStage {
  static constexpr int kColumn = 18 * kDim;  // bytes
  static constexpr int kBytes = 4 * kColumn;
  static __device__ __forceinline__ int offset(int column, int channel) {
    return column * kColumn + 16 * (channel + channel / kChunk);
  }
};

template <int kDim, RowOrder kOrder>
__device__ __forceinline__ void stage_transposed(uint8_t* stage, const ThreadRows<kDim>& me, const RowCodes& codes) {
  constexpr int kSecond = kOrder == RowOrder::sigma ? 1 : 2, kThird = 3 - kSecond;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint4 words =
        transpose_bytes(codes.word[0][h], codes.word[kSecond][h], codes.word[kThird][h], codes.word[3][h]);
    uint8_t* const at = stage + TransposedStage<kDim>::offset(me.group(), kChunk * me.chunk + 4 * h) + 4 * me.pair();
    *reinterpret_cast<uint32_t*>(at) = words.x;
    *reinterpret_cast<uint32_t*>(at + 16) = words.y;
    *reinterpret_cast<uint32_t*>(at + 32) = words.z;
    *reinterpret_cast<uint32_t*>(at + 48) = words.w;
  }
}

// Copies a finished stage out; a __syncthreads lies before it.
template <int kDim>
__device__ __forceinline__ void store_transposed_image(uint8_t* image, const uint8_t* stage) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * ThreadRows<kDim>::kThreads;
    const int from = TransposedStage<kDim>::offset(at / kDim, at % kDim);
    __stcs(reinterpret_cast<uint4*>(image + 16 * at), *reinterpret_cast<const uint4*>(stage + from));
  }
}

// Adds up the lanes of a row: the butterfly of numerics/reduce.h, the far half first. All lanes get the sum.
template <int kDim>
__device__ __forceinline__ float add_row_lanes(float sum) {
  constexpr int kLanes = ThreadRows<kDim>::kLanes;
  if (kLanes < 32) sum = __fadd_rn(sum, 0.0f);  // the lanes that a narrow row lacks: -0 becomes +0
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, half));
  return sum;
}

}  // namespace dmattn::cuda::pack
