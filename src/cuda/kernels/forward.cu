// Forward: O and the rows' statistics from codes (docs/numerics.md, section 3; the twin is src/cpu/hopper.cpp).
//
// For 64 queries and each tile of 64 keys, ascending:
//     S = Q K^T + bias step (codes, tensor core)       f = (q_scale k_scale) (softmax_scale log2 e)
//     b = ceil(max S f) per row                        p = 2^(S f + 8 - b), code = E4M3(p)
//     M' = max(M, b)                                   O = O 2^(M - M') + (v_scale 2^(b - M')) T, T = code V from zero
//     l, l^: sums of p (where asked for: onepass without lse needs none) and of codes, rescaled like O
// and at the end O / l^, lse = M ln 2 + ln(l / 2^8) + softmax_scale <q, K mean>.
//
//              keys, 64 a stage ->                       384 threads, one CTA per multiprocessor:
//            +----+----+----+----+                         warps 0-3    copies, bias codes, factors (query_producer.h)
//   64 rows  |  warpgroup 1  \   |                         warps 4-7    first 64 queries of the item
//            +----+----+----+----+  one item: 128 queries  warps 8-11   last 64 queries
//   64 rows  |  warpgroup 2     \|  of a head
//            +----+----+----+----+
//
// A tile's accumulator is, packed, the A operand of its product with V (V is stored in sigma order, tile/image.h). S of
// the next tile runs while P of this one is computed (head dimensions 64 and 128; 256 has no registers for it). Tiles
// that need a mask come last in an item and have a loop of their own. Barriers: query_plan.h.
#include "cuda/collective/forward_consumer.h"
#include "cuda/collective/forward_epilogue.h"
#include "cuda/collective/launch.h"
#include "cuda/collective/query_producer.h"
#include "cuda/kernels/kernels.h"

namespace dmattn::cuda {
namespace {

struct ForwardParams {
  Shape shape;
  QueryOperands operands;
  ForwardOutput output;
  const float* mean_dot;
  int32_t items;
};

template <class T>
__device__ __forceinline__ void consume(const ForwardParams& p, uint32_t shared, int consumer_warp) {
  using Plan = QueryPlan<T>;
  const ConsumerThread thread(shared, consumer_warp);
  StageRing<T::kStages> ring;
  StageRing<T::kBlocks> block_ring;
  for (int32_t round = 0, index; (index = query_item_index(round)) < p.items; ++round) {
    const QueryItem first = query_item(p.shape, index);
    if (first.block < 0) continue;
    ForwardRows<T::kDim> rows;
    rows.clear();
    if (first.tiles > 0) {
      ptx::barrier_wait(shared + Plan::block_full(block_ring.stage()), block_ring.parity());
      const LeftImage<T::kDim, T::kLeftInRegisters> queries(shared + Plan::query(block_ring.stage(), 0, thread.group),
                                                            consumer_warp, thread.lane);
      forward_tiles<T>(p.shape, index, thread, queries, ring, rows);
      thread.release(shared + Plan::block_empty(block_ring.stage()));
      block_ring.advance();
    }
    store_rows<T>(p.shape, p.output, p.mean_dot, query_item(p.shape, fresh(index)), thread.anew(), rows);
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) forward_kernel(const __grid_constant__ ForwardParams p) {
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

cudaError_t launch_forward(const Launch& launch, const Shape& shape, const KeyCodes& keys, const QueryCodes& queries,
                           const ForwardOutput& output) {
  const int64_t items = query_item_count(shape);
  if (items == 0) return cudaSuccess;
  if (items > kMostQueryItems) return cudaErrorInvalidValue;
  const ForwardParams params{
      shape,
      {{queries.q, nullptr}, keys.k, keys.v_t, queries.q_scale, nullptr, keys.k_scale, keys.v_scale, queries.bias},
      output,
      queries.mean_dot,
      static_cast<int32_t>(items)};
  return with_head_dim(launch.head_dim, [&](auto dim) {
    const auto start = [&]<class T>(T) {
      return start_kernel<forward_kernel<T>, T::kThreads, QueryPlan<T>::kBytes>(
          launch, query_item_grid(params.items, launch.multiprocessors), params);
    };
    constexpr int kDim = decltype(dim)::value;
    return output.unrounded ? start(ForwardTraits<kDim, true>()) : start(ForwardTraits<kDim, false>());
  });
}

}  // namespace dmattn::cuda
