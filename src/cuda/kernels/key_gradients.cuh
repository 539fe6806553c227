// Key-stationary backward: dV, dK and the codes of dS. docs/numerics.md, section 4.
//
// A CTA owns 128 keys of a KV head, two consumer warpgroups 64 each, and walks over the query tiles (64) that see them,
// query head after query head of the group. All products have keys as rows, so that P and dS are A operands straight
// from registers:
//     S^T  = K Q^T (+ bias step)     acc[64 keys x 64 queries]      P = 2^(acc f + shift - E), codes -> registers
//     dV  += P^T dO                  B: transposed image of dO (sigma order)
//     dP^T = V dO^T                  dS = P (dP - delta'), codes -> registers
//     dK  += dS^T Q                  B: transposed image of q (sigma order)
// The codes of dS leave from registers: rows key and key + 8 interleaved, movmatrix transposes, so that each query row
// gets its 16 keys in rho order.
//
// dV and dK stay in the tensor core for 512 queries (an interval), then go to FP32 sums. Within an interval the
// exponent E of P (one per 16 keys: a warp) and G of dS (one per 64 keys) only rise, when a code saturates; the
// accumulator is then rescaled by a power of two. On random heads one step in six does: the first of an interval, few others.
//
// Pipeline of a step: P from S; issue dV and dP; dS; issue dK and the next step's S; store dS; wait. Nothing is in flight
// across the loop's back edge. The two warpgroups fill each other's waits.
// Roles: warpgroup 0: copies, bias codes and factors (key_producer.h); warpgroups 1 and 2 consume.
// Barriers: full[stage] (copies + two warps), empty[stage] (8 consumer warps), keys full / empty; named barrier
// 1 + w for warpgroup w's agreement on G.
#pragma once

#include <algorithm>

#include "cuda/collective/key_producer.h"
#include "cuda/collective/key_sums.h"
#include "cuda/collective/launch.h"

namespace dmattn::cuda {

template <class T, bool kRounded>
struct KeyConsumer {
  using Plan = KeyPlan<T>;
  static constexpr int N = T::kSlice / 2;

  const KeyParams& p;
  const uint32_t shared;
  const int group;  // warpgroup
  const LaneMap at;
  const uint32_t own16;            // address / 16 of the warpgroup's images, less their offset in the plan
  const uint32_t image16, bias16;  // what own16 and the bias images of a stage hold for this warpgroup
  int32_t mask_end = 0, ds_begin = 0;
  float s[32], dp[32];
  float dv[T::kSlices][N], dk[T::kSlices][N];
  float e = kUnset, g = kUnset;
  bool fresh = true;  // the interval's first product starts from zero

  // Operands of a stage from its address / 16, the same in the whole warp.
  __device__ __forceinline__ void issue_scores(uint32_t stage16) {
    row_product<T>(s, image_descriptor_at(own16, Plan::kKeys, kImageRows),
                   image_descriptor_at(stage16, Plan::kQ, kImageRows));
    ptx::mma(s, image_descriptor_at(stage16 + bias16, Plan::kBias, kImageRows),
             image_descriptor_at(own16 - image16, Plan::kOnes, kImageRows), true);
  }
  __device__ __forceinline__ void issue_gradients(uint32_t stage16) {
    if constexpr (T::kDk)
      row_product<T>(dp, image_descriptor_at(own16, Plan::kValues, kImageRows),
                     image_descriptor_at(stage16, Plan::kDo, kImageRows));
  }
  __device__ __forceinline__ void landed_dv() {
#pragma unroll
    for (int i = 0; i < T::kSlices; ++i) {
      if constexpr (T::kDv) ptx::mma_landed(dv[i]);
    }
  }
  // The end of a step: everything has landed.
  __device__ __forceinline__ void settle() {
    ptx::mma_wait<0>();
    ptx::mma_landed(s);
    if constexpr (!T::kDk) landed_dv();
#pragma unroll
    for (int i = 0; i < T::kSlices; ++i) {
      if constexpr (T::kDk) ptx::mma_landed(dk[i]);
    }
  }

  __device__ __forceinline__ void probabilities(uint32_t stage, Probabilities<kRounded>& out) {
    const float factor = ptx::load_shared(stage + Plan::kScalars + 4 * group);
    const uint32_t shift = stage + Plan::kShift + 4 * at.pair;
    bool raise = e == kUnset;
#pragma unroll 1
    for (;;) {  // a second time only where a code saturated
      if (raise) {
        const float raised = fmaxf(e, warp_exponent(s, factor, shift));
        if constexpr (T::kDv) {
          if (!fresh) scale_sum<T>(dv, exact_power(e - raised));
        }
        e = raised;
      }
      const bool saturated = make_codes<kRounded>(s, factor, shift, e, out);
      if (raise || !__any_sync(0xffffffffu, saturated)) break;
      raise = true;
    }
  }

  // Codes of dS and their scale 2^G.
  __device__ __forceinline__ float ds_codes(uint32_t stage, const Probabilities<kRounded>& in, uint32_t (&codes)[8]) {
    const float dp_scale = ptx::load_shared(stage + Plan::kScalars + 8 + 4 * group);
    const uint32_t delta = stage + Plan::kDelta + 4 * at.pair;
    bool raise = g == kUnset;
    if (!raise) {
      const float unit = exact_power(-g) * exact_power(e - kCodeExponent);  // together they may be subnormal
      raise = ptx::group_any(1 + group, make_ds_codes<kRounded>(in, dp, dp_scale * unit, unit, delta, codes));
    }
    return raise ? raise_g(dp_scale, delta, in, codes) : exact_power(g);
  }

  // The tile's own amax, through dS in FP32 in the place of dP.
  __device__ __forceinline__ float raise_g(float dp_scale, uint32_t delta, const Probabilities<kRounded>& in,
                                           uint32_t (&codes)[8]) {
    const float own = replace_by_ds<kRounded>(in, dp, dp_scale, exact_power(e - kCodeExponent), delta);
    const float amax = group_maximum(own, shared + Plan::kReduce + 16 * group, 1 + group, at);
    float exponent = g == kUnset ? 0.0f : g;  // all zero, or NaN that the codes carry
    if (amax > 0.0f && numerics::is_finite(amax)) {
      exponent = fmaxf(g, numerics::tile_exponent_of_finite(amax));
      if (!fresh) scale_sum<T>(dk, exact_power(g - exponent));
      g = exponent;
    }
    const float unit = exact_power(-exponent);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float* x = dp + 8 * k;
      codes[2 * k] = ptx::e4m3_pack(x[0] * unit, x[1] * unit, x[4] * unit, x[5] * unit);
      codes[2 * k + 1] = ptx::e4m3_pack(x[2] * unit, x[3] * unit, x[6] * unit, x[7] * unit);
    }
    if (!numerics::is_finite(amax)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = 0x7f7f7f7fu;
    }
    return exact_power(exponent);
  }

  // Each query row gets its 16 keys in rho order: pairs (key, key + 8), transposed. Lane 4 r + t then holds bytes 4 t
  // ... of query 8 m + r, and a warp's store of eight queries is 128 contiguous bytes.
  __device__ __forceinline__ void store_ds(const uint32_t (&codes)[8], float scale, int32_t tile) {
    uint8_t* out = p.chunk.codes + static_cast<int64_t>(tile) * 4096 + 1024 * at.warp + 4 * at.lane;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t low = ptx::transpose_matrix(__byte_perm(codes[2 * k], codes[2 * k + 1], 0x5140));
      const uint32_t high = ptx::transpose_matrix(__byte_perm(codes[2 * k], codes[2 * k + 1], 0x7362));
      *reinterpret_cast<uint32_t*>(out + 256 * k) = low;
      *reinterpret_cast<uint32_t*>(out + 256 * k + 128) = high;
    }
    if (at.warp == 0 && at.lane == 0) p.chunk.scale[tile] = scale;
  }

  __device__ __forceinline__ float factor_v(uint32_t stage) const {
    return exact_power(e - kCodeExponent) * ptx::load_shared(stage + Plan::kScalars + 16);
  }
  __device__ __forceinline__ float factor_k(uint32_t stage) const {
    return exact_power(g) * ptx::load_shared(stage + Plan::kScalars + 20);
  }
  // The thread's part of the CTA's FP32 sums of dV (0) or dK (1).
  __device__ __forceinline__ float* partial(int which) const {
    return p.output.partial + static_cast<int64_t>(slot_int(44)) * (4 * kImageRows * T::D) +
           (2 * group + which) * (kImageRows * T::D) + 4 * (32 * at.warp + at.lane);
  }

  // The interval's sums join the CTA's.
  __device__ __forceinline__ void end_interval(uint32_t stage, bool first) {
    if constexpr (T::kDv) flush_sum<T>(dv, factor_v(stage), partial(0), first);
    if constexpr (T::kDk) flush_sum<T>(dk, factor_k(stage), partial(1), first);
    e = g = kUnset;
    fresh = true;
  }
  // The last one's, and the CTA's, are the outputs.
  __device__ __forceinline__ void end_item(uint32_t stage, bool first) {
    if constexpr (T::kDv) write(p.output.dv, slot(), dv, factor_v(stage), partial(0), first, 1.0f);
    if constexpr (T::kDk) write(p.output.dk, slot() + 8, dk, factor_k(stage), partial(1), first, p.shape.softmax_scale);
    e = g = kUnset;
    fresh = true;
  }

  __device__ __forceinline__ void write(const TensorView& out, uint32_t offset, float (&sum)[T::kSlices][N],
                                        float factor, const float* before, bool first, float scale) {
    if (!out.data) return;
    uint16_t* row = out.data + ptx::load_shared_long(offset) + at.key * out.seq_stride;
    const int32_t left = slot_int(28) - slot_int(24) - at.key;  // keys from the thread's first on
    write_sum<T>(sum, factor, before, first, scale, left > 0 ? row : nullptr,
                 left > 8 ? row + 8 * out.seq_stride : nullptr, at.pair);
  }

  // One query tile. `next` is the stage that follows (this one again at the item's end: a product nobody reads).
  __device__ __forceinline__ void step(int32_t tile, uint32_t stage, uint32_t next16, uint32_t next_full,
                                       uint32_t next_parity, bool ready, int32_t ds) {
    Probabilities<kRounded> pr;
    const uint32_t stage16 = uniform_address(stage);
    if (tile < mask_end)
      mask_scores(s, at, slot_int(24), tile * kImageRows, slot_int(28), slot_int(32), p.shape.causal);
    probabilities(stage, pr);
    if constexpr (!T::kDk) {
      if (!ready) ptx::barrier_wait(next_full, next_parity);
    }
    ptx::mma_fence();
    if constexpr (T::kDv) add_product<T>(dv, pr.codes, image_descriptor_at(stage16, Plan::kDot, T::D), !fresh);
    if constexpr (T::kDk)
      issue_gradients(stage16);
    else
      issue_scores(next16);
    ptx::mma_commit();
    if constexpr (T::kDk) {  // S and dP of the next step beside these fit, and were slower (docs/decisions/0006)
      ptx::mma_wait<0>();
      landed_dv();
      ptx::mma_landed(dp);
      uint32_t codes[8];
      const float scale = ds_codes(stage, pr, codes);
      if (!ready) ptx::barrier_wait(next_full, next_parity);
      ptx::mma_fence();
      add_product<T>(dk, codes, image_descriptor_at(stage16, Plan::kQt, T::D), !fresh);
      issue_scores(next16);
      ptx::mma_commit();
      if (tile >= ds_begin) store_ds(codes, scale, ds);
    }
    fresh = false;
    settle();
  }

  __device__ __forceinline__ uint32_t slot() const {
    return shared + Plan::kSlots + (4 * group + at.warp) * KeySlot::kBytes;
  }
  __device__ __forceinline__ int32_t slot_int(int offset) const { return ptx::load_shared_int(slot() + offset); }

  __device__ __forceinline__ bool begin(int32_t number, int32_t& tiles) {
    KeyItem item;
    if (!key_item(p, number, item)) return false;
    const int32_t key = item.block * kBlockRows + group * kImageRows, last = key + kImageRows - 1;
    const int64_t ds = (item.kv_head - p.chunk.kv_first) * p.chunk.group_heads * p.chunk.tiles_per_head +
                       p.index.row(item.sequence, item.view.q_block0, item.first_tile) + 2 * item.block + group -
                       p.index.first;
    constexpr int32_t kNever = 0x7fffffff;
    // Tiles before mask_end have keys that some query does not see; tiles from ds_begin on see the first key.
    mask_end = last >= item.view.k_rows ? kNever
               : !p.shape.causal        ? 0
                                        : (last - item.offset + kImageRows - 1) / kImageRows;
    ds_begin = !p.shape.causal || key < item.offset ? 0 : (key - item.offset) / kImageRows;
    if (!p.chunk.codes || key >= min(item.view.k_rows, p.chunk.tile_end * kImageRows)) ds_begin = kNever;
    tiles = item.tiles;
    __syncwarp();
    if (at.lane == 0) {
      for (const TensorView* out : {&p.output.dv, &p.output.dk})
        ptx::store_shared_long(
            slot() + (out == &p.output.dv ? 0 : 8),
            row_pointer(*out, p.shape.sequences, item.sequence, item.view.k_first, key, item.kv_head) - out->data);
      ptx::store_shared_int(slot() + 16, static_cast<int32_t>(ds));
      ptx::store_shared_int(slot() + 20, item.first_tile);
      ptx::store_shared_int(slot() + 24, key);
      ptx::store_shared_int(slot() + 28, item.view.k_rows);
      ptx::store_shared_int(slot() + 32, item.offset);
      ptx::store_shared_int(slot() + 44, p.output.by_item ? p.item_first + number : static_cast<int32_t>(blockIdx.x));
    }
    __syncwarp();
    if (item.first_tile == item.tiles) zero();
    return true;
  }

  __device__ __forceinline__ void run() {
    StageRing<T::kStages> ring;
    ptx::store_shared_int(slot() + 36, 0);
    ptx::store_shared_int(slot() + 40, 0);
    const int32_t shift = p.index.packed ? static_cast<int32_t>(p.index.shift) + 1 : 0x40000000;
    for (;;) {
      const int32_t n = slot_int(36);
      if (static_cast<int64_t>(n) * gridDim.x >= p.items) break;
      __syncwarp();
      ptx::store_shared_int(slot() + 36, n + 1);
      const int64_t number = key_item_number(n);
      int32_t tiles;
      if (number >= p.items || !begin(static_cast<int32_t>(number), tiles)) continue;
      const int32_t keys_parity = slot_int(40);
      ptx::barrier_wait(shared + Plan::kKeysFull, keys_parity);
      __syncwarp();
      ptx::store_shared_int(slot() + 40, keys_parity ^ 1);
      int32_t tile = slot_int(20), head = 0, ds = slot_int(16);
      bool more = tile < tiles, first = p.chunk.group_first == 0;
      const bool ends = p.chunk.group_first + p.chunk.group_heads == p.group;  // the groups' last heads are here
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = dp[i] = 0.0f;  // so that their registers are free between items
      bool ready = false;  // the next stage was seen full: asked early, as the answer takes a while
      if (more) {
        ptx::barrier_wait(shared + Plan::full(ring.stage()), ring.parity());
        const uint32_t stage16 = uniform_address(shared + Plan::stage(ring.stage()));
        ptx::mma_fence();
        issue_scores(stage16);
        ptx::mma_commit();
        settle();
      }
#pragma unroll 1
      while (more) {
        const bool head_ends = tile + 1 == tiles;
        more = !head_ends || head + 1 < p.chunk.group_heads;
        const auto next = more ? ring.next() : ring;
        const uint32_t stage = shared + Plan::stage(ring.stage());
        step(tile, stage, uniform_address(shared + Plan::stage(next.stage())), shared + Plan::full(next.stage()),
             next.parity(), ready, ds);
        if (!more && ends) break;
        if (tile % kIntervalTiles == kIntervalTiles - 1 || head_ends) {
          end_interval(stage, first);
          first = false;
        }
        __syncwarp();
        if (at.lane == 0) ptx::barrier_arrive(shared + Plan::empty(ring.stage()));
        ring.advance();
        ready = ptx::barrier_try(shared + Plan::full(ring.next().stage()), ring.next().parity());
        ds += max(0, min(tile + shift, p.index.width));
        ++tile;
        if (head_ends) {
          tile = slot_int(20);
          ds = slot_int(16) + ++head * static_cast<int32_t>(p.chunk.tiles_per_head);
        }
      }
      if (ends && tile < tiles) {  // the last interval's sums are the item's
        end_item(shared + Plan::stage(ring.stage()), first);
        __syncwarp();
        if (at.lane == 0) ptx::barrier_arrive(shared + Plan::empty(ring.stage()));
        ring.advance();
      }
      if (at.lane == 0) ptx::barrier_arrive(shared + Plan::kKeysEmpty);
    }
  }

  // Keys that no query sees.
  __device__ __forceinline__ void zero() const {
    for (int row = at.key; row < at.key + 16; row += 8) {
      if (slot_int(24) + row >= slot_int(28)) continue;
      for (const TensorView* out : {&p.output.dv, &p.output.dk}) {
        const bool is_dv = out == &p.output.dv;
        if (!out->data || !(is_dv ? T::kDv : T::kDk)) continue;
        uint16_t* to = out->data + ptx::load_shared_long(slot() + (is_dv ? 0 : 8)) + row * out->seq_stride;
#pragma unroll 1
        for (int c = at.pair; c < T::D; c += 8) to[c] = to[c + 1] = 0;
      }
    }
  }
};

template <class T, bool kRounded>
__global__ void __launch_bounds__(T::kThreads, 1) key_gradients_kernel(const __grid_constant__ KeyParams p) {
  using Plan = KeyPlan<T>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = static_cast<int>(threadIdx.x) % 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < T::kStages; ++s) {
      ptx::barrier_init(shared + Plan::full(s), 3);
      ptx::barrier_init(shared + Plan::empty(s), T::kConsumerWarps);
    }
    ptx::barrier_init(shared + Plan::kKeysFull, 1);
    ptx::barrier_init(shared + Plan::kKeysEmpty, T::kConsumerWarps);
    ptx::barrier_init_fence();
  }
  prepare_work(p, shared + Plan::kWork);
  fill_bias_ones(shared + Plan::kOnes, static_cast<int>(threadIdx.x), T::kThreads);
  for (int s = 0; s < T::kStages; ++s)  // codes too: nobody writes them where Q is not centred
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kImageRows * kBiasBytes / 16; i += T::kThreads)
      ptx::store_shared4(shared + Plan::stage(s) + Plan::kBias + 16 * i, {0, 0, 0, 0});
  ptx::async_proxy_fence();
  __syncthreads();
  if (warpgroup == 0) {
    ptx::registers_lower<T::kProducerRegisters>();
    key_produce<T>(p, shared);
  } else {
    ptx::registers_raise<T::kConsumerRegisters>();
    const int group = warpgroup - 1;
    const uint32_t image16 = group * (T::kImage / 16);
    KeyConsumer<T, kRounded> consumer{p,
                                      shared,
                                      group,
                                      LaneMap(thread),
                                      uniform_address(shared) + image16,
                                      image16,
                                      static_cast<uint32_t>(group * (kImageRows * kBiasBytes / 16))};
    consumer.run();
  }
}

template <class T, bool kRounded>
cudaError_t start_key_gradients(const Launch& launch, const KeyParams& p) {
  for (int64_t first = 0; first < p.items;) {
    KeyParams part = p;
    part.item_first = static_cast<int32_t>(first);
    part.items = static_cast<int32_t>(std::min<int64_t>(p.items - first, int64_t{kMostItems} * launch.multiprocessors));
    const cudaError_t error = start_kernel<key_gradients_kernel<T, kRounded>, T::kThreads, KeyPlan<T>::kBytes>(
        launch, std::min(part.items, launch.multiprocessors), part);
    if (error != cudaSuccess) return error;
    first += part.items;
  }
  return cudaSuccess;
}

}  // namespace dmattn::cuda
