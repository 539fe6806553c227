// Operands made from q, and the dispatch between the two numerics.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/parallel.h"
#include "cpu/tiles.h"
#include "numerics/bf16.h"
#include "numerics/bias.h"
#include "numerics/scale.h"

namespace dmattn::cpu {
namespace {

// mu . (k - mean) for every key, fused multiply-adds over channels in ascending order.
void bias_row(const KvHead& kv, const float* mu, int64_t keys, int64_t dim, float* dots) {
  for (int64_t tile = 0; tile < blocks_of(keys, kTile); ++tile) {
    const float* columns = kv.k_centred_tiles.data() + tile * kTile * dim;
    for (int64_t c = 0; c < dim; ++c) tile_kernels().axpy(columns + c * kTile, mu[c], kTile, dots + tile * kTile);
  }
}

// Largest |mu . (k - mean)| / (k_scale * capacity): what the block's q_scale must reach. NaN if a bias overflowed.
double bias_need(const KvHead& kv, const float* dots, int64_t keys) {
  double need = 0;
  for (int64_t j = 0; j < keys; ++j) {
    const double k_scale = kv.k.scale[static_cast<size_t>(j / numerics::kKeyScaleRows)];
    if (!(k_scale > 0)) continue;  // an all-zero block has no bias; a NaN surfaces through its own scale
    if (!std::isfinite(dots[j])) return std::numeric_limits<double>::quiet_NaN();
    need = std::max(need, std::abs(static_cast<double>(dots[j])) / (k_scale * numerics::kBiasCapacity));
  }
  return need;
}

// Scale of one 128-row block of centred q. An all-zero block still has to carry its bias, hence the floor.
numerics::BlockScale centred_scale(float amax, double need) {
  auto scale = numerics::block_scale(amax < numerics::kAmaxFloor ? numerics::kAmaxFloor : amax);
  if (!(need == need)) return {numerics::quiet_nan(), numerics::quiet_nan()};
  if (!(scale.scale == scale.scale)) return scale;
  const int exponent = numerics::bias_guard_exponent(need, scale.scale);
  return {std::ldexp(scale.scale, exponent), std::ldexp(scale.inverse, -exponent)};
}

struct CentredQuery {
  std::vector<float> value;  // q - mu
  std::vector<float> bias_dots;
};

CentredQuery centre_query(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const float* q,
                          int64_t block_rows) {
  const int64_t dim = shape.dim_padded, stride = round_up(shape.keys, kTile);
  CentredQuery out;
  out.value.assign(q, q + shape.queries * dim);
  out.bias_dots.assign(static_cast<size_t>(blocks_of(shape.queries, block_rows) * stride), 0.0f);
  parallel_for(blocks_of(shape.queries, block_rows), config.threads, [&](int64_t block) {
    const int64_t first = block * block_rows, rows = std::min(block_rows, shape.queries - first);
    std::vector<float> mu = channel_mean(q + first * dim, rows, dim);
    for (float& value : mu) value = numerics::bf16_round(value);
    for (int64_t i = first; i < first + rows; ++i)
      for (int64_t c = 0; c < dim; ++c) out.value[static_cast<size_t>(i * dim + c)] -= mu[static_cast<size_t>(c)];
    bias_row(kv, mu.data(), shape.keys, dim, out.bias_dots.data() + block * stride);
  });
  return out;
}

Codes quantise_centred(const HeadShape& shape, const KvHead& kv, const CentredQuery& centred, int64_t block_rows) {
  constexpr int64_t kBlock = numerics::kQueryScaleRows;
  const int64_t dim = shape.dim_padded, stride = round_up(shape.keys, kTile);
  Codes codes;
  codes.block = kBlock;
  codes.value.assign(static_cast<size_t>(round_up(shape.queries, kBlock) * dim), 0.0f);
  for (int64_t first = 0; first < shape.queries; first += kBlock) {
    const float* source = centred.value.data() + first * dim;
    const int64_t count = std::min(kBlock, shape.queries - first) * dim;
    const double need = bias_need(kv, centred.bias_dots.data() + first / block_rows * stride, shape.keys);
    const auto scale = centred_scale(tile_kernels().amax(source, count), need);
    codes.scale.push_back(scale.scale);
    if (scale.scale == scale.scale) tile_kernels().cast(source, scale.inverse, count, codes.value.data() + first * dim);
  }
  return codes;
}

}  // namespace

QueryHead prepare_query(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const float* q,
                        const PerTensorAmax& amax) {
  QueryHead head;
  if (config.numerics == Numerics::hopper)
    head.plain = quantise(q, shape.queries, shape.dim_padded, numerics::kFlushRows);
  if (config.centre != Centre::qk) {
    head.s = quantise(q, shape.queries, shape.dim_padded, numerics::kQueryScaleRows, amax.q);
    return head;
  }
  head.bias_rows = numerics::query_mean_rows(shape.queries);
  CentredQuery centred = centre_query(shape, config, kv, q, head.bias_rows);
  head.s = quantise_centred(shape, kv, centred, head.bias_rows);
  head.bias_dots = std::move(centred.bias_dots);
  return head;
}

Forward forward(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
                const float* q, Mode mode) {
  return config.numerics == Numerics::hopper ? hopper_forward(shape, config, kv, query, q)
                                             : paper_forward(shape, config, kv, query, q, mode);
}

std::vector<float> divide_o(const HeadShape& shape, const TwinConfig& config, const Forward& forward, Mode mode) {
  const bool rounded = config.numerics == Numerics::hopper || mode == Mode::onepass;
  std::vector<float> o(forward.accumulated.size());
  for (int64_t i = 0; i < shape.queries; ++i) {
    const float sum = (rounded ? forward.sum_rounded : forward.sum)[static_cast<size_t>(i)];
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row without keys is zero
    for (int64_t c = 0; c < shape.dim_padded; ++c) {
      const auto at = static_cast<size_t>(i * shape.dim_padded + c);
      o[at] = sum == 0.0f ? 0.0f : forward.accumulated[at] * inverse;
    }
  }
  return o;
}

std::unique_ptr<TileSource> make_tiles(const HeadShape& shape, const TwinConfig& config, const KvHead& kv,
                                       const QueryHead& query, const BackwardInput& input) {
  return config.numerics == Numerics::hopper ? hopper_tiles(shape, config, kv, query, input)
                                             : paper_tiles(shape, config, kv, query, input);
}

Gradients backward(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
                   const BackwardInput& input, const Wanted& wanted, Diagnostics* diagnostics, KeySums* group) {
  return run_backward(*make_tiles(shape, config, kv, query, input), wanted, diagnostics, group);
}

float d_s_amax(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
               const BackwardInput& input) {
  const auto source = make_tiles(shape, config, kv, query, input);
  std::vector<float> largest(static_cast<size_t>(source->query_tiles()), 0.0f);
  parallel_for(source->query_tiles(), config.threads, [&](int64_t query_tile) {
    const auto tile = std::make_unique<Tile>();
    Exponents exponents;  // paper numerics has none
    float& amax = largest[static_cast<size_t>(query_tile)];
    for (int64_t key_tile = 0; key_tile < source->key_tiles(query_tile); ++key_tile) {
      source->compute(query_tile, key_tile, exponents, *tile);
      amax = std::max(amax, tile_kernels().amax(tile->ds, kTileElements));
    }
  });
  return largest.empty() ? 0.0f : *std::max_element(largest.begin(), largest.end());
}

}  // namespace dmattn::cpu
