// Shared memory, barriers and work items of the key-stationary backward (kernels/key_gradients.cuh).
#pragma once

#include "cuda/kernels/kernels.h"
#include "cuda/ptx/memory.h"
#include "cuda/schedule/ds_tiles.h"
#include "cuda/tile/image.h"
#include "numerics/constants.h"

namespace dmattn::cuda {

// What a launch computes. Heads of 256 need 128 accumulators a thread for each of dV and dK: two launches.
enum class KeyRole { both, dv, dk };

template <int kHeadDim, KeyRole kRole>
struct KeyTraits {
  static constexpr int D = kHeadDim;
  static constexpr bool kDv = kRole != KeyRole::dk, kDk = kRole != KeyRole::dv;
  static constexpr int kImage = kImageRows * D;     // bytes of an image
  static constexpr int kSlice = D < 128 ? D : 128;  // width of one product of dV and dK
  static constexpr int kSlices = D / kSlice;
  static constexpr int kStages = D == 256 && kDk ? 2 : 4;  // 227 KB is the limit
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kThreads = 384, kConsumerWarps = 8;
  // Registers change hands only within what the CTA starts with, 168 a thread; asking for more would wait forever.
  static_assert(kProducerRegisters * 128 + kConsumerRegisters * 256 <= 168 * kThreads);
};

// What a consumer warp looks up once per item and keeps in shared memory: the accumulators leave no registers.
//   0 int64 dv_offset, 8 int64 dk_offset   elements from the outputs' data to the warpgroup's first key
//   16 ds_tile      index in the chunk of the first head's first tile
//   20 first_tile   of each head
//   24 key          the warpgroup's first; 28 keys of the sequence; 32 offset: query q sees key j if j <= q + offset
//   36 how many items are done; 40 parity of the barrier of K and V; 44 whose FP32 sums the item adds to
struct KeySlot {
  static constexpr int kBytes = 48;
};

constexpr int kBlocks = 4;       // of 128 queries, whose biases and factors are in shared memory
constexpr int kMostItems = 512;  // of a CTA and launch
constexpr int kWorkBytes = 32;
constexpr int kRowsBytes = 8 * kImageRows;  // 8 - c - E and delta' of a tile's queries

// Byte offsets in dynamic shared memory.
template <class T>
struct KeyPlan {
  static constexpr int kKeys = 0;                        // two row images
  static constexpr int kValues = kKeys + 2 * T::kImage;  // two row images (dK)
  // A stage is what a step's products take: the next tile's operands of S and dP, this tile's of dV and dK.
  static constexpr int kStage0 = kValues + (T::kDk ? 2 * T::kImage : 0);
  static constexpr int kQ = 0;
  static constexpr int kDo = kQ + T::kImage;  // row image of dO (dK)
  static constexpr int kNextBytes = kDo + (T::kDk ? T::kImage : 0);
  static constexpr int kQt = kNextBytes;                       // transposed q (dK)
  static constexpr int kDot = kQt + (T::kDk ? T::kImage : 0);  // transposed dO (dV)
  static constexpr int kStageBytes = kDot + (T::kDv ? T::kImage : 0);
  // What belongs to a block of 128 queries, two tiles: bias codes, one image of 64 keys x 32 for each warpgroup,
  // KeyScalars, and 128 floats each of 8 - c and delta'.
  static constexpr int kBlock0 = kStage0 + T::kStages * kStageBytes;
  static constexpr int kScalars = 2 * kImageRows * kBiasBytes;
  static constexpr int kShift = kScalars + 128;
  static constexpr int kDelta = kShift + kBlockRows * 4;
  static constexpr int kBlockBytes = kDelta + kBlockRows * 4;
  static constexpr int kOnes = kBlock0 + kBlocks * kBlockBytes;    // constant operand of the bias step
  static constexpr int kReduce = kOnes + kImageRows * kBiasBytes;  // [warpgroup][4 warps] amax
  static constexpr int kWork = kReduce + 32;                       // [kMostItems] KeyWork of the CTA's items, in turn
  static constexpr int kSlots = kWork + kMostItems * kWorkBytes;   // [8 consumer warps] KeySlot
  static constexpr int kRows = kSlots + 8 * KeySlot::kBytes;       // [8 consumer warps] TileOperands::rows
  static constexpr int kBarriers = kRows + 8 * kRowsBytes;
  static constexpr int kBytes = kBarriers + 8 * (2 * T::kStages + 2 * kBlocks + 2);
  static_assert(kBytes <= 227 * 1024);

  static constexpr int stage(int s) { return kStage0 + s * kStageBytes; }
  static constexpr int block(int b) { return kBlock0 + b * kBlockBytes; }
  static constexpr int full(int s) { return kBarriers + 8 * s; }
  static constexpr int empty(int s) { return kBarriers + 8 * (T::kStages + s); }
  static constexpr int block_full(int b) { return kBarriers + 8 * (2 * T::kStages + b); }
  static constexpr int block_empty(int b) { return kBarriers + 8 * (2 * T::kStages + kBlocks + b); }
  static constexpr int kKeysFull = kBarriers + 8 * (2 * T::kStages + 2 * kBlocks);
  static constexpr int kKeysEmpty = kKeysFull + 8;
};

// Factors of a block's tiles, one of each for either warpgroup's 64 keys.
struct KeyScalars {
  float score[2];     // (q_scale k_scale) (softmax_scale log2 e)
  float gradient[2];  // d_scale v_scale
  float dv_scale, q_scale;
};

// 128 keys of one KV head and the queries that see them.
struct KeyItem {
  SequenceView view;
  int32_t sequence, kv_head, block;  // block: 128 keys, counted from the sequence's first
  int32_t first_tile, tiles;         // query tiles [first_tile, tiles) of each query head of the group
  int32_t offset;                    // query i sees key j if j <= i + offset
};

struct KeyParams {
  Shape shape;
  KeyCodes keys;
  QueryCodes queries;
  GradientCodes gradients;
  DsChunk chunk;
  DsIndex index;
  KeyGradients output;
  int32_t items;       // of this launch
  int32_t item_first;  // its first
  int32_t item_heads;  // KV heads of the chunk times batch
  int32_t group;       // query heads of a KV head
};

// The CTA's n-th item. Items go longest first in a causal batch, so every other round is dealt backwards: otherwise the
// first CTA would have the longest of each.
__device__ __forceinline__ int64_t key_item_number(int32_t n) {
  const int64_t grid = gridDim.x, cta = blockIdx.x;
  return n * grid + (n % 2 == 0 ? cta : grid - 1 - cta);
}

// Keeps the compiler from preparing a division outside the loop: producers have no registers for that.
__device__ __forceinline__ int32_t opaque(int32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// False for an item without keys. Items go by key block first: in a causal batch the longest come first.
__device__ __forceinline__ bool key_item(const KeyParams& p, int32_t item, KeyItem& out) {
  const int32_t heads = opaque(p.item_heads), batch = opaque(p.shape.sequences.batch);
  const int32_t rank = (p.item_first + item) / heads, rest = p.item_first + item - rank * heads;
  const int32_t head = rest / batch;
  out.sequence = rest - head * batch;
  out.kv_head = p.chunk.kv_first + head;
  out.block = p.chunk.tile_first / 2 + rank;
  out.view = sequence_view(p.shape.sequences, out.sequence);
  if (out.block * kBlockRows >= out.view.k_rows) return false;
  out.tiles = (out.view.q_rows + kImageRows - 1) / kImageRows;
  out.offset = out.view.k_rows - out.view.q_rows;
  const int32_t first_query = out.block * kBlockRows - out.offset;  // first that sees the block's first key
  out.first_tile = !p.shape.causal || first_query < 0 ? 0 : min(first_query / kImageRows, out.tiles);
  return true;
}

}  // namespace dmattn::cuda
