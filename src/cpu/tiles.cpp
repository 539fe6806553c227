#include "cpu/tiles.h"

#include <algorithm>
#include <cmath>

#include "cpu/parallel.h"
#include "numerics/bias.h"
#include "numerics/reduce.h"
#include "numerics/scale.h"

namespace dmattn::cpu {

int64_t TileSource::key_tiles(int64_t query_tile) const {
  const int64_t last = std::min(shape.queries, (query_tile + 1) * kTile) - 1;  // sees the most keys
  return blocks_of(shape.visible(last), kTile);
}

int64_t TileSource::first_query_tile(int64_t key_tile) const {
  if (!shape.causal) return 0;
  const int64_t first = key_tile * kTile + shape.queries - shape.keys;  // first query that sees key 64 J
  return std::max<int64_t>(0, first) / kTile;
}

float score_factor(const HeadShape& shape, const KvHead& kv, const QueryHead& query, int64_t query_tile,
                   int64_t key_tile) {
  const float scales = query.s.scale_of_row(query_tile * kTile) * kv.k.scale[static_cast<size_t>(key_tile)];
  return scales * (shape.softmax_scale * numerics::kLog2e);
}

void tile_scores(const TileSource& source, int64_t query_tile, int64_t key_tile, float* score, float* bias) {
  const auto dim = static_cast<int>(source.shape.dim_padded);
  const QueryHead& query = source.query;
  const KvHead& kv = source.kv;
  source.product(kTile, kTile, dim, query.s.row(query_tile * kTile, dim), dim,
                 kv.k_tiles.data() + key_tile * kTile * dim, kTile, score, kTile, false);
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
  const int64_t stride = round_up(source.shape.keys, kTile);
  const float* dots = query.bias_dots.data() + block * stride + key_tile * kTile;
  const float q_scale = query.s.scale_of_row(query_tile * kTile);
  const float k_scale = kv.k.scale[static_cast<size_t>(key_tile)];
  std::fill(bias, bias + numerics::kTensorCoreStep * kTile, 0.0f);
  for (int j = 0; j < kTile; ++j) {
    const float units = numerics::bias_units(dots[j], q_scale, k_scale);
    if (numerics::is_finite(units)) numerics::bias_split(units, bias + j, kTile);  // else the scale is NaN as well
  }
  source.product(kTile, kTile, numerics::kTensorCoreStep, kLeft.value, numerics::kTensorCoreStep, bias, kTile, score,
                 kTile, true);
}

void cast_tile(Tile& tile, float amax, TileScaleRule rule) {
  const auto scale =
      rule == TileScaleRule::power_of_two ? numerics::tile_scale(amax) : numerics::block_scale(amax);
  tile.ds_scale = scale.scale;
  if (scale.scale == scale.scale) {
    tile_kernels().cast(tile.ds, scale.inverse, kTileElements, tile.ds_code);
  } else {
    std::fill(tile.ds_code, tile.ds_code + kTileElements, 0.0f);  // a NaN travels in the scale alone
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

namespace {

void transpose(const float* x, float* out) {
  for (int i = 0; i < kTile; ++i)
    for (int j = 0; j < kTile; ++j) out[j * kTile + i] = x[i * kTile + j];
}

// Adds factor x (left [64][64] . right [64][dim]) to `rows` rows of sum.
struct Promoter {
  const TileSource& source;
  std::vector<float> buffer;
  explicit Promoter(const TileSource& tiles)
      : source(tiles), buffer(static_cast<size_t>(kTile * tiles.shape.dim_padded)) {}

  void add(ProductFn<float> product, const float* left, const float* right, float factor, int64_t rows, float* sum) {
    const auto dim = static_cast<int>(source.shape.dim_padded);
    product(kTile, dim, kTile, left, kTile, right, dim, buffer.data(), dim, false);
    tile_kernels().axpy(buffer.data(), factor, rows * dim, sum);
  }
};

void measure_rows(const TileSource& source, int64_t query_tile, const Tile& tile, Diagnostics& out) {
  const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, source.shape.queries - first);
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0, magnitude = 0, cast_sum = 0, cast_magnitude = 0;
    for (int j = 0; j < kTile; ++j) {
      const double before = tile.ds[i * kTile + j];
      const double after = static_cast<double>(tile.ds_code[i * kTile + j]) * tile.ds_scale;
      sum += before;
      magnitude += std::abs(before);
      cast_sum += after;
      cast_magnitude += std::abs(after);
    }
    const auto row = static_cast<size_t>(first + i);
    out.sum[row] += sum;
    out.magnitude[row] += magnitude;
    out.cast_sum[row] += cast_sum;
    out.cast_magnitude[row] += cast_magnitude;
  }
}

void query_pass(const TileSource& source, Gradients& out, bool want_dq, Diagnostics* diagnostics) {
  const HeadShape& shape = source.shape;
  const int64_t dim = shape.dim_padded;
  parallel_for(source.query_tiles(), source.config.threads, [&](int64_t query_tile) {
    const auto tile = std::make_unique<Tile>();
    Promoter promoter(source);
    const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, shape.queries - first);
    for (int64_t key_tile = 0; key_tile < source.key_tiles(query_tile); ++key_tile) {
      source.compute(query_tile, key_tile, *tile);
      if (diagnostics) measure_rows(source, query_tile, *tile, *diagnostics);
      if (!want_dq) continue;
      promoter.add(source.product, tile->ds_code, source.kv.k.row(key_tile * kTile, dim),
                   tile->ds_scale * source.kv.k.scale[static_cast<size_t>(key_tile)], rows,
                   out.dq.data() + first * dim);
    }
    if (want_dq)
      for (int64_t i = 0; i < rows * dim; ++i) out.dq[static_cast<size_t>(first * dim + i)] *= shape.softmax_scale;
  });
}

void key_pass(const TileSource& source, Gradients& out, const Wanted& wanted, std::vector<double>* dk_magnitude) {
  const HeadShape& shape = source.shape;
  const int64_t dim = shape.dim_padded;
  const Codes& q = source.query.plain_codes();
  parallel_for(blocks_of(shape.keys, kTile), source.config.threads, [&](int64_t key_tile) {
    const auto tile = std::make_unique<Tile>();
    const auto left = std::make_unique<float[]>(kTileElements);
    Promoter promoter(source);
    const int64_t first = key_tile * kTile, rows = std::min<int64_t>(kTile, shape.keys - first);
    std::vector<float> before_cast(dk_magnitude ? static_cast<size_t>(rows * dim) : 0);
    for (int64_t query_tile = source.first_query_tile(key_tile); query_tile < source.query_tiles(); ++query_tile) {
      source.compute(query_tile, key_tile, *tile);
      const int64_t row = query_tile * kTile;
      if (wanted.dv) {
        transpose(tile->p_code, left.get());
        promoter.add(source.product, left.get(), source.dv_codes().row(row, dim), tile->dv_factor, rows,
                     out.dv.data() + first * dim);
      }
      if (wanted.dk) {
        transpose(tile->ds_code, left.get());
        promoter.add(source.product, left.get(), q.row(row, dim), tile->ds_scale * q.scale_of_row(row), rows,
                     out.dk.data() + first * dim);
      }
      if (dk_magnitude) {
        transpose(tile->ds, left.get());
        promoter.add(tile_kernels().product_f32, left.get(), q.row(row, dim), q.scale_of_row(row), rows,
                     before_cast.data());
      }
    }
    if (wanted.dk)
      for (int64_t i = 0; i < rows * dim; ++i) out.dk[static_cast<size_t>(first * dim + i)] *= shape.softmax_scale;
    if (dk_magnitude) {
      double total = 0;
      for (const float value : before_cast) total += std::abs(static_cast<double>(value)) * shape.softmax_scale;
      (*dk_magnitude)[static_cast<size_t>(key_tile)] = total;
    }
  });
}

void measure_columns(const TileSource& source, Diagnostics& out) {
  const Codes& q = source.query.plain_codes();
  const int64_t dim = source.shape.dim_padded;
  out.column.assign(static_cast<size_t>(dim), 0.0);
  for (int64_t i = 0; i < source.shape.queries; ++i) {
    const double weight = out.sum[static_cast<size_t>(i)] * q.scale_of_row(i) * source.shape.softmax_scale;
    for (int64_t c = 0; c < dim; ++c) out.column[static_cast<size_t>(c)] += weight * q.row(i, dim)[c];
  }
}

}  // namespace

Gradients run_backward(const TileSource& source, const Wanted& wanted, Diagnostics* diagnostics) {
  const HeadShape& shape = source.shape;
  const auto query_elements = static_cast<size_t>(shape.queries * shape.dim_padded);
  const auto key_elements = static_cast<size_t>(shape.keys * shape.dim_padded);
  Gradients out;
  out.delta.resize(static_cast<size_t>(shape.queries));
  for (int64_t i = 0; i < shape.queries; ++i) out.delta[static_cast<size_t>(i)] = source.true_delta(i);
  if (wanted.dq) out.dq.assign(query_elements, 0.0f);
  if (wanted.dk) out.dk.assign(key_elements, 0.0f);
  if (wanted.dv) out.dv.assign(key_elements, 0.0f);
  std::vector<double> dk_magnitude;
  if (diagnostics) {
    for (auto* rows : {&diagnostics->sum, &diagnostics->magnitude, &diagnostics->cast_sum,
                       &diagnostics->cast_magnitude})
      rows->assign(static_cast<size_t>(shape.queries), 0.0);
    dk_magnitude.assign(static_cast<size_t>(blocks_of(shape.keys, kTile)), 0.0);
  }
  if (wanted.dq || diagnostics) query_pass(source, out, wanted.dq, diagnostics);
  if (wanted.dk || wanted.dv || diagnostics) key_pass(source, out, wanted, diagnostics ? &dk_magnitude : nullptr);
  if (diagnostics) {
    measure_columns(source, *diagnostics);
    diagnostics->dk_magnitude = 0;
    for (const double part : dk_magnitude) diagnostics->dk_magnitude += part;
  }
  return out;
}

}  // namespace dmattn::cpu
