// Hopper numerics: integer softmax references, O divided by the rounded sum, w folded into dO, one exponent per
// 64 x 64 tile in the backward. Clauses refer to docs/numerics.md.
#include <algorithm>
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/tiles.h"
#include "numerics/exp2.h"
#include "numerics/softmax.h"

namespace dmattn::cpu {
namespace {

using numerics::kProbabilityExponent;
using numerics::power_of_two;

ProductFn<float> product_of(const TwinConfig& config) {
  return config.accumulator == Accumulator::tensor_core ? tile_kernels().product_tensor_core
                                                        : tile_kernels().product_exact;
}

// Scores only: the forward and the backward share how a tile of S is made.
class Scores : public TileSource {
 public:
  using TileSource::TileSource;
  void compute(int64_t, int64_t, Tile&) const override {}
  float true_delta(int64_t) const override { return 0; }
};

// One row's running state over key tiles (clause "forward").
struct RowState {
  float reference = numerics::negative_infinity();
  float sum = 0, sum_rounded = 0;  // in units of 2^-8
};

void forward_tile(const Scores& source, int64_t query_tile, int64_t key_tile, Tile& tile, RowState* state, float* o,
                  std::vector<float>& buffer) {
  const HeadShape& shape = source.shape;
  const auto dim = static_cast<int>(shape.dim_padded);
  const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, shape.queries - first);
  const float factor = score_factor(shape, source.kv, source.query, query_tile, key_tile);
  tile_scores(source, query_tile, key_tile, tile.score, tile.bias);
  float group[kTile];  // 2^(b - M) of each row
  std::fill(tile.p_code, tile.p_code + kTileElements, 0.0f);
  std::fill(group, group + kTile, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    const int n = source.columns(first + i, key_tile);
    if (n == 0) continue;
    RowState& row = state[i];
    const float* score = tile.score + i * kTile;
    const float b = numerics::group_reference(tile_kernels().row_max(score, n) * factor);
    const ExpSums sums =
        tile_kernels().exp_row(score, factor, kProbabilityExponent - b, n, tile.p + i * kTile, tile.p_code + i * kTile);
    const float reference = numerics::raise_reference(row.reference, b);
    const float rescale = power_of_two(row.reference - reference);
    group[i] = power_of_two(b - reference);
    row.sum = row.sum * rescale + sums.unrounded * group[i];
    row.sum_rounded = row.sum_rounded * rescale + sums.rounded * group[i];
    if (rescale != 1.0f)
      for (int c = 0; c < dim; ++c) o[i * dim + c] *= rescale;
    row.reference = reference;
  }
  source.product(kTile, dim, kTile, tile.p_code, kTile, source.kv.v.row(key_tile * kTile, dim), dim, buffer.data(), dim,
                 false);
  const float v_scale = source.kv.v.scale[static_cast<size_t>(key_tile)];
  for (int64_t i = 0; i < rows; ++i)
    if (source.columns(first + i, key_tile) > 0)
      tile_kernels().axpy(buffer.data() + i * dim, v_scale * group[i], dim, o + i * dim);
}

void finish_rows(const Scores& source, const float* q, int64_t first, int64_t rows, const RowState* state,
                 Forward& out) {
  const HeadShape& shape = source.shape;
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = static_cast<size_t>(first + i);
    const float reference = numerics::final_reference(state[i].reference);
    const float valid = reference == reference ? 1.0f : reference;
    out.reference[row] = reference;
    out.sum[row] = state[i].sum / numerics::kProbabilityScale * valid;
    out.sum_rounded[row] = state[i].sum_rounded / numerics::kProbabilityScale * valid;
    if (out.sum[row] == 0.0f) {
      out.lse[row] = numerics::negative_infinity();
      continue;
    }
    const float centred = numerics::fused(reference, numerics::kLn2, std::log(out.sum[row]));
    const float mean = contract_dot(q + (first + i) * shape.dim_padded, source.kv.k_mean.data(), shape.dim_padded);
    out.lse[row] = numerics::fused(shape.softmax_scale, mean, centred);
    for (int64_t c = 0; c < shape.dim_padded; ++c)  // codes carry 2^8, and so do the sums O is divided by
      out.accumulated[row * static_cast<size_t>(shape.dim_padded) + static_cast<size_t>(c)] /=
          numerics::kProbabilityScale;
  }
}

}  // namespace

Forward hopper_forward(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
                       const float* q) {
  Scores source(shape, config, kv, query);
  source.product = product_of(config);
  const auto rows = static_cast<size_t>(shape.queries);
  Forward out;
  out.accumulated.assign(rows * static_cast<size_t>(shape.dim_padded), 0.0f);
  for (auto* vector : {&out.reference, &out.sum, &out.sum_rounded, &out.lse}) vector->assign(rows, 0.0f);
  parallel_for(source.query_tiles(), config.threads, [&](int64_t query_tile) {
    const auto tile = std::make_unique<Tile>();
    std::vector<float> buffer(static_cast<size_t>(kTile * shape.dim_padded));
    RowState state[kTile];
    const int64_t first = query_tile * kTile;
    float* o = out.accumulated.data() + first * shape.dim_padded;
    for (int64_t key_tile = 0; key_tile < source.key_tiles(query_tile); ++key_tile)
      forward_tile(source, query_tile, key_tile, *tile, state, o, buffer);
    finish_rows(source, q, first, std::min<int64_t>(kTile, shape.queries - first), state, out);
  });
  return out;
}

namespace {

class HopperTiles final : public TileSource {
 public:
  HopperTiles(const HeadShape& head_shape, const TwinConfig& twin_config, const KvHead& kv_head,
              const QueryHead& query_head, const BackwardInput& input)
      : TileSource(head_shape, twin_config, kv_head, query_head), mode_(input.mode) {
    product = dv_product = product_of(config);
    weigh_gradient(input);
    if (input.delta) {
      for (int64_t i = 0; i < shape.queries; ++i) set_delta(i, input.delta[i]);
    } else if (mode_ == Mode::matched) {
      parallel_for(query_tiles(), config.threads, [&](int64_t query_tile) { matched_delta(query_tile); });
    } else {
      stored_delta(input);
    }
  }

  void compute(int64_t query_tile, int64_t key_tile, Tile& tile) const override {
    const float exponent = probabilities(query_tile, key_tile, tile);
    const float dp_scale = gradients_of_p(query_tile, key_tile, tile);
    const float scale = power_of_two(exponent - kProbabilityExponent);
    const float* p = mode_ == Mode::onepass ? tile.p_code : tile.p;
    float amax = 0;
    bool p_nan = false;  // codes cannot hold a NaN: the factors carry it
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t row = query_tile * kTile + i;
      const float delta = row < shape.queries ? delta_[static_cast<size_t>(row)] : 0.0f;
      const float weight = row < shape.queries ? weight_[static_cast<size_t>(row)] : 0.0f;
      tile.p_factor[i] = scale * weight;
      tile.dp_factor[i] = weight == 0.0f ? 0.0f : dp_scale / weight;
      if (tile.row_sum[i] != tile.row_sum[i]) p_nan = true;
      amax = numerics::amax_step(amax, tile_kernels().ds_row(p + i * kTile, scale, tile.dp + i * kTile, dp_scale, delta,
                                                             columns(row, key_tile), tile.ds + i * kTile));
    }
    cast_tile(tile, p_nan ? numerics::quiet_nan() : amax, TileScaleRule::power_of_two);
    tile.dv_factor = scale * dv_codes().scale_of_row(query_tile * kTile);
    if (p_nan) tile.dv_factor = numerics::quiet_nan();
  }

  double row_weight(int64_t row) const override { return weight_[static_cast<size_t>(row)]; }
  float true_delta(int64_t row) const override {
    const float weight = weight_[static_cast<size_t>(row)];
    return weight == 0.0f ? 0.0f : delta_[static_cast<size_t>(row)] / weight;
  }

 private:
  // D = w dO, its codes, and the row references c (clause "backward"). dP takes the weight of the sum that dS is
  // normalised by; dV always that of the rounded codes it multiplies, with the same c.
  void weigh_gradient(const BackwardInput& input) {
    const int64_t dim = shape.dim_padded;
    const bool onepass = mode_ == Mode::onepass;
    weight_.resize(static_cast<size_t>(shape.queries));
    reference_.resize(weight_.size());
    delta_.assign(weight_.size(), 0.0f);
    weighted_.assign(static_cast<size_t>(shape.queries * dim), 0.0f);
    std::vector<float> for_dv(onepass ? 0 : weighted_.size(), 0.0f);
    for (int64_t i = 0; i < shape.queries; ++i) {
      const auto row = static_cast<size_t>(i);
      const float sum = (onepass ? input.sum_rounded : input.sum)[i];
      const auto [weight, exponent] = numerics::row_weight(sum);
      weight_[row] = weight;
      reference_[row] = weight == 0.0f ? 0.0f : input.reference[i] + exponent;
      if (weight == 0.0f) continue;  // a row without keys has no gradient, whatever dO holds
      const float dv_weight = power_of_two(exponent) / input.sum_rounded[i];
      for (int64_t c = 0; c < dim; ++c) {
        const auto at = static_cast<size_t>(i * dim + c);
        weighted_[at] = weight * input.d_o[at];
        if (!onepass) for_dv[at] = dv_weight * input.d_o[at];
      }
    }
    d_o = quantise(weighted_.data(), shape.queries, dim, numerics::kQueryScaleRows);
    if (!onepass) d_o_for_dv = quantise(for_dv.data(), shape.queries, dim, numerics::kQueryScaleRows);
  }

  void set_delta(int64_t row, float true_value) {
    const float weight = weight_[static_cast<size_t>(row)];
    delta_[static_cast<size_t>(row)] = weight == 0.0f ? 0.0f : weight * true_value;
  }

  void stored_delta(const BackwardInput& input) {
    const int64_t dim = shape.dim_padded;
    for (int64_t i = 0; i < shape.queries; ++i) {
      float& delta = delta_[static_cast<size_t>(i)];
      if (weight_[static_cast<size_t>(i)] == 0.0f) continue;
      if (mode_ == Mode::stale) {
        delta = contract_dot(weighted_.data() + i * dim, input.o_stored + i * dim, dim);
      } else {
        const float* o = mode_ == Mode::onepass ? input.o_full : input.o_stored;
        delta = d_o.scale_of_row(i) * contract_dot(d_o.row(i, dim), o + i * dim, dim);
      }
    }
  }

  // Sum of P dP over sum of P, both in FP32 and of the very numbers dS is made from.
  void matched_delta(int64_t query_tile) {
    const auto tile = std::make_unique<Tile>();
    const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, shape.queries - first);
    float weighted[kTile] = {}, total[kTile] = {};
    for (int64_t key_tile = 0; key_tile < key_tiles(query_tile); ++key_tile) {
      const float scale = power_of_two(probabilities(query_tile, key_tile, *tile) - kProbabilityExponent);
      const float dp_scale = gradients_of_p(query_tile, key_tile, *tile);
      for (int64_t i = 0; i < rows; ++i) {
        const int n = columns(first + i, key_tile);
        const float* p = tile->p + i * kTile;
        weighted[i] += tile_kernels().dot_row(p, tile->dp + i * kTile, n) * (scale * dp_scale);
        total[i] += tile->row_sum[i] * scale;
      }
    }
    for (int64_t i = 0; i < rows; ++i)
      delta_[static_cast<size_t>(first + i)] = total[i] == 0.0f ? 0.0f : weighted[i] / total[i];
  }

  // P of the tile with one exponent e for all of it: p = 2^(8 + x - c - e), codes likewise. Returns e.
  float probabilities(int64_t query_tile, int64_t key_tile, Tile& tile) const;
  float gradients_of_p(int64_t query_tile, int64_t key_tile, Tile& tile) const {
    const auto dim = static_cast<int>(shape.dim_padded);
    product(kTile, kTile, dim, d_o.row(query_tile * kTile, dim), dim, kv.v_tiles.data() + key_tile * kTile * dim, kTile,
            tile.dp, kTile, false);
    return d_o.scale_of_row(query_tile * kTile) * kv.v.scale[static_cast<size_t>(key_tile)];
  }

  bool live(int64_t row) const { return row < shape.queries && weight_[static_cast<size_t>(row)] != 0.0f; }

  static constexpr float kNoExponent = -1000.0f;  // below any exponent that matters; 2^(it - 8) is 0
  Mode mode_;
  std::vector<float> weight_, reference_, delta_, weighted_;
};

float HopperTiles::probabilities(int64_t query_tile, int64_t key_tile, Tile& tile) const {
  const float factor = score_factor(shape, kv, query, query_tile, key_tile);
  tile_scores(*this, query_tile, key_tile, tile.score, tile.bias);
  float own[kTile];  // b - c of each row: the exponent its codes had in the forward
  float exponent = kNoExponent;
  for (int64_t i = 0; i < kTile; ++i) {
    const int64_t row = query_tile * kTile + i;
    const int n = live(row) ? columns(row, key_tile) : 0;
    own[i] = kNoExponent;
    if (n == 0) continue;
    const float b = numerics::group_reference(tile_kernels().row_max(tile.score + i * kTile, n) * factor);
    own[i] = b - reference_[static_cast<size_t>(row)];
    exponent = std::max(exponent, own[i]);  // a NaN row does not take part
  }
  if (config.exponent_rule == ExponentRule::row) exponent = 0;
  const bool own_codes = config.exponent_rule == ExponentRule::row_group;
  for (int64_t i = 0; i < kTile; ++i) {
    const int64_t row = query_tile * kTile + i;
    const int n = live(row) ? columns(row, key_tile) : 0;
    const float reference = n > 0 ? reference_[static_cast<size_t>(row)] + (own_codes ? own[i] : exponent) : 0.0f;
    float* p = tile.p + i * kTile;
    float* code = tile.p_code + i * kTile;
    tile.row_sum[i] =
        tile_kernels().exp_row(tile.score + i * kTile, factor, kProbabilityExponent - reference, n, p, code).unrounded;
    if (own_codes && n > 0) {  // in the tile's units, as no E4M3 code could hold them
      const float shift = power_of_two(own[i] - exponent);
      for (int j = 0; j < kTile; ++j) p[j] *= shift, code[j] *= shift;
      tile.row_sum[i] *= shift;
    }
  }
  return exponent;
}

}  // namespace

std::unique_ptr<TileSource> hopper_tiles(const HeadShape& shape, const TwinConfig& config, const KvHead& kv,
                                         const QueryHead& query, const BackwardInput& input) {
  return std::make_unique<HopperTiles>(shape, config, kv, query, input);
}

}  // namespace dmattn::cpu
