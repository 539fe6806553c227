// One 64 x 64 tile of a head's backward, as either numerics computes it, and the driver that turns tiles into
// gradients. Every output has one owner: dQ's rows add key tiles in ascending order, dK's and dV's rows query tiles in
// ascending order, whatever computes them.
#pragma once

#include "cpu/tile_kernels.h"
#include "cpu/twin.h"
#include "numerics/constants.h"

namespace dmattn::cpu {

inline constexpr int kTile = numerics::kTile;
inline constexpr int kTileElements = kTile * kTile;

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
  float p_factor[kTile] = {};   // per row: p * p_factor is the softmax P
  float dp_factor[kTile] = {};  // per row: dp * dp_factor is dP
  float dv_factor = 0;          // multiplies p_code x D codes
  float ds_scale = 0;           // multiplies ds_code
};

// Computes tiles of one head and mode. Thread-safe after construction.
class TileSource {
 public:
  TileSource(const HeadShape& head_shape, const TwinConfig& twin_config, const KvHead& kv_head,
             const QueryHead& query_head)
      : shape(head_shape), config(twin_config), kv(kv_head), query(query_head) {}
  virtual ~TileSource() = default;
  TileSource(const TileSource&) = delete;
  TileSource& operator=(const TileSource&) = delete;

  // Fills p_code, ds, ds_code and their factors for queries 64 I ... and keys 64 J ...; some key must be visible.
  virtual void compute(int64_t query_tile, int64_t key_tile, Tile& tile) const = 0;
  virtual float true_delta(int64_t row) const = 0;
  virtual double row_weight(int64_t) const { return 1; }  // what dO was multiplied by before its cast

  // Quantised dO without its weight.
  double unweighted_d_o(int64_t row, int64_t channel) const {
    const double weight = row_weight(row);
    return weight == 0 ? 0.0
                       : static_cast<double>(d_o.row(row, shape.dim_padded)[channel]) * d_o.scale_of_row(row) / weight;
  }

  int columns(int64_t row, int64_t key_tile) const {  // visible keys of the tile
    const int64_t n = shape.visible(row) - key_tile * kTile;
    return static_cast<int>(n < 0 ? 0 : n < kTile ? n : kTile);
  }
  int64_t key_tiles(int64_t query_tile) const;       // tiles that some query of the tile sees
  int64_t first_query_tile(int64_t key_tile) const;  // first tile that sees a key of the tile
  int64_t query_tiles() const { return blocks_of(shape.queries, kTile); }

  const HeadShape& shape;
  const TwinConfig& config;
  const KvHead& kv;
  const QueryHead& query;
  Codes d_o;         // codes of (weighted) dO, for dP
  Codes d_o_for_dv;  // the same with the rounded sum's weight; empty where it is d_o
  const Codes& dv_codes() const { return d_o_for_dv.value.empty() ? d_o : d_o_for_dv; }
  ProductFn<float> product = nullptr;     // of codes
  ProductFn<float> dv_product = nullptr;  // of p_code and D codes
};

Gradients run_backward(const TileSource& source, const Wanted& wanted, Diagnostics* diagnostics);

// Scores of a tile in accumulator units, bias step included.
void tile_scores(const TileSource& source, int64_t query_tile, int64_t key_tile, float* score, float* bias);
float score_factor(const HeadShape& shape, const KvHead& kv, const QueryHead& query, int64_t query_tile,
                   int64_t key_tile);

// Casts a tile of dS: codes, scale and, where given, one amax for the whole tensor.
enum class TileScaleRule { power_of_two, amax };
void cast_tile(Tile& tile, float amax, TileScaleRule rule);

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
