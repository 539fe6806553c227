// One 64 x 64 tile of a head's backward, as either numerics computes it. cpu/backward.cpp turns tiles into gradients.
#pragma once

#include "cpu/tile_kernels.h"
#include "cpu/twin.h"
#include "numerics/constants.h"
#include "numerics/scale.h"

namespace dmattn::cpu {

inline constexpr int kTile = numerics::kTile;
inline constexpr int kTileElements = kTile * kTile;
inline constexpr int kGroups = kTile / numerics::kExponentKeys;          // of keys that share an exponent of P
inline constexpr int64_t kIntervalTiles = numerics::kFlushRows / kTile;  // query tiles between two flushes in hopper

// Exponents of one key tile's codes over query tiles (hopper): -infinity until a tile sets them.
struct Exponents {
  float p[kGroups];
  float ds = numerics::negative_infinity();
  Exponents() {
    for (float& exponent : p) exponent = numerics::negative_infinity();
  }
};

// What a tile's product with D or Q codes is worth, by groups of its keys: sum 2^exponent while products add up in the
// tensor core, then `factor`. A NaN of the tile is in the factor alone.
struct KeyScale {
  float exponent[kGroups] = {};
  float factor[kGroups] = {};
};

// Working memory of one tile. All matrices are [query][key] of a 64 x 64 tile.
struct Tile {
  alignas(64) float score[kTileElements];   // S in accumulator units
  alignas(64) float p[kTileElements];       // unrounded P
  alignas(64) float p_code[kTileElements];  // left operand of dV
  alignas(64) float dp[kTileElements];      // dP in accumulator units
  alignas(64) float ds[kTileElements];      // dS before its cast
  alignas(64) float ds_code[kTileElements];
  alignas(64) float bias[numerics::kTensorCoreStep * kTile];
  float row_sum[kTile] = {};    // sum of p over the tile's keys
  float p_scale[kGroups] = {};  // p * p_scale of its key * p_factor of its row is the softmax P
  float p_factor[kTile] = {};
  float dp_factor[kTile] = {};  // per row: dp * dp_factor is dP
  float ds_scale = 0;           // multiplies ds_code
  KeyScale dv, dk;              // of p_code x D codes and ds_code x Q codes
};

// A head's operands, cut into tiles.
class HeadTiles {
 public:
  HeadTiles(const HeadShape& head_shape, const TwinConfig& twin_config, const KvHead& kv_head,
            const QueryHead& query_head, ProductFn<float> product_of_codes)
      : shape(head_shape), config(twin_config), kv(kv_head), query(query_head), product(product_of_codes) {}
  HeadTiles(const HeadTiles&) = delete;
  HeadTiles& operator=(const HeadTiles&) = delete;

  int columns(int64_t row, int64_t key_tile) const {  // visible keys of the tile
    const int64_t n = shape.visible(row) - key_tile * kTile;
    return static_cast<int>(n < 0 ? 0 : n < kTile ? n : kTile);
  }
  int64_t key_tiles(int64_t query_tile) const;       // tiles that some query of the tile sees
  int64_t first_query_tile(int64_t key_tile) const;  // first tile that sees a key of the tile
  int64_t query_tiles() const { return blocks_of(shape.queries, kTile); }
  // First tile at or before `query_tile` that sees a key and starts without exponents.
  int64_t exponents_start(int64_t query_tile, int64_t key_tile) const;

  // Scores of a tile in accumulator units, bias step included, and what turns them into log2 units.
  void scores(int64_t query_tile, int64_t key_tile, float* score, float* bias) const;
  float score_factor(int64_t query_tile, int64_t key_tile) const;

  const HeadShape& shape;
  const TwinConfig& config;
  const KvHead& kv;
  const QueryHead& query;
  const ProductFn<float> product;  // of codes
};

// Computes tiles of one head and mode. Thread-safe after construction.
class TileSource : public HeadTiles {
 public:
  using HeadTiles::HeadTiles;
  virtual ~TileSource() = default;

  // Fills p_code, ds, ds_code and their scales for queries 64 I ... and keys 64 J ...; some key must be visible.
  // `exponents` are those that the query tile before left, unless they are forgotten here, and those it leaves.
  virtual void compute(int64_t query_tile, int64_t key_tile, Exponents& exponents, Tile& tile) const = 0;
  virtual float true_delta(int64_t row) const = 0;
  virtual double row_weight(int64_t) const { return 1; }  // what dO was multiplied by before its cast

  // Quantised dO without its weight.
  double unweighted_d_o(int64_t row, int64_t channel) const {
    const double weight = row_weight(row);
    return weight == 0 ? 0.0
                       : static_cast<double>(d_o.row(row, shape.dim_padded)[channel]) * d_o.scale_of_row(row) / weight;
  }

  Codes d_o;         // codes of (weighted) dO, for dP
  Codes d_o_for_dv;  // the same with the rounded sum's weight; empty where it is d_o
  const Codes& dv_codes() const { return d_o_for_dv.value.empty() ? d_o : d_o_for_dv; }
  ProductFn<float> dv_product = nullptr;  // of p_code and D codes
  // Query tiles whose products add up in the tensor core, and how FP32 takes their sum.
  int64_t flush_tiles = 1;
  void (*promote)(const float* x, float factor, int64_t n, float* y) = nullptr;
};

Gradients run_backward(const TileSource& source, const Wanted& wanted, Diagnostics* diagnostics, KeySums* group);

// Codes of a tile of dS. A NaN scale: codes zero, the NaN travels in ds_scale.
void cast_tile(Tile& tile, numerics::BlockScale scale);

std::unique_ptr<TileSource> hopper_tiles(const HeadShape& shape, const TwinConfig& config, const KvHead& kv,
                                         const QueryHead& query, const BackwardInput& input);
std::unique_ptr<TileSource> paper_tiles(const HeadShape& shape, const TwinConfig& config, const KvHead& kv,
                                        const QueryHead& query, const BackwardInput& input);

Forward hopper_forward(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
                       const float* q);
Forward paper_forward(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
                      const float* q, Mode mode);

// <a, b> over dim_padded elements in the contract's order, also for widths that the kernels do not have.
float contract_dot(const float* a, const float* b, int64_t dim_padded);

}  // namespace dmattn::cpu
