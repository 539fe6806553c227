// Paper numerics: the recipe of the Delta-Matching article (docs/method.md), in FP32 with exact products of codes.
// P is encoded per row and 64 keys against the row's maximum; O is divided by the unrounded sum, in onepass by the
// rounded one; dS has a scale amax / 448 per 64 x 64 tile. The ablations differ in single steps, marked where they do.
#include <algorithm>
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/tiles.h"
#include "numerics/fp8.h"
#include "numerics/scale.h"
#include "numerics/softmax.h"

namespace dmattn::cpu {
namespace {

// Codes of one row's group of 64 keys. Returns the group's scale.
float encode_group(const float* p, Mode mode, float* code) {
  const bool one_reference = mode == Mode::max_shift || mode == Mode::per_tensor;  // FlashAttention-3's encoding
  const auto scale = one_reference ? numerics::BlockScale{1 / numerics::kProbabilityScale, numerics::kProbabilityScale}
                                   : numerics::block_scale(tile_kernels().amax(p, kTile));
  if (scale.scale == scale.scale) {
    tile_kernels().cast(p, scale.inverse, kTile, code);
  } else {
    std::fill(code, code + kTile, 0.0f);
  }
  return scale.scale;
}

// Scores of 64 queries against every key they see, and each row's maximum (log2 units).
void row_scores(const HeadTiles& tiles, int64_t query_tile, Tile& tile, std::vector<float>& scores, float* reference) {
  std::fill(reference, reference + kTile, numerics::negative_infinity());
  for (int64_t key_tile = 0; key_tile < tiles.key_tiles(query_tile); ++key_tile) {
    float* score = scores.data() + key_tile * kTileElements;
    tiles.scores(query_tile, key_tile, score, tile.bias);
    const float factor = tiles.score_factor(query_tile, key_tile);
    for (int64_t i = 0; i < kTile; ++i) {
      const int n = tiles.columns(query_tile * kTile + i, key_tile);
      if (n == 0) continue;
      const float largest = tile_kernels().row_max(score + i * kTile, n) * factor;
      if (largest > reference[i] || largest != largest) reference[i] = largest;
    }
  }
}

}  // namespace

Forward paper_forward(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
                      const float* q, Mode mode) {
  const HeadTiles source(shape, config, kv, query, tile_kernels().product_exact);
  const auto rows = static_cast<size_t>(shape.queries);
  const auto dim = static_cast<int>(shape.dim_padded);
  Forward out;
  out.accumulated.assign(rows * static_cast<size_t>(dim), 0.0f);
  for (auto* vector : {&out.reference, &out.sum, &out.sum_rounded, &out.lse}) vector->assign(rows, 0.0f);
  parallel_for(source.query_tiles(), config.threads, [&](int64_t query_tile) {
    const auto tile = std::make_unique<Tile>();
    std::vector<float> scores(static_cast<size_t>(source.key_tiles(query_tile) * kTileElements));
    std::vector<float> buffer(static_cast<size_t>(kTile * dim));
    float reference[kTile], group[kTile];
    row_scores(source, query_tile, *tile, scores, reference);
    for (float& value : reference) value = numerics::final_reference(value);
    const int64_t first = query_tile * kTile, count = std::min<int64_t>(kTile, shape.queries - first);
    for (int64_t key_tile = 0; key_tile < source.key_tiles(query_tile); ++key_tile) {
      const float factor = source.score_factor(query_tile, key_tile);
      std::fill(tile->p_code, tile->p_code + kTileElements, 0.0f);
      for (int64_t i = 0; i < count; ++i) {
        const auto row = static_cast<size_t>(first + i);
        float* code = tile->p_code + i * kTile;
        const int n = source.columns(first + i, key_tile);
        group[i] = 0;
        if (n == 0) continue;
        out.sum[row] += tile_kernels().exp_row_plain(scores.data() + key_tile * kTileElements + i * kTile, factor,
                                                     reference[i], n, tile->p + i * kTile);
        group[i] = encode_group(tile->p + i * kTile, mode, code);
        float codes = 0;
        for (int j = 0; j < kTile; ++j) codes += code[j];  // at most 64 x 448 in steps of 2^-9: exact
        out.sum_rounded[row] += group[i] * codes;
      }
      source.product(kTile, dim, kTile, tile->p_code, kTile, kv.v.row(key_tile * kTile, dim), dim, buffer.data(), dim,
                     false);
      for (int64_t i = 0; i < count; ++i)
        if (source.columns(first + i, key_tile) > 0)
          tile_kernels().axpy(buffer.data() + i * dim, group[i] * kv.v.scale[static_cast<size_t>(key_tile)], dim,
                              out.accumulated.data() + (first + i) * dim);
    }
    for (int64_t i = 0; i < count; ++i) {
      const auto row = static_cast<size_t>(first + i);
      out.reference[row] = reference[i];
      const double mean = contract_dot(q + (first + i) * dim, kv.k_mean.data(), dim);
      out.lse[row] = out.sum[row] == 0.0f ? numerics::negative_infinity()
                                          : static_cast<float>(reference[i] * std::log(2.0) + std::log(out.sum[row]) +
                                                               static_cast<double>(shape.softmax_scale) * mean);
    }
  });
  return out;
}

namespace {

class PaperTiles final : public TileSource {
 public:
  PaperTiles(const HeadShape& head_shape, const TwinConfig& twin_config, const KvHead& kv_head,
             const QueryHead& query_head, const BackwardInput& input)
      : TileSource(head_shape, twin_config, kv_head, query_head, tile_kernels().product_exact), input_(input) {
    dv_product = tile_kernels().product_f32;  // P decoded per row is no code
    promote = tile_kernels().axpy;
    const auto rows = static_cast<size_t>(shape.queries);
    d_o = quantise(input.d_o, shape.queries, shape.dim_padded, numerics::kQueryScaleRows, input.amax.d_o);
    delta_.assign(rows, 0.0f);
    if (input.mode == Mode::bf16_dp) {  // dP from dO and V as BF16 holds them
      raw_d_o_.assign(static_cast<size_t>(round_up(shape.queries, kTile) * shape.dim_padded), 0.0f);
      std::copy(input.d_o, input.d_o + shape.queries * shape.dim_padded, raw_d_o_.begin());
    }
    if (input.delta) {
      std::copy(input.delta, input.delta + shape.queries, delta_.begin());
    } else if (input.mode == Mode::matched) {
      parallel_for(query_tiles(), config.threads, [&](int64_t query_tile) { matched_delta(query_tile); });
    } else {
      for (int64_t i = 0; i < shape.queries; ++i) delta_[static_cast<size_t>(i)] = stored_delta(i);
    }
  }

  void compute(int64_t query_tile, int64_t key_tile, Exponents&, Tile& tile) const override {
    probabilities(query_tile, key_tile, tile);
    const float dp_scale = gradients_of_p(query_tile, key_tile, tile);
    float amax = 0;
    bool p_nan = false;  // codes cannot hold a NaN: the factors carry it
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t row = query_tile * kTile + i;
      const int n = columns(row, key_tile);
      float* p = tile.p + i * kTile;
      float* code = tile.p_code + i * kTile;
      if (n == 0) {
        std::fill(p, p + kTile, 0.0f);
        std::fill(code, code + kTile, 0.0f);
        std::fill(tile.ds + i * kTile, tile.ds + (i + 1) * kTile, 0.0f);
        continue;
      }
      const auto at = static_cast<size_t>(row);
      const bool onepass = input_.mode == Mode::onepass;
      tile.p_factor[i] = 1 / input_.sum[at];
      tile.dp_factor[i] = dp_scale;
      const float group = encode_group(p, input_.mode, code);
      float p_scale[kGroups];
      std::fill_n(p_scale, kGroups, onepass ? group / input_.sum_rounded[at] : 1 / input_.sum[at]);
      amax = numerics::amax_step(amax, tile_kernels().ds_row(onepass ? code : p, p_scale, tile.dp + i * kTile, dp_scale,
                                                             delta_[at], n, tile.ds + i * kTile));
      const float to_p = group / input_.sum[at];  // dV multiplies P as the row's group decodes it
      p_nan = p_nan || to_p != to_p;
      for (int j = 0; j < kTile; ++j) code[j] *= to_p;
    }
    if (p_nan) amax = numerics::quiet_nan();
    cast_tile(tile, numerics::block_scale(input_.d_s_amax >= 0 && amax == amax ? input_.d_s_amax : amax));
    std::fill_n(tile.p_scale, kGroups, 1.0f);
    std::fill_n(tile.dv.factor, kGroups, p_nan ? numerics::quiet_nan() : d_o.scale_of_row(query_tile * kTile));
    std::fill_n(tile.dk.factor, kGroups, tile.ds_scale * query.plain_codes().scale_of_row(query_tile * kTile));
  }

  float true_delta(int64_t row) const override { return delta_[static_cast<size_t>(row)]; }

 private:
  void probabilities(int64_t query_tile, int64_t key_tile, Tile& tile) const {
    scores(query_tile, key_tile, tile.score, tile.bias);
    const float factor = score_factor(query_tile, key_tile);
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t row = query_tile * kTile + i;
      const int n = columns(row, key_tile);
      if (n > 0)
        tile.row_sum[i] =
            tile_kernels().exp_row_plain(tile.score + i * kTile, factor, input_.reference[row], n, tile.p + i * kTile);
    }
  }

  float gradients_of_p(int64_t query_tile, int64_t key_tile, Tile& tile) const {
    const auto dim = static_cast<int>(shape.dim_padded);
    const bool raw = input_.mode == Mode::bf16_dp;
    const float* left = raw ? raw_d_o_.data() + query_tile * kTile * dim : d_o.row(query_tile * kTile, dim);
    const std::vector<float>& right = raw ? kv.v_raw_tiles : kv.v_tiles;
    product(kTile, kTile, dim, left, dim, right.data() + key_tile * kTile * dim, kTile, tile.dp, kTile, false);
    return raw ? 1.0f : d_o.scale_of_row(query_tile * kTile) * kv.v.scale[static_cast<size_t>(key_tile)];
  }

  float stored_delta(int64_t row) const {
    const int64_t dim = shape.dim_padded;
    if (columns(row, 0) == 0) return 0.0f;
    const float* o = (input_.mode == Mode::onepass ? input_.o_full : input_.o_stored) + row * dim;
    const bool quantised =
        input_.mode == Mode::onepass || input_.mode == Mode::consistent || input_.mode == Mode::per_tensor;
    const float* gradient = quantised ? d_o.row(row, dim) : input_.d_o + row * dim;
    double delta = 0;
    for (int64_t c = 0; c < dim; ++c) delta += static_cast<double>(gradient[c]) * o[c];
    return static_cast<float>(quantised ? delta * d_o.scale_of_row(row) : delta);
  }

  // Sum of P dP over sum of P, of the numbers dS is made from.
  void matched_delta(int64_t query_tile) {
    const auto tile = std::make_unique<Tile>();
    const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, shape.queries - first);
    double weighted[kTile] = {}, total[kTile] = {};
    for (int64_t key_tile = 0; key_tile < key_tiles(query_tile); ++key_tile) {
      probabilities(query_tile, key_tile, *tile);
      const double dp_scale = gradients_of_p(query_tile, key_tile, *tile);
      for (int64_t i = 0; i < rows; ++i) {
        const int n = columns(first + i, key_tile);
        if (n == 0) continue;
        weighted[i] += tile_kernels().dot_row(tile->p + i * kTile, tile->dp + i * kTile, n) * dp_scale;
        total[i] += tile->row_sum[i];
      }
    }
    for (int64_t i = 0; i < rows; ++i)
      delta_[static_cast<size_t>(first + i)] = total[i] == 0 ? 0.0f : static_cast<float>(weighted[i] / total[i]);
  }

  BackwardInput input_;
  std::vector<float> delta_, raw_d_o_;
};

}  // namespace

std::unique_ptr<TileSource> paper_tiles(const HeadShape& shape, const TwinConfig& config, const KvHead& kv,
                                        const QueryHead& query, const BackwardInput& input) {
  return std::make_unique<PaperTiles>(shape, config, kv, query, input);
}

}  // namespace dmattn::cpu
