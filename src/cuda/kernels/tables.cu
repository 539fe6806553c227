// Tables of variable lengths (schedule/sequences.h): first row and first padded block of every sequence, and the
// sequence of every block.
//
// Two CTAs, one for queries and one for keys, each of which walks the offsets in steps of 1024. An offset is clamped to
// [the one before, rows of the tensor]: that is the smaller of the tensor's rows and the largest offset so far, a scan.
// Offsets that ask for more blocks than the caller's longest sequence allows are cut: from the first sequence that
// does not fit on, every sequence is empty. So whatever the offsets hold, nothing points outside tensors or workspace.
#include <algorithm>

#include "cuda/collective/pack_launch.h"
#include "cuda/kernels/kernels.h"

namespace dmattn::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Side {
  int64_t total;
  int32_t blocks;
  const int32_t* offsets;
  int32_t *start, *block_first, *block_sequence;
};

struct Larger {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
};
struct Plus {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

// Inclusive scan over the CTA. Ends with a barrier, so that `scratch` is free again.
template <class Combine>
__device__ int64_t scan(int64_t x, int64_t* scratch, Combine combine) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const int64_t left = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x = combine(left, x);
  }
  if (lane == 31) scratch[warp] = x;
  __syncthreads();
  if (warp == 0) {
    int64_t all = scratch[lane];
    for (int step = 1; step < 32; step *= 2) {
      const int64_t left = __shfl_up_sync(kAllLanes, all, step);
      if (lane >= step) all = combine(left, all);
    }
    scratch[lane] = all;
  }
  __syncthreads();
  if (warp > 0) x = combine(scratch[warp - 1], x);
  __syncthreads();
  return x;
}

__global__ void __launch_bounds__(kThreads) sequence_tables(int32_t batch, Side queries, Side keys) {
  static_assert(kWarps == 32, "the second level of the scan is one warp");
  const Side side = blockIdx.x == 0 ? queries : keys;
  const int thread = threadIdx.x;
  __shared__ int64_t scratch[kWarps];
  __shared__ int64_t ends[kThreads];  // this step's offsets, clamped
  __shared__ int64_t carried[2];      // offset and blocks up to this step
  __shared__ int32_t kept[2];         // the same where they fit
  if (thread == 0) {
    const int64_t first = min(max(static_cast<int64_t>(side.offsets[0]), int64_t{0}), side.total);
    side.start[0] = static_cast<int32_t>(first);
    side.block_first[0] = 0;
    carried[0] = first, carried[1] = 0;
    kept[0] = static_cast<int32_t>(first), kept[1] = 0;
  }
  __syncthreads();
  for (int64_t base = 1; base <= batch; base += kThreads) {
    const int64_t i = base + thread;
    const int64_t before = carried[0], blocks_before = carried[1];
    const int64_t raw = i <= batch ? static_cast<int64_t>(side.offsets[i]) : int64_t{0};
    const int64_t end = min(Larger{}(before, scan(raw, scratch, Larger{})), side.total);
    ends[thread] = end;
    __syncthreads();
    const int64_t length = end - (thread == 0 ? before : ends[thread - 1]);
    const int64_t blocks = blocks_before + scan((length + kBlockRows - 1) / kBlockRows, scratch, Plus{});
    if (i <= batch && blocks <= side.blocks) {
      side.start[i] = static_cast<int32_t>(end);
      side.block_first[i] = static_cast<int32_t>(blocks);
      atomicMax(&kept[0], static_cast<int32_t>(end));
      atomicMax(&kept[1], static_cast<int32_t>(blocks));
    }
    if (thread == kThreads - 1) carried[0] = end, carried[1] = blocks;
    __syncthreads();
    if (i <= batch && blocks > side.blocks) {
      side.start[i] = kept[0];
      side.block_first[i] = kept[1];
    }
  }
  __syncthreads();
  for (int64_t block = thread; block < side.blocks; block += kThreads) {
    int64_t low = 0, high = batch;  // the last sequence whose first block is at or before this one
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (side.block_first[middle] <= block ? low : high) = middle;
    }
    side.block_sequence[block] = block < kept[1] ? static_cast<int32_t>(low) : -1;
  }
}

}  // namespace

cudaError_t launch_tables(const Launch& launch, int32_t batch, int64_t q_total, int64_t k_total, int32_t q_blocks,
                          int32_t k_blocks, const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k,
                          const SequenceTables& tables) {
  if (batch <= 0) return cudaSuccess;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // offsets are int32
  const Side queries{std::min(q_total, kMost), q_blocks, cu_seqlens_q, tables.q_start, tables.q_block_first,
                     tables.q_block_sequence};
  const Side keys{std::min(k_total, kMost), k_blocks, cu_seqlens_k, tables.k_start, tables.k_block_first,
                  tables.k_block_sequence};
  sequence_tables<<<2, kThreads, 0, launch.stream>>>(batch, queries, keys);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
