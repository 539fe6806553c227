// A consumer warpgroup of the key-stationary backward: its 64 keys, what it does with a tile of queries and at the ends
// of intervals and items (kernels/key_gradients.cuh). The walk over items and tiles is in key_walk.h.
#pragma once

#include "cuda/collective/key_codes.h"
#include "cuda/collective/key_sums.h"

namespace dmattn::cuda {

// Factors of an item's last sums, and whether nothing of the item is in the FP32 sums yet.
struct KeyEnd {
  float factor_v, factor_k;
  bool first;
};

template <class Traits, bool kRoundedP>
struct KeyConsumer {
  using T = Traits;
  using Plan = KeyPlan<T>;
  static constexpr bool kRounded = kRoundedP;
  static constexpr int N = T::kSlice / 2;
  static constexpr uint32_t kWarp = 0xffffffffu;
  static constexpr int kAgree = 1;  // named barriers 1 and 2: a warpgroup's agreement on G

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
  float scale = 0.0f;  // row_scale(scale_exponent()): what brings dS to its codes
  bool fresh = true;   // nothing of the interval is in dv and dk yet: its first products start from zero

  // Products of a stage from its address / 16.
  __device__ __forceinline__ void issue_scores(uint32_t own16, uint32_t stage16, uint32_t block16) {
    row_product<T>(s, {own16, Plan::kKeys, kImageRows}, {stage16, Plan::kQ, kImageRows});
    ptx::mma(s, image_descriptor_at(block16 + bias16, 0, kImageRows),
             image_descriptor_at(own16 - image16, Plan::kOnes, kImageRows), true);
  }
  __device__ __forceinline__ void issue_gradients(uint32_t own16, uint32_t stage16) {
    if constexpr (T::kDk) row_product<T>(dp, {own16, Plan::kValues, kImageRows}, {stage16, Plan::kDo, kImageRows});
  }
  __device__ __forceinline__ void issue_sums(const TileCodes& codes, uint32_t stage16, bool accumulate) {
    if constexpr (T::kDv) add_product<T>(dv, codes.p, {stage16, Plan::kDot, T::D}, accumulate);
    if constexpr (T::kDk) add_product<T>(dk, codes.ds, {stage16, Plan::kQt, T::D}, accumulate);
  }
  __device__ __forceinline__ void land_scores() {
    ptx::mma_wait<1>();
    ptx::mma_landed(s);
    if constexpr (T::kDk) ptx::mma_landed(dp);
  }
  __device__ __forceinline__ void land_sums() {
    ptx::mma_wait<0>();
#pragma unroll
    for (int i = 0; i < T::kSlices; ++i) {
      if constexpr (T::kDv) ptx::mma_landed(dv[i]);
      if constexpr (T::kDk) ptx::mma_landed(dk[i]);
    }
  }

  // The warp has read what a stage or a block holds.
  __device__ __forceinline__ void release_stage(StageRing<T::kStages> ring) const {
    __syncwarp();
    if (at.lane() == 0) ptx::barrier_arrive(shared + Plan::empty(ring.stage()));
  }
  __device__ __forceinline__ void release_block(StageRing<kBlocks> blocks) const {
    __syncwarp();
    if (at.lane() == 0) ptx::barrier_arrive(shared + Plan::block_empty(blocks.stage()));
  }

  __device__ __forceinline__ void mask(int32_t tile) {
    mask_scores(s, at, slot_int(24), tile * kImageRows, slot_int(28), slot_int(32), p.shape.causal);
  }
  // Codes that need another exponent: where E is not set P saturates.
  __device__ __forceinline__ bool unusable(const TileCodes& codes) const {
    return codes.p_saturated || codes.ds_saturated || (T::kDk && g == kUnset);
  }
  __device__ __forceinline__ int32_t first_tile() const { return slot_int(20); }  // of each head
  __device__ __forceinline__ int32_t ds_first() const { return slot_int(16); }    // its place in the chunk

  // The warp's E rises to what its scores ask for, and what dV holds follows.
  __device__ __forceinline__ void raise_e(int32_t tile, uint32_t block) {
    const uint32_t shift = block + Plan::kShift + 4 * (kImageRows * (tile & 1) + at.pair());
    const float score = ptx::load_shared(block + Plan::kScalars + 4 * group);
    const float raised = fmaxf(e, warp_exponent(s, score, shift));
    if constexpr (T::kDv) {
      if (!fresh) scale_sum<T>(dv, exact_power(e - raised));
    }
    e = raised;
  }

  // The warpgroup's G rises to the tile's own, from its largest dS, and what dK holds follows. False if that is not
  // finite.
  __device__ __forceinline__ bool raise_g(int32_t tile, uint32_t block) {
    const float most = most_ds<kRounded>(s, dp, place_rows(load_rows(tile, block), row_scale(0.0f)));
    const float amax = group_maximum(most, shared + Plan::kReduce + 16 * group, kAgree + group, at);
    if (__any_sync(kWarp, !numerics::is_finite(amax))) return false;
    if (__any_sync(kWarp, amax > 0.0f)) {
      const float raised = fmaxf(g, numerics::tile_exponent_of_finite(amax) + numerics::kExponentRoom);
      if (!fresh) scale_sum<T>(dk, exact_power(g - raised));
      g = raised;
    }
    return true;
  }

  // A lane's part of what the codes of a tile whose block is there depend on, but for exponents.
  struct TileRows {
    float2 shift, delta;
    float score, gradient;
  };
  __device__ __forceinline__ TileRows load_rows(int32_t tile, uint32_t block) const {
    const uint32_t from = block + Plan::kShift + 4 * kImageRows * (tile & 1) + 8 * at.lane();
    TileRows rows{};
    rows.shift = ptx::load_shared2(from);
    rows.score = ptx::load_shared(block + Plan::kScalars + 4 * group);
    if constexpr (T::kDk) {
      rows.delta = ptx::load_shared2(from + Plan::kDelta - Plan::kShift);
      rows.gradient = ptx::load_shared(block + Plan::kScalars + 8 + 4 * group);
    }
    return rows;
  }
  // All lanes have read the constants of the warp's last tile: they are written over.
  __device__ __forceinline__ TileOperands place_rows(const TileRows& rows, float scale) const {
    const int lane = at.lane();
    __syncwarp();
    const uint32_t to = shared + Plan::kRows + (4 * group + at.warp) * kRowsBytes;
    ptx::store_shared4(to + 16 * lane, {__float_as_uint(rows.shift.x - e), __float_as_uint(rows.shift.y - e),
                                        __float_as_uint(rows.delta.x * scale), __float_as_uint(rows.delta.y * scale)});
    __syncwarp();
    return {to + 16 * (lane & 3), rows.score, rows.gradient * scale};
  }
  // E's and dS's exponents together, as each may be subnormal. 0 where E is not set.
  __device__ __forceinline__ float row_scale(float exponent) const {
    return T::kDk ? exact_power(-exponent) * exact_power(e - kCodeExponent) : 0.0f;
  }
  __device__ __forceinline__ void forget_exponents() {
    e = g = kUnset;
    scale = 0.0f;
  }
  // All zero, or NaN that the codes carry, where G is not set.
  __device__ __forceinline__ float scale_exponent() const { return g == kUnset ? 0.0f : g; }
  __device__ __forceinline__ TileOperands operands(int32_t tile, uint32_t block) const {
    return place_rows(load_rows(tile, block), row_scale(scale_exponent()));
  }

  // True if it is in some lane of the warpgroup (of the warp where only E counts). The vote tells the compiler that the
  // answer is the same in all lanes: without it the loop's counters leave the uniform registers.
  __device__ __forceinline__ bool agree(bool over) const {
    if constexpr (T::kDk) over = ptx::group_any(kAgree + group, over);
    return __any_sync(kWarp, over);
  }

  // E is a matter of the warp, G of the warpgroup; E comes first.
  __device__ __forceinline__ void raise(int32_t tile, uint32_t block, TileCodes& out) {
    bool again = __any_sync(kWarp, e == kUnset || out.p_saturated);
    if (again) raise_e(tile, block);
    if constexpr (!T::kDk) {
      if (again) make_codes<kRounded, false>(s, dp, operands(tile, block), out, [] {});
    } else {
      bool agreed = __any_sync(kWarp, g == kUnset), finite = true;
      if (agreed) finite = raise_g(tile, block);
#pragma unroll 1
      for (again |= agreed;; again = true) {
        if (again) make_codes<kRounded, true>(s, dp, operands(tile, block), out, [] {});
        if (agreed || !agree(out.ds_saturated)) break;
        agreed = true;
        finite = raise_g(tile, block);
      }
      if (!finite) {
#pragma unroll
        for (int i = 0; i < 8; ++i) out.ds[i] = 0x7f7f7f7fu;
      }
    }
    scale = row_scale(scale_exponent());
  }

  // Bytes of keys g and g + 8 interleaved, rho order, and otherwise as they lie in registers (tile/image.h, "dS
  // tiles"): ldmatrix turns them on their way into dQ's products. Evicted first: sums and operands should stay in the
  // L2.
  __device__ __forceinline__ void store_ds(const uint32_t (&codes)[8], int32_t tile) const {
    const int lane = at.lane();
    auto* out = reinterpret_cast<uint4*>(p.chunk.codes + static_cast<int64_t>(tile) * kDsTileBytes) +
                ds_tile_row(at.warp, 0, lane & 3, lane >> 2);
    const auto low = [&](int k) { return __byte_perm(codes[2 * k], codes[2 * k + 1], 0x5140); };
    const auto high = [&](int k) { return __byte_perm(codes[2 * k], codes[2 * k + 1], 0x7362); };
    __stcs(out, make_uint4(low(0), low(1), low(2), low(3)));
    __stcs(out + ds_tile_row(0, 1, 0, 0), make_uint4(high(0), high(1), high(2), high(3)));
    if (at.warp == 0 && lane == 0) p.chunk.scale[tile] = exact_power(scale_exponent());
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

  // From a tile's place in the chunk to that of the tile after it, number `next` of its head. From an item's first tile
  // on, which sees some key of the chunk, it grows by one a tile up to the chunk's width.
  __device__ __forceinline__ int32_t ds_step(int32_t next) const {
    const int32_t shift = p.index.packed ? static_cast<int32_t>(p.index.shift) : 0x40000000;
    return max(0, min(next + shift, p.index.width));
  }

  // What is due at the end of an item, or of a chunk's part of it.
  __device__ __forceinline__ KeyEnd finish(uint32_t block, bool first, bool ends) {
    if (ends)
      return {T::kDv ? factor_v(block) : 0.0f, T::kDk ? factor_k(block) : 0.0f, first && p.chunk.group_first == 0};
    end_interval(block, first);
    forget_exponents();
    return {};
  }

  // The interval's sums join the CTA's. first: it is the first of the chunk's heads.
  __device__ __forceinline__ void end_interval(uint32_t block, bool first) {
    first = first && p.chunk.group_first == 0;
    if constexpr (T::kDv) flush_sum<T>(dv, factor_v(block), partial(0), first);
    if constexpr (T::kDk) flush_sum<T>(dk, factor_k(block), partial(1), first);
  }
  // The last one's, and the CTA's, are the outputs.
  __device__ __forceinline__ void end_item(const KeyEnd& end) {
    if constexpr (T::kDv) write(p.output.dv, slot(), dv, end.factor_v, partial(0), end.first, 1.0f);
    if constexpr (T::kDk)
      write(p.output.dk, slot() + 8, dk, end.factor_k, partial(1), end.first, p.shape.softmax_scale);
    forget_exponents();
  }

  __device__ __forceinline__ void write(const TensorView& out, uint32_t offset, float (&sum)[T::kSlices][N],
                                        float factor, const float* before, bool first, float scale) {
    if (!out.data) return;
    uint16_t* row = out.data + ptx::load_shared_long(offset) + at.key() * out.seq_stride;
    uint16_t* row8 = row + 8 * out.seq_stride;
    const int32_t left = slot_int(28) - slot_int(24) - at.key();  // keys from the thread's first on
    const uintptr_t rows = reinterpret_cast<uintptr_t>(row) | reinterpret_cast<uintptr_t>(row8);
    const bool wide = __all_sync(kWarp, rows % 16 == 0);
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

}  // namespace dmattn::cuda
