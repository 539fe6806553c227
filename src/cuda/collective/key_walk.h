// The walk of a key-stationary consumer over its items and their queries, a tile of 64 a step
// (kernels/key_gradients.cuh).
//
// A step: S and dP of the next tile, then dV and dK from this one's codes, all issued together; store dS; when S and dP
// have landed, the next tile's P; when dV and dK have as well, its codes. Nothing is in flight across the loop's back
// edge.
#pragma once

#include "cuda/collective/key_consumer.h"

namespace dmattn::cuda {

// The queries of all heads of an item, up to tile `tiles` of each, which are some. ends: the groups' last heads are
// here.
template <class C>
__device__ __forceinline__ KeyEnd walk_tiles(C& c, StageRing<C::T::kStages>& ring, StageRing<kBlocks>& blocks,
                                             int32_t tiles, bool ends) {
  using T = typename C::T;
  using Plan = KeyPlan<T>;
  const auto& p = c.p;
  const uint32_t shared = c.shared;
  const int32_t from = c.first_tile();
  int32_t left = (tiles - from) * p.chunk.group_heads;  // tiles whose codes are not made yet
#pragma unroll
  for (int i = 0; i < 32; ++i) c.s[i] = c.dp[i] = 0.0f;  // so that their registers are free between items
  // The tile whose codes are there: none yet, so that the first step's products of codes are of whatever the registers
  // and the stage hold, and the interval's first tile writes over them. Likewise the last step's S and dP.
  int32_t tile = from - 1, begin = from, head = 0;
  int32_t ds_step = c.ds_step(from) - 1, ds = c.ds_first() - ds_step - 1;  // the tile's place in the chunk
  TileCodes codes{};
  bool block_ends = false;
  auto next_blocks = blocks;
  c.fresh = false;
  ptx::barrier_wait(shared + Plan::block_full(blocks.stage()), blocks.parity());
  ptx::barrier_wait(shared + Plan::full(ring.stage()), ring.parity());
#pragma unroll 1
  for (;;) {
    const uint32_t stage16 = (shared + Plan::stage(ring.stage())) >> 4;
    const uint32_t next_block = shared + Plan::block(next_blocks.stage());
    const uint32_t own16 = c.own16 + (ring.step >> 31);  // c.own16, but its descriptors are not kept over the loop
    const auto rows = c.load_rows(tile + 1, next_block);
    ptx::mma_fence();
    c.issue_scores(own16, stage16, next_block >> 4);
    c.issue_gradients(own16, stage16);
    ptx::mma_commit();
    c.issue_sums(codes, stage16, !c.fresh);
    ptx::mma_commit();
    // In the products' shadow.
    TileOperands in = c.place_rows(rows, c.scale);
    if constexpr (T::kDk) {
      if (tile >= c.ds_begin) c.store_ds(codes.ds, ds);
    }
    ++tile;
    ds_step += ds_step < p.index.width ? 1 : 0;
    ds += ds_step;
    c.land_scores();
    if (left == 0) break;
    const bool ended = (tile % kIntervalTiles == 0 || tile == tiles) && tile > begin;
    if (ended || tile < c.mask_end) [[unlikely]] {
      if (ended) {
        c.land_sums();
        c.end_interval(shared + Plan::block(blocks.stage()), head == 0 && begin == c.first_tile());
        if (tile == tiles || numerics::forgets_exponents(tile / kIntervalTiles)) c.forget_exponents();
        if (tile == tiles) {
          tile = c.first_tile();
          ds_step = c.ds_step(tile);
          ds = c.ds_first() + ++head * static_cast<int32_t>(p.chunk.tiles_per_head);
        }
        begin = tile;
        in = c.operands(tile, next_block);
      }
      if (tile < c.mask_end) c.mask(tile);
    }
    make_codes<C::kRounded, T::kDk>(c.s, c.dp, in, codes, [&] {
      c.land_sums();
      c.release_stage(ring);
      if (block_ends) c.release_block(blocks);
    });
    c.fresh = tile == begin;
    --left;
    ring.advance();
    blocks = next_blocks;
    block_ends = (tile & 1) != 0 || tile + 1 == tiles;
    next_blocks = block_ends ? blocks.next() : blocks;
    ptx::barrier_wait(shared + Plan::full(ring.stage()), ring.parity());
    if (block_ends && left > 0) ptx::barrier_wait(shared + Plan::block_full(next_blocks.stage()), next_blocks.parity());
    if (c.agree(c.unusable(codes))) [[unlikely]]
      c.raise(tile, shared + Plan::block(blocks.stage()), codes);
  }
  c.land_sums();
  const KeyEnd end = c.finish(shared + Plan::block(blocks.stage()), head == 0 && begin == from, ends);
  c.release_stage(ring);
  c.release_block(blocks);
  ring.advance();
  blocks.advance();
  return end;
}

// All items of the CTA.
template <class C>
__device__ __forceinline__ void consume_keys(C& c) {
  using Plan = typename C::Plan;
  const auto& p = c.p;
  StageRing<C::T::kStages> ring;
  StageRing<kBlocks> blocks;
  ptx::store_shared_int(c.slot() + 36, 0);
  ptx::store_shared_int(c.slot() + 40, 0);
  for (;;) {
    const int32_t n = c.slot_int(36);
    if (static_cast<int64_t>(n) * gridDim.x >= p.items) break;
    __syncwarp();
    ptx::store_shared_int(c.slot() + 36, n + 1);
    const int64_t number = key_item_number(n);
    int32_t tiles;
    if (number >= p.items || !c.begin(static_cast<int32_t>(number), tiles)) continue;
    const int32_t keys_parity = c.slot_int(40);
    ptx::barrier_wait(c.shared + Plan::kKeysFull, keys_parity);
    __syncwarp();
    ptx::store_shared_int(c.slot() + 40, keys_parity ^ 1);
    const bool any = c.first_tile() < tiles && p.chunk.group_heads > 0;
    const bool ends = any && p.chunk.group_first + p.chunk.group_heads == p.group;
    KeyEnd end{};
    if (any) end = walk_tiles(c, ring, blocks, tiles, ends);
    __syncwarp();
    if (c.at.lane() == 0) ptx::barrier_arrive(c.shared + Plan::kKeysEmpty);
    if (ends) c.end_item(end);  // the last interval's sums are the item's
  }
}

}  // namespace dmattn::cuda
