// Key-stationary backward: dV, dK and the codes of dS. docs/numerics.md, section 4.
//
// A CTA owns 128 keys of a KV head, two consumer warpgroups 64 each, and walks over the query tiles (64) that see them,
// query head after query head of the group. All products have keys as rows, so that P and dS are A operands straight
// from registers:
//     S^T  = K Q^T (+ bias step)     acc[64 keys x 64 queries]      P = 2^(acc f + shift - E), codes -> registers
//     dV  += P^T dO                  B: transposed image of dO (sigma order)
//     dP^T = V dO^T                  dS = P (dP - delta'), codes -> registers
//     dK  += dS^T Q                  B: transposed image of q (sigma order)
// The codes of dS leave through shared memory: rows key and key + 8 interleaved, stmatrix transposes, so that each query
// row gets its 16 keys in rho order; each warp stores its own 1 KB.
//
// dV and dK stay in the tensor core for 512 queries (an interval), then go to FP32 sums. Within an interval the
// exponent E of P (one per 16 keys: a warp) and G of dS (one per 64 keys) only rise, when a code saturates; the
// accumulator is then rescaled by a power of two. Three of four warps never leave the fast path.
//
// Pipeline of a step: P from S; issue dV and the next S; dS from dP; issue dK and the next dP; store dS; one wait. (dS
// from unrounded P: issue dV and dP; dS; issue dK and the next S.) Nothing is in flight across the loop's back edge.
// Roles: warpgroup 0: warp 0 copies, warps 1 and 2 bias codes and factors; warpgroups 1 and 2 consume.
// Barriers: full[stage] (copies + two bias warps), empty[stage] (8 consumer warps), keys full / empty; named barrier
// 1 + w for warpgroup w's agreement on G.
#pragma once

#include "cuda/collective/key_producer.h"
#include "cuda/collective/key_sums.h"

namespace dmattn::cuda {

template <class T, bool kRounded>
struct KeyConsumer {
  using Plan = KeyPlan<T>;
  static constexpr int N = T::kSlice / 2;
  // Where registers allow, S and dP of the next step run beside dV and dK of this one. Where dS wants the 32 unrounded
  // values of P, or dV and dK take 128 registers, dP runs beside dV of its own step and S of the next beside dK.
  static constexpr bool kAhead = (kRounded || !T::kDk) && !(T::kDv && T::kDk && T::D == 128);

  const KeyParams& p;
  const uint32_t shared;
  const int group;  // warpgroup
  const LaneMap at;
  float s[32], dp[32];
  float dv[T::kSlices][N], dk[T::kSlices][N];
  float e = kUnset, g = kUnset;
  bool fresh = true;  // the interval's first product starts from zero

  __device__ __forceinline__ uint32_t own_keys() const { return shared + Plan::kKeys + group * T::kImage; }
  __device__ __forceinline__ uint32_t own_values() const { return shared + Plan::kValues + group * T::kImage; }

  __device__ __forceinline__ void issue_scores(uint32_t stage) {
    row_product<T>(s, own_keys(), stage + Plan::kQ);
    ptx::mma(s, image_descriptor(stage + Plan::kBias + group * kImageRows * kBiasBytes, kImageRows),
             image_descriptor(shared + Plan::kOnes, kImageRows), true);
  }
  __device__ __forceinline__ void issue_gradients(uint32_t stage) {
    if constexpr (T::kDk) row_product<T>(dp, own_values(), stage + Plan::kDo);
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
    if constexpr (kAhead) {
      landed_dv();
      if constexpr (T::kDk) ptx::mma_landed(dp);
    }
#pragma unroll
    for (int i = 0; i < T::kSlices; ++i) {
      if constexpr (T::kDk) ptx::mma_landed(dk[i]);
    }
  }

  __device__ __forceinline__ void raise_e(float factor, uint32_t shift) {
    const float raised = fmaxf(e, warp_exponent(s, factor, shift));
    if constexpr (T::kDv) scale_sum<T>(dv, numerics::power_of_two(e - raised));
    e = raised;
  }

  __device__ __forceinline__ void probabilities(uint32_t stage, Probabilities<kRounded>& out) {
    const float factor = ptx::load_shared(stage + Plan::kScalars + 4 * group);
    const uint32_t shift = stage + Plan::kShift + 4 * at.pair;
    bool raise = e == kUnset;
#pragma unroll 1
    for (;;) {  // a second time only where a code saturated
      if (raise) raise_e(factor, shift);
      const bool saturated = make_codes<kRounded>(s, factor, shift, e, out);
      if (raise || !__any_sync(0xffffffffu, saturated)) break;
      raise = true;
    }
  }

  // Codes of dS and their scale 2^G.
  __device__ __forceinline__ float ds_codes(uint32_t stage, Probabilities<kRounded>& in, uint32_t (&codes)[8]) {
    const float dp_scale = ptx::load_shared(stage + Plan::kScalars + 8 + 4 * group);
    const uint32_t delta = stage + Plan::kDelta + 4 * at.pair;
    bool raise = g == kUnset;
    if (!raise) {
      const float unit = numerics::power_of_two(e - 8.0f - g);
      raise = make_ds_codes<kRounded>(in, dp, dp_scale * unit, unit, delta, codes);
      raise = ptx::group_any(1 + group, raise);
    }
    if (!raise) return numerics::power_of_two(g);
    return raise_g(dp_scale, delta, in, codes);
  }

  __device__ __forceinline__ float raise_g(float dp_scale, uint32_t delta, Probabilities<kRounded>& in,
                                           uint32_t (&codes)[8]) {
    if constexpr (kAhead) {  // the sum may not change while products are in flight
      ptx::mma_wait<0>();
      ptx::mma_landed(s);
      landed_dv();
    }
    forget(in, at.lane);
    const float amax = tile_amax<kRounded>(in, dp, dp_scale, delta, numerics::power_of_two(e - 8.0f),
                                           shared + Plan::kReduce + 16 * group, 1 + group, at);
    if (!numerics::is_finite(amax)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = 0x7f7f7f7fu;
      return numerics::quiet_nan();
    }
    float exponent = g;
    if (amax > 0.0f) {
      const float raised = log2_of(numerics::tile_scale(amax).scale);
      exponent = fmaxf(g, raised);
      scale_sum<T>(dk, numerics::power_of_two(g - exponent));
      g = exponent;
    } else if (g == kUnset) {
      exponent = 0.0f;  // all zero, or NaN that the codes carry
    }
    forget(in, at.lane);
    const float unit = numerics::power_of_two(e - 8.0f - exponent);
    make_ds_codes<kRounded>(in, dp, dp_scale * unit, unit, delta, codes);
    return numerics::power_of_two(exponent);
  }

  // Exponent of a power of two in the normal range.
  static __device__ __forceinline__ float log2_of(float power) {
    return static_cast<float>(static_cast<int>(__float_as_uint(power) >> 23) - 127);
  }

  __device__ __forceinline__ void store_ds(const uint32_t (&codes)[8], float scale, int32_t tile, bool exists,
                                           int buffer) {
    uint32_t columns[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      columns[2 * k] = __byte_perm(codes[2 * k], codes[2 * k + 1], 0x5140);
      columns[2 * k + 1] = __byte_perm(codes[2 * k], codes[2 * k + 1], 0x7362);
    }
    static_assert(T::kStages % 2 == 0, "stages alternate between the two buffers");
    const uint32_t out = shared + Plan::kDs + (2 * group + (buffer & 1)) * 4096 + at.warp * 1024;
    if (at.lane == 0) ptx::bulk_store_wait_read<1>();  // the store of two steps ago has read its buffer
    __syncwarp();
    ptx::store_matrices_transposed(out + 16 * at.lane, columns);
    ptx::store_matrices_transposed(out + 512 + 16 * at.lane, columns + 4);
    ptx::async_proxy_fence();
    __syncwarp();
    if (at.lane == 0) {
      if (exists) {
        ptx::bulk_store(p.chunk.codes + static_cast<int64_t>(tile) * 4096 + at.warp * 1024, out, 1024);
        if (at.warp == 0) p.chunk.scale[tile] = scale;
      } else {
        ptx::bulk_store_commit_empty();
      }
    }
  }

  // The interval's sums join the CTA's FP32 sums; the item's last interval writes the outputs.
  __device__ __forceinline__ void end_interval(uint32_t stage, bool first, bool last) {
    const float factor_v = numerics::power_of_two(e - 8.0f) * ptx::load_shared(stage + Plan::kScalars + 16);
    const float factor_k = numerics::power_of_two(g) * ptx::load_shared(stage + Plan::kScalars + 20);
    float* partial = p.output.partial + static_cast<int64_t>(blockIdx.x) * (4 * kImageRows * T::D) +
                     group * (2 * kImageRows * T::D) + 4 * (32 * at.warp + at.lane);
    float* partial_k = partial + kImageRows * T::D;
    if (!last) {
      if constexpr (T::kDv) flush_sum<T>(dv, factor_v, partial, first);
      if constexpr (T::kDk) flush_sum<T>(dk, factor_k, partial_k, first);
    } else {
      if constexpr (T::kDv) write(p.output.dv, slot(), dv, factor_v, partial, first, 1.0f);
      if constexpr (T::kDk) write(p.output.dk, slot() + 8, dk, factor_k, partial_k, first, p.shape.softmax_scale);
    }
    e = g = kUnset;
    fresh = true;
  }

  __device__ __forceinline__ uint32_t slot() const {
    return shared + Plan::kSlots + (4 * group + at.warp) * KeySlot::kBytes;
  }

  __device__ __forceinline__ void write(const TensorView& out, uint32_t offset, const float (&sum)[T::kSlices][N],
                                        float factor, const float* partial, bool first, float scale) {
    if (!out.data) return;
    uint16_t* row = out.data + ptx::load_shared_long(offset) + at.key * out.seq_stride;
    const int32_t left = slot_keys() - slot_key() - at.key;  // keys from the thread's first on
    const bool own = left > 0, own8 = left > 8;
    write_sum<T>(sum, factor, partial, first, scale, own ? row : nullptr, own8 ? row + 8 * out.seq_stride : nullptr,
                 at.pair);
  }

  // One query tile. `next` is the stage that follows (this one again at the item's end: a product nobody reads).
  __device__ __forceinline__ void step(int32_t tile, uint32_t stage, uint32_t next, uint32_t next_full,
                                       uint32_t next_parity, int32_t ds_tile, int buffer) {
    Probabilities<kRounded> pr;
    {
      const int32_t last_key = slot_key() + kImageRows - 1;
      if (last_key >= slot_keys() || (p.shape.causal && last_key > tile * kImageRows + slot_offset()))
        mask_scores(s, at, slot_key(), tile * kImageRows, slot_keys(), slot_offset(), p.shape.causal);
    }
    probabilities(stage, pr);
    if constexpr (kAhead) ptx::barrier_wait(next_full, next_parity);
    ptx::mma_fence();
    if constexpr (T::kDv) add_product<T>(dv, pr.codes, stage + Plan::kDot, !fresh);
    if constexpr (kAhead) issue_scores(next);
    if constexpr (!kAhead) issue_gradients(stage);
    ptx::mma_commit();
    if constexpr (!kAhead) {
      ptx::mma_wait<0>();
      landed_dv();
      ptx::mma_landed(dp);
    }
    if constexpr (T::kDk) {
      uint32_t codes[8];
      const float scale = ds_codes(stage, pr, codes);
      if constexpr (!kAhead) ptx::barrier_wait(next_full, next_parity);
      ptx::mma_fence();
      add_product<T>(dk, codes, stage + Plan::kQt, !fresh);
      if constexpr (kAhead)
        issue_gradients(next);
      else
        issue_scores(next);
      ptx::mma_commit();
      // Some query of the tile sees the warpgroup's first key.
      const int32_t key = slot_key(), keys = slot_keys(), offset = slot_offset();
      const int32_t last_query = min((tile + 1) * kImageRows, keys - offset) - 1;
      const bool exists = p.chunk.codes && key < min(keys, p.chunk.tile_end * kImageRows) &&
                          (!p.shape.causal || key <= last_query + offset);
      store_ds(codes, scale, ds_tile, exists, buffer);
    }
    fresh = false;
    settle();
  }

  // What is constant for an item waits in shared memory (KeySlot): the accumulators leave no registers for it.
  __device__ __forceinline__ int32_t slot_tiles() const { return ptx::load_shared_int(slot() + 20); }
  __device__ __forceinline__ int32_t slot_first_tile() const { return ptx::load_shared_int(slot() + 24); }
  __device__ __forceinline__ int32_t slot_key() const { return ptx::load_shared_int(slot() + 28); }
  __device__ __forceinline__ int32_t slot_keys() const { return ptx::load_shared_int(slot() + 32); }
  __device__ __forceinline__ int32_t slot_offset() const { return ptx::load_shared_int(slot() + 36); }

  __device__ __forceinline__ bool begin(int32_t number) const {
    KeyItem item;
    if (!key_item(p, number, item)) return false;
    const int32_t key = item.block * kBlockRows + group * kImageRows;
    const int64_t tile = (item.kv_head * p.group - p.chunk.head_first) * p.chunk.tiles_per_head +
                         p.index.row(item.sequence, item.view.q_block0, item.first_tile) + 2 * item.block + group -
                         p.index.first;
    __syncwarp();
    if (at.lane == 0) {
      const Sequences& all = p.shape.sequences;
      for (const TensorView* out : {&p.output.dv, &p.output.dk})
        ptx::store_shared_long(slot() + (out == &p.output.dv ? 0 : 8),
                               row_pointer(*out, all, item.sequence, item.view.k_first, key, item.kv_head) - out->data);
      ptx::store_shared_int(slot() + 16, static_cast<int32_t>(tile));
      ptx::store_shared_int(slot() + 20, item.tiles);
      ptx::store_shared_int(slot() + 24, item.first_tile);
      ptx::store_shared_int(slot() + 28, key);
      ptx::store_shared_int(slot() + 32, item.view.k_rows);
      ptx::store_shared_int(slot() + 36, item.offset);
    }
    __syncwarp();
    if (item.first_tile == item.tiles) zero();
    return true;
  }

  __device__ __forceinline__ void run() {
    StageRing<T::kStages> ring;
    uint32_t keys_parity = 0;
    for (int32_t number = static_cast<int32_t>(blockIdx.x); number < p.items;
         number += static_cast<int32_t>(gridDim.x)) {
      if (!begin(number)) continue;
      ptx::barrier_wait(shared + Plan::kKeysFull, keys_parity);
      keys_parity ^= 1;
      int32_t tile = slot_first_tile(), head = 0, ds = ptx::load_shared_int(slot() + 16);
      bool more = tile < slot_tiles(), first = true;
      if (more) {
        ptx::barrier_wait(shared + Plan::full(ring.stage()), ring.parity());
        ptx::mma_fence();
        issue_scores(shared + Plan::stage(ring.stage()));
        if constexpr (kAhead) issue_gradients(shared + Plan::stage(ring.stage()));
        ptx::mma_commit();
        settle();
      }
#pragma unroll 1
      while (more) {
        const bool head_ends = tile + 1 == slot_tiles();
        more = !head_ends || head + 1 < p.group;
        const auto next = more ? ring.next() : ring;
        step(tile, shared + Plan::stage(ring.stage()), shared + Plan::stage(next.stage()),
             shared + Plan::full(next.stage()), next.parity(), ds, ring.stage());
        if (tile % kIntervalTiles == kIntervalTiles - 1 || head_ends) {
          end_interval(shared + Plan::stage(ring.stage()), first, !more);
          first = false;
        }
        __syncwarp();
        if (at.lane == 0) ptx::barrier_arrive(shared + Plan::empty(ring.stage()));
        ring.advance();
        ds +=
            p.index.packed ? max(0, min(tile + 1 + static_cast<int32_t>(p.index.shift), p.index.width)) : p.index.width;
        ++tile;
        if (head_ends && more) {
          tile = slot_first_tile();
          ds = ptx::load_shared_int(slot() + 16) + ++head * static_cast<int32_t>(p.chunk.tiles_per_head);
        }
      }
      if (at.lane == 0) ptx::barrier_arrive(shared + Plan::kKeysEmpty);
    }
    if (T::kDk && at.lane == 0) ptx::bulk_store_wait_all();
  }

  // Keys that no query sees.
  __device__ __forceinline__ void zero() const {
    for (int row = at.key; row < at.key + 16; row += 8) {
      if (slot_key() + row >= slot_keys()) continue;
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
  fill_bias_ones(shared + Plan::kOnes, static_cast<int>(threadIdx.x), T::kThreads);
  ptx::async_proxy_fence();
  __syncthreads();
  if (warpgroup == 0) {
    ptx::registers_lower<T::kProducerRegisters>();
    if (thread == 0)
      key_copies<T>(p, shared);
    else if (thread >= 32 && thread < 96)
      key_biases<T>(p, shared);
  } else {
    ptx::registers_raise<T::kConsumerRegisters>();
    KeyConsumer<T, kRounded> consumer{p, shared, warpgroup - 1, LaneMap(thread)};
    consumer.run();
  }
}

template <class T, bool kRounded>
cudaError_t start_key_gradients(const Launch& launch, const KeyParams& p) {
  constexpr int kBytes = KeyPlan<T>::kBytes;
  auto* kernel = key_gradients_kernel<T, kRounded>;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
    return error;
  const auto grid = static_cast<unsigned>(p.items < launch.multiprocessors ? p.items : launch.multiprocessors);
  kernel<<<grid, T::kThreads, kBytes, launch.stream>>>(p);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
