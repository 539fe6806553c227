// delta' of the mode matched: sum P dP' / sum P over the very P and dP' that dS is made from (docs/numerics.md,
// section 4; the twin is matched_delta in src/cpu/hopper.cpp).
//
// For 64 queries and each tile of 64 keys, ascending:
//     S = Q K^T + bias step, T = D V^T (codes, tensor core; D = w dO)
//     p = 2^(S f + 8 - c), f = (q_scale k_scale) (softmax_scale log2 e)        FP32, not rounded to codes
//     weighted += (2^-8 d_scale v_scale) sum p T,  total += sum p
// and at the end delta' = weighted / (2^-8 total) (0 where total is), delta = delta' / w: 2^-8 takes out what p
// carries.
//
//              keys, 64 a stage ->                       384 threads, one CTA per multiprocessor:
//            +----+----+----+----+                         warps 0-3    copies, bias codes, factors (query_producer.h)
//   64 rows  |  warpgroup 1  \   |                         warps 4-7    first 64 queries of the item
//            +----+----+----+----+  one item: 128 queries  warps 8-11   last 64 queries
//   64 rows  |  warpgroup 2     \|  of a head
//            +----+----+----+----+
//
// Q and D of an item stay in shared memory; S and T of the next tile run while this one is added. A stage goes back as
// soon as its products are done. Tiles that need a mask come last in an item and have a loop of their own. Barriers:
// query_plan.h.
#include "cuda/collective/delta_consumer.h"
#include "cuda/collective/launch.h"
#include "cuda/collective/query_producer.h"
#include "cuda/kernels/kernels.h"

namespace dmattn::cuda {
namespace {

struct DeltaParams {
  Shape shape;
  QueryOperands operands;
  const float *shift, *weight;  // [Hq][128 QB]
  float* delta;                 // [Hq][128 QB] delta'
  float* delta_out;             // row vector, or null
  int32_t items;
};

// First of the thread's two rows in arrays by padded row.
__device__ __forceinline__ int64_t padded_row(const DeltaParams& p, const QueryItem& item,
                                              const ConsumerThread& thread) {
  const int64_t blocks = static_cast<int64_t>(item.head) * p.shape.sequences.q_blocks;
  return (blocks + item.view.q_block0 + item.block) * kBlockRows + thread.row;
}

// Rows past the sequence's end get a delta' of zero: their shift is -infinity.
__device__ __forceinline__ void store_rows(const DeltaParams& p, const QueryItem& item, const ConsumerThread& thread,
                                           const DeltaRows& rows) {
  const int64_t padded = padded_row(p, item, thread);
  const int64_t vector = row_vector(p.shape.sequences, p.shape.q_heads, item.sequence, item.head, item.view.q_first);
  float weighted[2], total[2];  // of all lanes of a row
#pragma unroll
  for (int r = 0; r < 2; ++r) weighted[r] = row_sum(rows.weighted[r]), total[r] = row_sum(rows.total[r]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (thread.column != 0) continue;
    const bool dead = total[r] == 0.0f || rows.shift[r] == numerics::negative_infinity();
    const float delta = dead ? 0.0f : __fdiv_rn(weighted[r], total[r] * (1.0f / numerics::kProbabilityScale));
    p.delta[padded + 8 * r] = delta;
    const int32_t row = item.block * kBlockRows + thread.row + 8 * r;
    if (p.delta_out == nullptr || row >= item.view.q_rows) continue;
    const float weight = p.weight[padded + 8 * r];
    p.delta_out[vector + row] = weight == 0.0f ? 0.0f : __fdiv_rn(delta, weight);
  }
  __syncwarp();  // products want whole warps
}

template <class T>
__device__ __forceinline__ void consume(const DeltaParams& p, uint32_t shared, int consumer_warp) {
  using Plan = QueryPlan<T>;
  const ConsumerThread thread(shared, consumer_warp);
  StageRing<T::kStages> ring;
  StageRing<T::kBlocks> block_ring;
  for (int32_t round = 0, index; (index = query_item_index(round)) < p.items; ++round) {
    const QueryItem item = query_item(p.shape, index);
    if (item.block < 0) continue;
    const int64_t padded = padded_row(p, item, thread);
    DeltaRows rows = {{p.shift[padded], p.shift[padded + 8]}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    if (item.tiles > 0) {
      const int buffer = block_ring.stage();
      ptx::barrier_wait(shared + Plan::block_full(buffer), block_ring.parity());
      using Left = LeftImage<T::kDim, T::kLeftInRegisters>;
      const Left queries(shared + Plan::query(buffer, 0, thread.group), consumer_warp, thread.lane);
      const Left gradients(shared + Plan::query(buffer, 1, thread.group), consumer_warp, thread.lane);
      delta_tiles<T>(p.shape, index, thread, queries, gradients, ring, rows);
      thread.release(shared + Plan::block_empty(buffer));
      block_ring.advance();
    }
    store_rows(p, query_item(p.shape, fresh(index)), thread.anew(), rows);
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) delta_kernel(const __grid_constant__ DeltaParams p) {
  extern __shared__ __align__(128) uint8_t storage[];
  const uint32_t shared = ptx::shared_address(storage);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  prepare_storage<T>(shared);
  if (warp < T::kProducerWarps) {
    ptx::registers_lower<T::kProducerRegisters>();
    produce<T>(p.shape, p.operands, p.items, shared, warp, static_cast<int>(threadIdx.x) % 32);
  } else {
    ptx::registers_raise<T::kConsumerRegisters>();
    consume<T>(p, shared, warp - T::kProducerWarps);
  }
}

}  // namespace

cudaError_t launch_delta(const Launch& launch, const Shape& shape, const KeyCodes& keys, const QueryCodes& queries,
                         const GradientCodes& gradients, float* delta_out) {
  const int64_t items = query_item_count(shape);
  if (items == 0) return cudaSuccess;
  if (items > kMostQueryItems) return cudaErrorInvalidValue;
  const DeltaParams params{shape,
                           {{queries.q, gradients.d_o},
                            keys.k,
                            keys.v,
                            queries.q_scale,
                            gradients.d_scale,
                            keys.k_scale,
                            keys.v_scale,
                            queries.bias},
                           gradients.shift,
                           gradients.weight,
                           gradients.delta,
                           delta_out,
                           static_cast<int32_t>(items)};
  return with_head_dim(launch.head_dim, [&](auto dim) {
    using T = QueryTraits<decltype(dim)::value, 2>;
    return start_kernel<delta_kernel<T>, T::kThreads, QueryPlan<T>::kBytes>(
        launch, query_item_grid(params.items, launch.multiprocessors), params);
  });
}

}  // namespace dmattn::cuda
