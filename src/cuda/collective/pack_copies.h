// Rows that pass through shared memory on their way to a thread: copies in flight take no registers there.
//
// A thread takes only what it copied itself, 16 bytes at [slot][thread], so that no barrier is needed.
#pragma once

#include "cuda/collective/pack_rows.h"
#include "cuda/ptx/global.h"

namespace dmattn::cuda::pack {

__device__ __forceinline__ Chunk chunk_of(const uint4& x) { return {{x.x, x.y, x.z, x.w}}; }
__device__ __forceinline__ uint4 words_of(const Chunk& x) { return {x.word[0], x.word[1], x.word[2], x.word[3]}; }

// A thread's four rows of an image (load_rows): slots of 2 D threads.
template <int kDim>
struct CopiedRows {
  static constexpr int kBytes = kImageRows * kDim * 2;
  uint4* slot;  // this thread's first
  __device__ __forceinline__ CopiedRows(uint8_t* shared) : slot(reinterpret_cast<uint4*>(shared) + threadIdx.x) {}
  __device__ __forceinline__ uint4& operator[](int i) const { return slot[i * ThreadRows<kDim>::kThreads]; }
  __device__ __forceinline__ Chunk row(int i) const { return chunk_of((*this)[i]); }
};

// Starts the copies of load_rows. They are there after ptx::copy_async_commit and its wait.
template <int kDim>
__device__ __forceinline__ void copy_rows(const RowSource& source, const ThreadRows<kDim>& me,
                                          const CopiedRows<kDim>& to, uint64_t policy) {
  const uint16_t* const base = source.first + kChunk * me.chunk;
  if (source.aligned) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
      ptx::copy_async4_if(&to[i], base + me.row(i) * source.stride, me.row(i) < source.rows, policy);
  } else {
#pragma unroll 1
    for (int i = 0; i < kThreadRows; ++i)
      to[i] = me.row(i) < source.rows ? words_of(load_chunk_by_elements(base + me.row(i) * source.stride)) : uint4{};
  }
}

// Has the rows in the L2 cache by the time that load_rows asks for them.
template <int kDim>
__device__ __forceinline__ void prefetch_rows(const RowSource& source, const ThreadRows<kDim>& me) {
  constexpr int kLine = 128 / 16;  // chunks
  if (me.chunk % kLine != 0) return;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i)
    if (me.row(i) < source.rows) ptx::prefetch_l2(source.first + kChunk * me.chunk + me.row(i) * source.stride);
}

// Rows of a partial sum, sixteen ahead.
template <int kThreads>
struct RowRing {
  static constexpr int kGroup = 4, kGroups = 4;
  uint4 row[kGroups][kGroup][kThreads];
};

// Adds `count` rows of 8 channels to `sum`, one after the other: a partial sum of a mean.
template <int kThreads>
__device__ __forceinline__ void add_rows(const uint16_t* x, int64_t stride, int32_t count, bool aligned,
                                         RowRing<kThreads>& ring, uint64_t policy, float (&sum)[kChunk]) {
  using Ring = RowRing<kThreads>;
  const auto add = [&](const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] = __fadd_rn(sum[i], channel(chunk, i));
  };
  if (!aligned) {
    for (int32_t row = 0; row < count; ++row) add(load_chunk_by_elements(x + row * stride));
    return;
  }
  const uint16_t* from = x;
  int32_t left = count;
  const auto start = [&](int slot) {
#pragma unroll
    for (int i = 0; i < Ring::kGroup; ++i)
      if (i < left) ptx::copy_async4(&ring.row[slot][i][threadIdx.x], from + i * stride, policy);
    ptx::copy_async_commit();
    from += Ring::kGroup * stride;
    left -= Ring::kGroup;
  };
#pragma unroll
  for (int slot = 0; slot < Ring::kGroups; ++slot) start(slot);
#pragma unroll 1
  for (int32_t row = 0; row < count; row += Ring::kGroup) {
    const int slot = row / Ring::kGroup % Ring::kGroups;
    ptx::copy_async_wait<Ring::kGroups - 1>();
    uint4 rows[Ring::kGroup];
#pragma unroll
    for (int i = 0; i < Ring::kGroup; ++i) rows[i] = ring.row[slot][i][threadIdx.x];
#pragma unroll
    for (int i = 0; i < Ring::kGroup; ++i)
      if (row + i < count) add(chunk_of(rows[i]));
    start(slot);
  }
}

}  // namespace dmattn::cuda::pack
