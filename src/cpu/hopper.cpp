// Hopper numerics: integer softmax references, O divided by the rounded sum, w folded into dO, and exponents of the
// backward's codes that hold while dV and dK stay in the tensor core. Clauses refer to docs/numerics.md.
#include <algorithm>
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/tiles.h"
#include "numerics/exponent.h"
#include "numerics/softmax.h"

namespace dmattn::cpu {
namespace {

using numerics::kProbabilityExponent;
using numerics::power_of_two;

ProductFn<float> product_of(const TwinConfig& config) {
  return config.accumulator == Accumulator::tensor_core ? tile_kernels().product_tensor_core
                                                        : tile_kernels().product_exact;
}

// One row's running state over key tiles (clause "forward").
struct RowState {
  float reference = numerics::negative_infinity();
  float sum = 0, sum_rounded = 0;  // in units of 2^-8
};

void forward_tile(const HeadTiles& source, int64_t query_tile, int64_t key_tile, Tile& tile, RowState* state, float* o,
                  std::vector<float>& buffer) {
  const HeadShape& shape = source.shape;
  const auto dim = static_cast<int>(shape.dim_padded);
  const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, shape.queries - first);
  const float factor = source.score_factor(query_tile, key_tile);
  source.scores(query_tile, key_tile, tile.score, tile.bias);
  float group[kTile];  // 2^(b - M) of each row
  std::fill(tile.p_code, tile.p_code + kTileElements, 0.0f);
  std::fill(group, group + kTile, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    const int n = source.columns(first + i, key_tile);
    if (n == 0) continue;
    RowState& row = state[i];
    const float* score = tile.score + i * kTile;
    const float b = numerics::group_reference(tile_kernels().row_max(score, n) * factor);
    float offset[kGroups];
    std::fill_n(offset, kGroups, kProbabilityExponent - b);
    const ExpSums sums = tile_kernels().exp_row(score, factor, offset, n, tile.p + i * kTile, tile.p_code + i * kTile);
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

void finish_rows(const HeadTiles& source, const float* q, int64_t first, int64_t rows, const RowState* state,
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
  const HeadTiles source(shape, config, kv, query, product_of(config));
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
      : TileSource(head_shape, twin_config, kv_head, query_head, product_of(twin_config)), mode_(input.mode) {
    dv_product = product;
    flush_tiles = kIntervalTiles;
    promote = tile_kernels().add_scaled;
    weigh_gradient(input);
    if (input.delta) {
      for (int64_t i = 0; i < shape.queries; ++i) set_delta(i, input.delta[i]);
    } else if (mode_ == Mode::matched) {
      parallel_for(query_tiles(), config.threads, [&](int64_t query_tile) { matched_delta(query_tile); });
    } else {
      stored_delta(input);
    }
  }

  void compute(int64_t query_tile, int64_t key_tile, Exponents& exponents, Tile& tile) const override {
    const bool p_nan = probabilities(query_tile, key_tile, exponents, tile);
    const float dp_scale = gradients_of_p(query_tile, key_tile, tile);
    const float* p = mode_ == Mode::onepass ? tile.p_code : tile.p;
    float amax = p_nan ? numerics::quiet_nan() : 0.0f;
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t row = query_tile * kTile + i;
      const float delta = row < shape.queries ? delta_[static_cast<size_t>(row)] : 0.0f;
      const float weight = row < shape.queries ? weight_[static_cast<size_t>(row)] : 0.0f;
      tile.p_factor[i] = weight;
      tile.dp_factor[i] = weight == 0.0f ? 0.0f : dp_scale / weight;
      amax = numerics::amax_step(amax, tile_kernels().ds_row(p + i * kTile, tile.p_scale, tile.dp + i * kTile, dp_scale,
                                                             delta, columns(row, key_tile), tile.ds + i * kTile));
    }
    cast(amax, exponents.ds, tile);
    scale_keys(query_tile * kTile, exponents, p_nan, tile);
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
    d_o = quantise(weighted_.data(), shape.queries, dim, numerics::kFlushRows);
    if (!onepass) d_o_for_dv = quantise(for_dv.data(), shape.queries, dim, numerics::kFlushRows);
  }

  void set_delta(int64_t row, float true_value) {
    const float weight = weight_[static_cast<size_t>(row)];
    delta_[static_cast<size_t>(row)] = weight == 0.0f ? 0.0f : weight * true_value;
  }

  void stored_delta(const BackwardInput& input) {
    const int64_t dim = shape.dim_padded;
    if (mode_ == Mode::onepass) {
      parallel_for(query_tiles(), config.threads,
                   [&](int64_t query_tile) { truncated_delta(query_tile, input.o_full); });
      return;
    }
    for (int64_t i = 0; i < shape.queries; ++i) {
      float& delta = delta_[static_cast<size_t>(i)];
      if (weight_[static_cast<size_t>(i)] == 0.0f) continue;
      delta = mode_ == Mode::stale ? contract_dot(weighted_.data() + i * dim, input.o_stored + i * dim, dim)
                                   : d_o.scale_of_row(i) * contract_dot(d_o.row(i, dim), input.o_stored + i * dim, dim);
    }
  }

  // <D, O> with O's codes multiplied as the tensor core multiplies V's, and exactly what they leave of O. On a row
  // that sees one key O's codes are that key's, and delta' is its dP', truncation and all.
  void truncated_delta(int64_t query_tile, const float* o_full) {
    const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, shape.queries - first);
    const auto dim = static_cast<int>(shape.dim_padded);
    std::vector<float> code(static_cast<size_t>(dim)), rest(code), columns(static_cast<size_t>(dim) * kTile);
    std::vector<float> product_of_rows(kTileElements), scale(kTile), dot(kTile);
    for (int64_t i = 0; i < rows; ++i) {
      const float* o = o_full + (first + i) * dim;
      const auto o_scale = numerics::power_scale(tile_kernels().amax(o, dim));
      scale[static_cast<size_t>(i)] = o_scale.scale;
      if (o_scale.scale == o_scale.scale) tile_kernels().cast(o, o_scale.inverse, dim, code.data());
      for (int c = 0; c < dim; ++c) {
        const auto at = static_cast<size_t>(c);
        columns[at * kTile + static_cast<size_t>(i)] = code[at];
        rest[at] = numerics::fused(-o_scale.scale, code[at], o[c]);
      }
      dot[static_cast<size_t>(i)] = contract_dot(d_o.row(first + i, dim), rest.data(), dim);
    }
    product(kTile, kTile, dim, d_o.row(first, dim), dim, columns.data(), kTile, product_of_rows.data(), kTile, false);
    for (int64_t i = 0; i < rows; ++i) {
      const auto at = static_cast<size_t>(i);
      if (weight_[static_cast<size_t>(first + i)] == 0.0f) continue;
      delta_[static_cast<size_t>(first + i)] =
          d_o.scale_of_row(first + i) * numerics::fused(scale[at], product_of_rows[at * (kTile + 1)], dot[at]);
    }
  }

  // Sum of P dP over sum of P, both in FP32 and of the very numbers dS is made from, but for their exponents.
  void matched_delta(int64_t query_tile) {
    const auto tile = std::make_unique<Tile>();
    const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, shape.queries - first);
    float weighted[kTile] = {}, total[kTile] = {};
    for (int64_t key_tile = 0; key_tile < key_tiles(query_tile); ++key_tile) {
      const float factor = score_factor(query_tile, key_tile);
      scores(query_tile, key_tile, tile->score, tile->bias);
      const float dp_scale = gradients_of_p(query_tile, key_tile, *tile);
      for (int64_t i = 0; i < rows; ++i) {
        const int n = live_columns(first + i, key_tile);
        if (n == 0) continue;
        float* p = tile->p + i * kTile;
        const float reference = reference_[static_cast<size_t>(first + i)] - kProbabilityExponent;
        const float sum = tile_kernels().exp_row_plain(tile->score + i * kTile, factor, reference, n, p);
        weighted[i] += tile_kernels().dot_row(p, tile->dp + i * kTile, n) * (dp_scale / numerics::kProbabilityScale);
        total[i] += sum / numerics::kProbabilityScale;
      }
    }
    for (int64_t i = 0; i < rows; ++i)
      delta_[static_cast<size_t>(first + i)] = total[i] == 0.0f ? 0.0f : weighted[i] / total[i];
  }

  // P of the tile, p = 2^(8 + x - c - E) with E by groups of 16 keys, and its codes. True if there is a NaN in it.
  bool probabilities(int64_t query_tile, int64_t key_tile, Exponents& exponents, Tile& tile) const;
  void own_exponents(int64_t query_tile, int64_t key_tile, float factor, const Tile& tile, float* own) const;
  bool exponentials(int64_t query_tile, int64_t key_tile, float factor, const float* exponents, Tile& tile) const;

  float gradients_of_p(int64_t query_tile, int64_t key_tile, Tile& tile) const {
    const auto dim = static_cast<int>(shape.dim_padded);
    product(kTile, kTile, dim, d_o.row(query_tile * kTile, dim), dim, kv.v_tiles.data() + key_tile * kTile * dim, kTile,
            tile.dp, kTile, false);
    return d_o.scale_of_row(query_tile * kTile) * kv.v.scale[static_cast<size_t>(key_tile)];
  }

  // Codes of dS with the key tile's exponent; a tile that is not finite leaves it as it was.
  static void cast(float amax, float& exponent, Tile& tile) {
    const float own = numerics::tile_exponent(amax);
    exponent = numerics::raise_exponent(exponent, own, amax * power_of_two(-exponent));
    cast_tile(tile, own == own ? numerics::exponent_scale(exponent) : numerics::tile_scale(amax));
  }

  // An exponent that is not set counts nothing, whatever else its factor holds. Codes cannot hold a NaN of P or dS: the
  // factors carry it.
  void scale_keys(int64_t row, const Exponents& exponents, bool p_nan, Tile& tile) const {
    const float unset = numerics::negative_infinity();
    const float dv_scale = dv_codes().scale_of_row(row), dk_scale = query.plain_codes().scale_of_row(row);
    for (int w = 0; w < kGroups; ++w) {
      tile.dv.exponent[w] = exponents.p[w];
      tile.dv.factor[w] = exponents.p[w] == unset ? 0.0f : tile.p_scale[w] * dv_scale;
      if (p_nan) tile.dv.factor[w] = numerics::quiet_nan();
      tile.dk.exponent[w] = exponents.ds;
      tile.dk.factor[w] = tile.ds_scale == 0.0f ? 0.0f : tile.ds_scale * dk_scale;
    }
  }

  int live_columns(int64_t row, int64_t key_tile) const {
    return row < shape.queries && weight_[static_cast<size_t>(row)] != 0.0f ? columns(row, key_tile) : 0;
  }

  Mode mode_;
  std::vector<float> weight_, reference_, delta_, weighted_;
};

bool HopperTiles::probabilities(int64_t query_tile, int64_t key_tile, Exponents& exponents, Tile& tile) const {
  const float factor = score_factor(query_tile, key_tile), unset = numerics::negative_infinity();
  scores(query_tile, key_tile, tile.score, tile.bias);
  float own[kGroups];
  own_exponents(query_tile, key_tile, factor, tile, own);
  for (int w = 0; w < kGroups; ++w)
    if (exponents.p[w] == unset) exponents.p[w] = numerics::raise_exponent(unset, own[w], 0.0f);
  bool nan = exponentials(query_tile, key_tile, factor, exponents.p, tile), raised = false;
  for (int w = 0; w < kGroups; ++w) {
    if (!(own[w] > exponents.p[w])) continue;
    float largest = 0;
    for (int i = 0; i < kTile; ++i)
      largest = numerics::amax_step(
          largest, tile_kernels().amax(tile.p_code + i * kTile + w * numerics::kExponentKeys, numerics::kExponentKeys));
    const float before = exponents.p[w];
    exponents.p[w] = numerics::raise_exponent(before, own[w], largest);
    raised = raised || exponents.p[w] != before;
  }
  if (raised) nan = exponentials(query_tile, key_tile, factor, exponents.p, tile);
  for (int w = 0; w < kGroups; ++w) tile.p_scale[w] = power_of_two(exponents.p[w] - kProbabilityExponent);
  return nan;
}

// The exponent that each group would take by itself: the largest b - c of its keys. A NaN takes no part.
void HopperTiles::own_exponents(int64_t query_tile, int64_t key_tile, float factor, const Tile& tile,
                                float* own) const {
  constexpr int kKeys = numerics::kExponentKeys;
  std::fill_n(own, kGroups, numerics::negative_infinity());
  for (int64_t i = 0; i < kTile; ++i) {
    const int64_t row = query_tile * kTile + i;
    const int n = live_columns(row, key_tile);
    for (int w = 0; w * kKeys < n; ++w) {
      const float* score = tile.score + i * kTile + w * kKeys;
      const float b = numerics::group_reference(tile_kernels().row_max(score, std::min(kKeys, n - w * kKeys)) * factor);
      own[w] = std::max(own[w], b - reference_[static_cast<size_t>(row)]);
    }
  }
}

bool HopperTiles::exponentials(int64_t query_tile, int64_t key_tile, float factor, const float* exponents,
                               Tile& tile) const {
  bool nan = false;
  for (int64_t i = 0; i < kTile; ++i) {
    const int64_t row = query_tile * kTile + i;
    const int n = live_columns(row, key_tile);
    const float reference = n > 0 ? reference_[static_cast<size_t>(row)] : 0.0f;
    float offset[kGroups];
    for (int w = 0; w < kGroups; ++w) offset[w] = kProbabilityExponent - (reference + exponents[w]);
    const float sum =
        tile_kernels()
            .exp_row(tile.score + i * kTile, factor, offset, n, tile.p + i * kTile, tile.p_code + i * kTile)
            .unrounded;
    nan = nan || sum != sum;
  }
  return nan;
}

}  // namespace

std::unique_ptr<TileSource> hopper_tiles(const HeadShape& shape, const TwinConfig& config, const KvHead& kv,
                                         const QueryHead& query, const BackwardInput& input) {
  return std::make_unique<HopperTiles>(shape, config, kv, query, input);
}

}  // namespace dmattn::cpu
