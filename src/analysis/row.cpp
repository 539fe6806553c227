// The worked row: the last query of a small head, taken apart.
#include <cmath>

#include "analysis/head_run.h"
#include "core/error.h"
#include "cpu/tiles.h"

namespace dmattn {
namespace {

using cpu::kTile;

// One mode's last row, put together from its tiles.
struct TiledRow {
  std::vector<double> p, p_code, dp, ds;
  double delta = 0;
};

TiledRow last_row(const cpu::TileSource& source) {
  const int64_t row = source.shape.queries - 1, query_tile = row / kTile;
  const auto at = static_cast<size_t>(row % kTile);
  TiledRow out;
  out.delta = source.true_delta(row);
  const auto tile = std::make_unique<cpu::Tile>();
  for (int64_t key_tile = 0; key_tile < source.key_tiles(query_tile); ++key_tile) {
    cpu::Exponents exponents;
    for (int64_t tile_above = source.exponents_start(query_tile, key_tile); tile_above <= query_tile; ++tile_above)
      source.compute(tile_above, key_tile, exponents, *tile);
    for (int j = 0; j < source.columns(row, key_tile); ++j) {
      const size_t element = at * kTile + static_cast<size_t>(j),
                   keys = static_cast<size_t>(j / numerics::kExponentKeys);
      out.p.push_back(static_cast<double>(tile->p[element]) * tile->p_scale[keys] * tile->p_factor[at]);
      out.p_code.push_back(static_cast<double>(tile->p_code[element]) * tile->dv.factor[keys]);
      out.dp.push_back(static_cast<double>(tile->dp[element]) * tile->dp_factor[at]);
      out.ds.push_back(tile->ds[element]);
    }
  }
  return out;
}

RowMode summarise(const TiledRow& row) {
  RowMode out;
  out.delta = row.delta;
  out.sum_positive = out.sum_negative = 0;
  for (const double value : row.ds) (value > 0 ? out.sum_positive : out.sum_negative) += value;
  out.row_sum = 0;
  for (const double value : row.ds) out.row_sum += value;
  const double magnitude = out.sum_positive - out.sum_negative;
  out.share = magnitude > 0 ? out.row_sum / magnitude : 0.0;
  out.d_s = row.ds;
  return out;
}

// P as the forward rounded it, divided as O is: by the rounded sum in hopper, by the unrounded one in paper.
std::vector<double> rounded_p(const TiledRow& row, const cpu::TileSource& source) {
  double codes = 0;
  for (const double value : row.p_code) codes += value;
  const double paper = 1 / static_cast<double>(source.d_o.scale_of_row(source.shape.queries - 1));
  const double factor = source.config.numerics == Numerics::hopper ? 1 / codes : paper;
  std::vector<double> out;
  for (const double value : row.p_code) out.push_back(value * factor);
  return out;
}

// The stale row sum's parts (docs/method.md): rounding of P, rounding of dO, rounding of O to BF16.
void split(RowResult& out, const HeadInputs& inputs, const std::vector<float>& stored, const TiledRow& stale,
           const cpu::TileSource& source) {
  const int64_t row = inputs.shape.queries - 1, dim = inputs.shape.dim;
  out.p = stale.p;
  out.p_rounded = rounded_p(stale, source);
  out.d_p = stale.dp;
  std::vector<double> o(static_cast<size_t>(dim), 0.0);
  out.split_probability = 0;
  for (size_t j = 0; j < out.p.size(); ++j) {
    out.split_probability += (out.p[j] - out.p_rounded[j]) * out.d_p[j];
    const float* v = source.kv.v.row(static_cast<int64_t>(j), inputs.shape.dim_padded);
    const double scale = source.kv.v.scale_of_row(static_cast<int64_t>(j));
    for (int64_t c = 0; c < dim; ++c) o[static_cast<size_t>(c)] += out.p_rounded[j] * v[c] * scale;
  }
  out.split_gradient = out.o_rounding = out.gradient_rounding = out.magnitude = 0;
  for (int64_t c = 0; c < dim; ++c) {
    const auto at = static_cast<size_t>(row * inputs.shape.dim_padded + c);
    const double gradient = inputs.d_o[at], quantised = source.unweighted_d_o(row, c);
    const double o_exact = o[static_cast<size_t>(c)], o_stored = stored[at];
    out.split_gradient += (quantised - gradient) * o_exact;
    out.o_rounding += gradient * (o_exact - o_stored);
    out.gradient_rounding += (quantised - gradient) * o_stored;
    out.magnitude += std::abs(gradient * o_stored);
    out.q.push_back(inputs.q[at]);
    out.d_o.push_back(gradient);
  }
  double row_sum = 0;
  for (const double value : stale.ds) row_sum += value;
  out.split_remainder = row_sum - out.split_probability - out.split_gradient;
  for (size_t j = 0; j < out.p.size(); ++j) out.magnitude += out.p[j] * std::abs(out.d_p[j]);
}

}  // namespace

RowResult worked_row(const RowOptions& row, const RunOptions& options) {
  if (row.tokens < 1) throw InvalidValue("tokens: expected at least 1, got " + std::to_string(row.tokens));
  SweepOptions layer_options;
  layer_options.heads = 1;
  layer_options.tokens = row.tokens;
  layer_options.head_dim = row.head_dim;
  const Layer layer = random_layer("gaussian", 1.0, layer_options, row.seed);
  check_options(layer, options);
  const HeadInputs inputs = head_inputs(layer, 0, 0);
  RowResult out;
  out.row = row;
  HeadRunner runner(inputs, options, tensor_amax(layer, options));
  bool have_split = false;
  const auto take = [&](Mode mode, bool keep) {
    runner.with_tiles(mode, [&](const cpu::TileSource& source, const std::vector<float>& stored) {
      const TiledRow tiled = last_row(source);
      if (keep) out.modes[mode] = summarise(tiled);
      if (mode == Mode::stale) {
        split(out, inputs, stored, tiled, source);
        have_split = true;
      }
    });
  };
  for (const Mode mode : options.modes) take(mode, true);
  if (!have_split) take(Mode::stale, false);
  return out;
}

}  // namespace dmattn
