#include "cpu/tiles.h"

#include <algorithm>

#include "numerics/bias.h"
#include "numerics/exponent.h"
#include "numerics/reduce.h"

namespace dmattn::cpu {

int64_t HeadTiles::key_tiles(int64_t query_tile) const {
  const int64_t last = std::min(shape.queries, (query_tile + 1) * kTile) - 1;  // sees the most keys
  return blocks_of(shape.visible(last), kTile);
}

int64_t HeadTiles::first_query_tile(int64_t key_tile) const {
  if (!shape.causal) return 0;
  const int64_t first = key_tile * kTile + shape.queries - shape.keys;  // first query that sees key 64 J
  return std::max<int64_t>(0, first) / kTile;
}

int64_t HeadTiles::exponents_start(int64_t query_tile, int64_t key_tile) const {
  int64_t interval = query_tile / kIntervalTiles;
  while (!numerics::forgets_exponents(interval)) --interval;
  return std::max(interval * kIntervalTiles, first_query_tile(key_tile));
}

float HeadTiles::score_factor(int64_t query_tile, int64_t key_tile) const {
  const float scales = query.s.scale_of_row(query_tile * kTile) * kv.k.scale[static_cast<size_t>(key_tile)];
  return scales * (shape.softmax_scale * numerics::kLog2e);
}

void HeadTiles::scores(int64_t query_tile, int64_t key_tile, float* score, float* bias) const {
  const auto dim = static_cast<int>(shape.dim_padded);
  product(kTile, kTile, dim, query.s.row(query_tile * kTile, dim), dim, kv.k_tiles.data() + key_tile * kTile * dim,
          kTile, score, kTile, false);
  if (query.bias_dots.empty()) return;
  // The bias rides through one more step of the product, taken last.
  static constexpr auto kLeft = [] {
    struct Ones {
      float value[kTileElements / kTile * numerics::kTensorCoreStep];
    } ones{};
    for (int i = 0; i < kTile; ++i)
      for (int s = 0; s < numerics::kBiasSlots; ++s)
        ones.value[i * numerics::kTensorCoreStep + s] = numerics::kBiasWeight;
    return ones;
  }();
  const int64_t block = query_tile * kTile / query.bias_rows;
  const int64_t stride = round_up(shape.keys, kTile);
  const float* dots = query.bias_dots.data() + block * stride + key_tile * kTile;
  const float q_scale = query.s.scale_of_row(query_tile * kTile);
  const float k_scale = kv.k.scale[static_cast<size_t>(key_tile)];
  std::fill(bias, bias + numerics::kTensorCoreStep * kTile, 0.0f);
  for (int j = 0; j < kTile; ++j) {
    const float units = numerics::bias_units(dots[j], q_scale, k_scale);
    if (numerics::is_finite(units)) numerics::bias_split(units, bias + j, kTile);  // else the scale is NaN as well
  }
  product(kTile, kTile, numerics::kTensorCoreStep, kLeft.value, numerics::kTensorCoreStep, bias, kTile, score, kTile,
          true);
}

void cast_tile(Tile& tile, numerics::BlockScale scale) {
  tile.ds_scale = scale.scale;
  if (scale.scale == scale.scale) {
    tile_kernels().cast(tile.ds, scale.inverse, kTileElements, tile.ds_code);
  } else {
    std::fill(tile.ds_code, tile.ds_code + kTileElements, 0.0f);
  }
}

float contract_dot(const float* a, const float* b, int64_t dim_padded) {
  float total = 0.0f;  // widths above 256 (paper numerics) add up chunks of 256
  for (int64_t first = 0; first < dim_padded; first += 256) {
    const auto n = static_cast<int>(std::min<int64_t>(256, dim_padded - first));
    total += numerics::tree_dot([&](int i) { return a[first + i]; }, [&](int i) { return b[first + i]; }, n);
  }
  return total;
}

}  // namespace dmattn::cpu
