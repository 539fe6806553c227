#include "cpu/codes.h"

#include <algorithm>

#include "cpu/tile_kernels.h"
#include "numerics/scale.h"

namespace dmattn::cpu {

using numerics::kTile;

ScaleRule value_scale(Numerics numerics) { return numerics == Numerics::hopper ? ScaleRule::power : ScaleRule::amax; }

Codes quantise(const float* x, int64_t rows, int64_t dim_padded, int64_t block, float fixed_amax, ScaleRule rule) {
  const TileKernels& kernels = tile_kernels();
  Codes codes;
  codes.block = block;
  codes.value.assign(static_cast<size_t>(round_up(rows, numerics::kQueryScaleRows) * dim_padded), 0.0f);
  codes.scale.assign(static_cast<size_t>(blocks_of(rows, block)), 0.0f);
  for (int64_t b = 0; b < blocks_of(rows, block); ++b) {
    const int64_t first = b * block, count = std::min(block, rows - first) * dim_padded;
    const float* source = x + first * dim_padded;
    const float amax = fixed_amax >= 0 ? fixed_amax : kernels.amax(source, count);
    const auto scale = rule == ScaleRule::power ? numerics::power_scale(amax) : numerics::block_scale(amax);
    codes.scale[static_cast<size_t>(b)] = scale.scale;
    if (scale.scale == scale.scale)  // a NaN travels in the scale alone
      kernels.cast(source, scale.inverse, count, codes.value.data() + first * dim_padded);
  }
  return codes;
}

std::vector<float> channel_mean(const float* x, int64_t rows, int64_t dim_padded) {
  const auto width = static_cast<size_t>(dim_padded);
  std::vector<float> total(width, 0.0f), partial(width);
  for (int64_t first = 0; first < rows; first += numerics::kMeanRows) {
    std::fill(partial.begin(), partial.end(), 0.0f);
    for (int64_t i = first; i < std::min<int64_t>(rows, first + numerics::kMeanRows); ++i)
      for (size_t c = 0; c < width; ++c) partial[c] += x[static_cast<size_t>(i) * width + c];
    for (size_t c = 0; c < width; ++c) total[c] += partial[c];
  }
  if (rows > 0)
    for (float& value : total) value /= static_cast<float>(rows);
  return total;
}

std::vector<float> transpose_tiles(const float* x, int64_t rows, int64_t dim_padded) {
  const int64_t tiles = blocks_of(rows, kTile);
  std::vector<float> out(static_cast<size_t>(tiles * kTile * dim_padded), 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    float* tile = out.data() + i / kTile * kTile * dim_padded + i % kTile;
    for (int64_t c = 0; c < dim_padded; ++c) tile[c * kTile] = x[i * dim_padded + c];
  }
  return out;
}

KvHead prepare_kv(const HeadShape& shape, const TwinConfig& config, const float* k, const float* v, bool keep_raw_v,
                  const PerTensorAmax& amax) {
  const int64_t dim = shape.dim_padded;
  KvHead head;
  head.k_mean.assign(static_cast<size_t>(dim), 0.0f);
  std::vector<float> centred(k, k + shape.keys * dim);
  if (config.centre != Centre::none) {
    head.k_mean = channel_mean(k, shape.keys, dim);
    for (int64_t j = 0; j < shape.keys; ++j)
      for (int64_t c = 0; c < dim; ++c)
        centred[static_cast<size_t>(j * dim + c)] -= head.k_mean[static_cast<size_t>(c)];
  }
  head.k = quantise(centred.data(), shape.keys, dim, numerics::kKeyScaleRows, amax.k);
  head.v = quantise(v, shape.keys, dim, numerics::kKeyScaleRows, amax.v, value_scale(config.numerics));
  head.k_tiles = transpose_tiles(head.k.value.data(), shape.keys, dim);
  head.v_tiles = transpose_tiles(head.v.value.data(), shape.keys, dim);
  if (config.centre == Centre::qk) head.k_centred_tiles = transpose_tiles(centred.data(), shape.keys, dim);
  if (keep_raw_v) head.v_raw_tiles = transpose_tiles(v, shape.keys, dim);
  return head;
}

}  // namespace dmattn::cpu
