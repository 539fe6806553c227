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
// dV and dK stay in the tensor core for 1,024 queries (an interval), then go to FP32 sums. The exponent E of P (one per 16
// keys: a warp) and G of dS (one per 64 keys) only rise, when a code saturates; the accumulator is then rescaled by a
// power of two. On random heads one step in twenty does, most of them the first after exponents were forgotten.
//
// A step: codes of P and dS from S and dP; issue dV, dK and the next step's S and dP, all at once; store dS; wait. Nothing
// is in flight across the loop's back edge. The warpgroups take turns at issuing, so that one computes while the other's
// products run.
// Roles: warpgroup 0: a lane copies, three warps make bias codes and factors (key_producer.h); warpgroups 1 and 2 consume.
// Barriers: full (copies) and empty (8 consumer warps) of stages, block full (a warp and its copies) / empty (8), keys full
// / empty; named barriers 1 + w for warpgroup w's agreement on G, 3 + w for its turn.
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
  static constexpr int kAgree = 1, kTurn = 3;  // named barriers, one of each for a warpgroup

  const KeyParams& p;
  const uint32_t shared;
  const int group;  // warpgroup
  const LaneMap at;
  const uint32_t own16;            // address / 16 of the warpgroup's images, less their offset in the plan
  const uint32_t image16, bias16;  // what own16 and the bias images of a block hold for this warpgroup
  int32_t mask_end = 0, ds_begin = 0;
  float s[32], dp[32];
  float dv[T::kSlices][N], dk[T::kSlices][N];
  float e = kUnset, g = kUnset;
  bool fresh = true;  // nothing of the interval is in dv and dk yet: its first products start from zero

  // Operands of a stage from its address / 16, the same in the whole warp.
  __device__ __forceinline__ void issue_scores(uint32_t stage16, uint32_t block16) {
    row_product<T>(s, {own16, Plan::kKeys, kImageRows}, {stage16, Plan::kQ, kImageRows});
    ptx::mma(s, image_descriptor_at(block16 + bias16, 0, kImageRows),
             image_descriptor_at(own16 - image16, Plan::kOnes, kImageRows), true);
  }
  __device__ __forceinline__ void issue_gradients(uint32_t stage16) {
    if constexpr (T::kDk) row_product<T>(dp, {own16, Plan::kValues, kImageRows}, {stage16, Plan::kDo, kImageRows});
  }
  // The end of a step: everything has landed.
  __device__ __forceinline__ void settle() {
    ptx::mma_wait<0>();
    ptx::mma_landed(s);
    if constexpr (T::kDk) ptx::mma_landed(dp);
#pragma unroll
    for (int i = 0; i < T::kSlices; ++i) {
      if constexpr (T::kDv) ptx::mma_landed(dv[i]);
      if constexpr (T::kDk) ptx::mma_landed(dk[i]);
    }
  }

  // The warp's E rises to what its scores ask for, and what dV holds follows.
  __device__ __forceinline__ void raise_e(const TileOperands& in) {
    const float raised = fmaxf(e, warp_exponent(s, in.score, in.shift));
    if constexpr (T::kDv) {
      if (!fresh) scale_sum<T>(dv, exact_power(e - raised));
    }
    e = raised;
  }

  // The warpgroup's G rises to the tile's own, from its largest dS, and what dK holds follows. False if that is not finite.
  __device__ __forceinline__ bool raise_g(int32_t tile, uint32_t block) {
    TileOperands in = operands(tile, block);
    in.delta_scale = exact_power(e - kCodeExponent);
    in.dp_scale = ptx::load_shared(block + Plan::kScalars + 8 + 4 * group) * in.delta_scale;
    const float amax =
        group_maximum(most_ds<kRounded>(s, dp, in, e), shared + Plan::kReduce + 16 * group, kAgree + group, at);
    if (!numerics::is_finite(amax)) return false;
    if (amax > 0.0f) {
      const float raised = fmaxf(g, numerics::tile_exponent_of_finite(amax) + numerics::kExponentRoom);
      if (!fresh) scale_sum<T>(dk, exact_power(g - raised));
      g = raised;
    }
    return true;
  }

  __device__ __forceinline__ TileOperands operands(int32_t tile, uint32_t block) const {
    TileOperands in{block + Plan::kShift + 4 * (tile % 2 * kImageRows + at.pair()),
                    ptx::load_shared(block + Plan::kScalars + 4 * group), 0, 0};
    if constexpr (T::kDk) {
      // All zero, or NaN that the codes carry, where G is not set; exponents together, as each may be subnormal.
      in.delta_scale = exact_power(g == kUnset ? 0.0f : -g) * exact_power(e - kCodeExponent);
      in.dp_scale = ptx::load_shared(block + Plan::kScalars + 8 + 4 * group) * in.delta_scale;
    }
    return in;
  }

  // Whether the tile needs another exponent somewhere in the warpgroup (in the warp where only E counts): few tiles but
  // those without one do. Where warpgroups take turns, their barrier carries the answer: a flag for every other step.
  __device__ __forceinline__ bool agree(bool over, uint32_t turn) {
    if constexpr (!T::kDk) {
      if constexpr (T::kTurns) ptx::turn_wait(kTurn + group);
      return __any_sync(0xffffffffu, over);
    } else if constexpr (!T::kTurns) {
      return ptx::group_any(kAgree + group, over);
    } else {
      if (over) ptx::store_shared_int(over_flag(turn), 1);
      ptx::turn_wait(kTurn + group);
      return ptx::load_shared_int(over_flag(turn)) != 0;
    }
  }
  __device__ __forceinline__ uint32_t over_flag(uint32_t turn) const {
    return shared + Plan::kOver + 8 * group + 4 * turn;
  }

  // E is a matter of the warp, G of the warpgroup; E comes first.
  __device__ __forceinline__ void raise(int32_t tile, uint32_t block, TileCodes& out, uint32_t turn) {
    bool again = e == kUnset || __any_sync(0xffffffffu, out.p_saturated);
    if (again) raise_e(operands(tile, block));
    if constexpr (!T::kDk) {
      if (again) make_codes<kRounded, false>(s, dp, operands(tile, block), e, out);
    } else {
      bool agreed = g == kUnset, finite = true;
      if (agreed) finite = raise_g(tile, block);
#pragma unroll 1
      for (again |= agreed;; again = true) {
        if (again) make_codes<kRounded, true>(s, dp, operands(tile, block), e, out);
        if (agreed || !ptx::group_any(kAgree + group, out.ds_saturated)) break;
        agreed = true;
        finite = raise_g(tile, block);
      }
      if (!finite) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out.ds[i] = 0x7f7f7f7fu;
      }
      // All warps have seen the flag before the barriers above; its next use is two turns away.
      if constexpr (T::kTurns) ptx::store_shared_int(over_flag(turn), 0);
    }
  }

  // Each query row gets its 16 keys in rho order: pairs (key, key + 8), transposed. Lane 4 r + t then holds bytes 4 t
  // ... of query 8 m + r, and a warp's store of eight queries is 128 contiguous bytes.
  __device__ __forceinline__ void store_ds(const uint32_t (&codes)[8], float scale, int32_t tile) {
    uint8_t* out = p.chunk.codes + static_cast<int64_t>(tile) * 4096 + 1024 * at.warp + 4 * at.lane();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t low = ptx::transpose_matrix(__byte_perm(codes[2 * k], codes[2 * k + 1], 0x5140));
      const uint32_t high = ptx::transpose_matrix(__byte_perm(codes[2 * k], codes[2 * k + 1], 0x7362));
      *reinterpret_cast<uint32_t*>(out + 256 * k) = low;
      *reinterpret_cast<uint32_t*>(out + 256 * k + 128) = high;
    }
    if (at.warp == 0 && at.lane() == 0) p.chunk.scale[tile] = scale;
  }

  __device__ __forceinline__ float factor_v(uint32_t block) const {
    return exact_power(e - kCodeExponent) * ptx::load_shared(block + Plan::kScalars + 16);
  }
  __device__ __forceinline__ float factor_k(uint32_t block) const {
    return exact_power(g) * ptx::load_shared(block + Plan::kScalars + 20);
  }
  // The thread's part of the CTA's FP32 sums of dV (0) or dK (1).
  __device__ __forceinline__ float* partial(int which) const {
    return p.output.partial + static_cast<int64_t>(slot_int(44)) * (4 * kImageRows * T::D) +
           (2 * group + which) * (kImageRows * T::D) + 4 * (32 * at.warp + at.lane());
  }

  // The interval's sums join the CTA's.
  __device__ __forceinline__ void end_interval(uint32_t block, bool first) {
    if constexpr (T::kDv) flush_sum<T>(dv, factor_v(block), partial(0), first);
    if constexpr (T::kDk) flush_sum<T>(dk, factor_k(block), partial(1), first);
  }
  // The last one's, and the CTA's, are the outputs.
  __device__ __forceinline__ void end_item(float of_dv, float of_dk, bool first) {
    if constexpr (T::kDv) write(p.output.dv, slot(), dv, of_dv, partial(0), first, 1.0f);
    if constexpr (T::kDk) write(p.output.dk, slot() + 8, dk, of_dk, partial(1), first, p.shape.softmax_scale);
    e = g = kUnset;
  }

  __device__ __forceinline__ void write(const TensorView& out, uint32_t offset, float (&sum)[T::kSlices][N],
                                        float factor, const float* before, bool first, float scale) {
    if (!out.data) return;
    uint16_t* row = out.data + ptx::load_shared_long(offset) + at.key() * out.seq_stride;
    uint16_t* row8 = row + 8 * out.seq_stride;
    const int32_t left = slot_int(28) - slot_int(24) - at.key();  // keys from the thread's first on
    const uintptr_t rows = reinterpret_cast<uintptr_t>(row) | reinterpret_cast<uintptr_t>(row8);
    const bool wide = __all_sync(0xffffffffu, rows % 16 == 0);
    row = left > 0 ? row : nullptr, row8 = left > 8 ? row8 : nullptr;
    if (wide)
      write_sum<T, true>(sum, factor, before, first, scale, row, row8, at.lane());
    else
      write_sum<T, false>(sum, factor, before, first, scale, row, row8, at.lane());
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
    if (at.lane() == 0) {
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
    StageRing<kBlocks> blocks;
    uint32_t turn = 0;                                   // 0, 1, 0, 1 ... over all steps of the CTA
    if (T::kTurns && group == 1) ptx::turn_pass(kTurn);  // the first turn
    ptx::store_shared_int(slot() + 36, 0);
    ptx::store_shared_int(slot() + 40, 0);
    const int32_t shift = p.index.packed ? static_cast<int32_t>(p.index.shift) : 0x40000000;
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
      bool first = p.chunk.group_first == 0;
      int32_t left = (tiles - tile) * p.chunk.group_heads;
      const bool ends =
          left > 0 && p.chunk.group_first + p.chunk.group_heads == p.group;  // the groups' last heads are here
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = dp[i] = 0.0f;  // so that their registers are free between items
      TileOperands in{};
      bool ready = false;  // the step's stage and block were seen full: asked early, as the answer takes a while
      if (left > 0) {
        const uint32_t stage = shared + Plan::stage(ring.stage()), block = shared + Plan::block(blocks.stage());
        ptx::barrier_wait(shared + Plan::block_full(blocks.stage()), blocks.parity());
        ptx::barrier_wait(shared + Plan::full(ring.stage()), ring.parity());
        ptx::mma_fence();
        issue_scores(uniform_address(stage), uniform_address(block));
        issue_gradients(uniform_address(stage));
        ptx::mma_commit();
        in = operands(tile, block);
        settle();
        __syncwarp();
        if (at.lane() == 0) ptx::barrier_arrive(shared + Plan::empty(ring.stage()));
        ring.advance();
      }
      int32_t begin = tile;  // the interval's first
#pragma unroll 1
      while (left > 0) {
        // One query tile, whose S and dP are there. At the item's end, products of whatever the stage holds of an old one:
        // nobody reads them.
        fresh = tile == begin;
        const uint32_t stage = shared + Plan::stage(ring.stage()), stage16 = uniform_address(stage);
        const uint32_t block = shared + Plan::block(blocks.stage());
        const bool block_ends = tile % 2 == 1 || tile + 1 == tiles;
        const auto next_blocks = block_ends ? blocks.next() : blocks;
        const uint32_t next_block = shared + Plan::block(next_blocks.stage());
        if (tile < mask_end)
          mask_scores(s, at, slot_int(24), tile * kImageRows, slot_int(28), slot_int(32), p.shape.causal);
        TileCodes codes;
        make_codes<kRounded, T::kDk>(s, dp, in, e, codes);
        if (!ready) {
          ptx::barrier_wait(shared + Plan::full(ring.stage()), ring.parity());
          if (left > 1) ptx::barrier_wait(shared + Plan::block_full(next_blocks.stage()), next_blocks.parity());
        }
        // Where E is not set P saturates.
        if (agree(codes.p_saturated || codes.ds_saturated || (T::kDk && g == kUnset), turn)) [[unlikely]]
          raise(tile, block, codes, turn);
        ptx::mma_fence();
        if constexpr (T::kDv) add_product<T>(dv, codes.p, {stage16, Plan::kDot, T::D}, !fresh);
        if constexpr (T::kDk) add_product<T>(dk, codes.ds, {stage16, Plan::kQt, T::D}, !fresh);
        issue_scores(stage16, uniform_address(next_block));
        issue_gradients(stage16);
        ptx::mma_commit();
        if constexpr (T::kTurns) ptx::turn_pass(kTurn + 1 - group);
        // In the products' shadow.
        if constexpr (T::kDk) {
          if (tile >= ds_begin) store_ds(codes.ds, exact_power(g == kUnset ? 0.0f : g), ds);
        }
        const int32_t next_tile = tile + 1 == tiles ? slot_int(20) : tile + 1;
        in = operands(next_tile, next_block);
        // The next step's stage, and the block of the tile after it if that is the same head's. No branches: they take longer
        // than the questions.
        const bool block_ready =
            ptx::barrier_try(shared + Plan::block_full(blocks.next().stage()), blocks.next().parity());
        ready = ptx::barrier_try(shared + Plan::full(ring.next().stage()), ring.next().parity()) &
                (block_ready | (tile % 2 == 1)) & (tile + 2 < tiles);
        ++tile, turn ^= 1;
        ds += max(0, min(tile + shift, p.index.width));
        settle();
        if (--left == 0 && ends) break;
        if (tile % kIntervalTiles == 0 || tile == tiles) {
          end_interval(block, first);
          first = false;
          if (tile == tiles || numerics::forgets_exponents(tile / kIntervalTiles)) {
            e = g = kUnset;
            in = operands(next_tile, next_block);
          }
          if (tile == tiles) {
            tile = slot_int(20);
            ds = slot_int(16) + ++head * static_cast<int32_t>(p.chunk.tiles_per_head);
          }
          begin = tile;
        }
        __syncwarp();
        if (at.lane() == 0) {
          ptx::barrier_arrive(shared + Plan::empty(ring.stage()));
          if (block_ends) ptx::barrier_arrive(shared + Plan::block_empty(blocks.stage()));
        }
        ring.advance();
        blocks = next_blocks;
      }
      float of_dv = 0.0f, of_dk = 0.0f;
      if (ends) {
        const uint32_t block = shared + Plan::block(blocks.stage());
        of_dv = T::kDv ? factor_v(block) : 0.0f, of_dk = T::kDk ? factor_k(block) : 0.0f;
        __syncwarp();
        if (at.lane() == 0) {
          ptx::barrier_arrive(shared + Plan::empty(ring.stage()));
          ptx::barrier_arrive(shared + Plan::block_empty(blocks.stage()));
        }
        ring.advance();
        blocks.advance();
      }
      __syncwarp();
      if (at.lane() == 0) ptx::barrier_arrive(shared + Plan::kKeysEmpty);
      if (ends) end_item(of_dv, of_dk, first);  // the last interval's sums are the item's
    }
  }

  // Keys that no query sees.
  __device__ __forceinline__ void zero() const {
    for (int row = at.key(); row < at.key() + 16; row += 8) {
      if (slot_int(24) + row >= slot_int(28)) continue;
      for (const TensorView* out : {&p.output.dv, &p.output.dk}) {
        const bool is_dv = out == &p.output.dv;
        if (!out->data || !(is_dv ? T::kDv : T::kDk)) continue;
        uint16_t* to = out->data + ptx::load_shared_long(slot() + (is_dv ? 0 : 8)) + row * out->seq_stride;
#pragma unroll 1
        for (int c = at.pair(); c < T::D; c += 8) to[c] = to[c + 1] = 0;
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
      ptx::barrier_init(shared + Plan::full(s), 1);
      ptx::barrier_init(shared + Plan::empty(s), T::kConsumerWarps);
    }
    for (int b = 0; b < kBlocks; ++b) {
      ptx::barrier_init(shared + Plan::block_full(b), 2);
      ptx::barrier_init(shared + Plan::block_empty(b), T::kConsumerWarps);
    }
    ptx::barrier_init(shared + Plan::kKeysFull, 1);
    ptx::barrier_init(shared + Plan::kKeysEmpty, T::kConsumerWarps);
    ptx::barrier_init_fence();
  }
  prepare_work(p, shared + Plan::kWork);
  if (threadIdx.x < 4) ptx::store_shared_int(shared + Plan::kOver + 4 * threadIdx.x, 0);
  fill_bias_ones(shared + Plan::kOnes, static_cast<int>(threadIdx.x), T::kThreads);
  for (int b = 0; b < kBlocks; ++b)  // codes too: nobody writes them where Q is not centred
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kImageRows * kBiasBytes / 16; i += T::kThreads)
      ptx::store_shared4(shared + Plan::block(b) + 16 * i, {0, 0, 0, 0});
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
