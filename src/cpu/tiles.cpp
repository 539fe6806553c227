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
  const auto scale = rule == TileScaleRule::power_of_two ? numerics::tile_scale(amax) : numerics::block_scale(amax);
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

// What queries leave for dV and dK of a run of key tiles: left operands, transposed to [key][query], and their factors.
class Strip {
 public:
  Strip(const TileSource& source, int64_t key_tiles, bool diagnose)
      : query_tiles_(source.query_tiles()),
        p(at(key_tiles, 0) * kTileElements),
        ds_code(p.size()),
        ds(diagnose ? p.size() : 0),
        dv_factor(at(key_tiles, 0)),
        dk_factor(dv_factor.size()) {}

  // As many key tiles as fit: memory stays linear in the number of rows, and threads meet rarely.
  static int64_t key_tiles(const TileSource& source) {
    constexpr int64_t kBytes = 8 << 20;  // speed alone: any number gives the same bits
    const int64_t one = source.query_tiles() * kTileElements * static_cast<int64_t>(2 * sizeof(float));
    return std::max<int64_t>(1, std::min(kBytes / std::max<int64_t>(one, 1), blocks_of(source.shape.keys, kTile)));
  }

  size_t at(int64_t key_tile, int64_t query_tile) const {  // key_tile counted from the strip's first
    return static_cast<size_t>(key_tile * query_tiles_ + query_tile);
  }

 private:
  int64_t query_tiles_;

 public:
  std::vector<float> p, ds_code, ds;  // [key tile][query tile][64 x 64]; ds for diagnostics alone
  std::vector<float> dv_factor, dk_factor;
};

// One tile: dQ takes its share, the strip keeps the rest.
void query_step(const TileSource& source, int64_t query_tile, int64_t key_tile, size_t at, Tile& tile,
                Promoter& promoter, Strip& strip, Gradients& out, Diagnostics* diagnostics) {
  const int64_t dim = source.shape.dim_padded, first = query_tile * kTile;
  source.compute(query_tile, key_tile, tile);
  if (diagnostics) measure_rows(source, query_tile, tile, *diagnostics);
  if (!out.dq.empty())
    promoter.add(source.product, tile.ds_code, source.kv.k.row(key_tile * kTile, dim),
                 tile.ds_scale * source.kv.k.scale[static_cast<size_t>(key_tile)],
                 std::min<int64_t>(kTile, source.shape.queries - first), out.dq.data() + first * dim);
  transpose(tile.p_code, strip.p.data() + at * kTileElements);
  transpose(tile.ds_code, strip.ds_code.data() + at * kTileElements);
  if (!strip.ds.empty()) transpose(tile.ds, strip.ds.data() + at * kTileElements);
  strip.dv_factor[at] = tile.dv_factor;
  strip.dk_factor[at] = tile.ds_scale * source.query.plain_codes().scale_of_row(first);
}

// A slice of channels of one key tile's sum over queries, in ascending order: sum += factor (left . right).
struct KeySum {
  ProductFn<float> product;
  const std::vector<float>* left;
  const Codes* right;
  const std::vector<float>* factor;  // by tile; null: the right operand's own scale
  float* sum;                        // [64 keys][dim_padded]
  int64_t key_tile, first_channel, channels;
};

void key_step(const TileSource& source, const Strip& strip, int64_t first_key_tile, const KeySum& work) {
  const int64_t dim = source.shape.dim_padded, key_tile = first_key_tile + work.key_tile;
  const int64_t rows = std::min<int64_t>(kTile, source.shape.keys - key_tile * kTile);
  const auto width = static_cast<int>(work.channels);
  std::vector<float> buffer(static_cast<size_t>(kTile * work.channels));
  for (int64_t query_tile = source.first_query_tile(key_tile); query_tile < source.query_tiles(); ++query_tile) {
    const int64_t row = query_tile * kTile;
    const size_t at = strip.at(work.key_tile, query_tile);
    work.product(kTile, width, kTile, work.left->data() + at * kTileElements, kTile,
                 work.right->row(row, dim) + work.first_channel, dim, buffer.data(), width, false);
    const float factor = work.factor ? (*work.factor)[at] : work.right->scale_of_row(row);
    for (int64_t j = 0; j < rows; ++j)
      tile_kernels().axpy(buffer.data() + j * width, factor, width, work.sum + j * dim + work.first_channel);
  }
}

// dV, dK and, to be measured, dK from dS before its cast, of a strip. Slices of channels share nothing.
std::vector<KeySum> key_sums(const TileSource& source, const Strip& strip, int64_t first_key_tile, int64_t key_tiles,
                             Gradients& out, std::vector<float>& before_cast) {
  constexpr int64_t kSlice = 64;
  const int64_t dim = source.shape.dim_padded;
  const Codes& q = source.query.plain_codes();
  std::vector<KeySum> work;
  for (int64_t t = 0; t < key_tiles; ++t)
    for (int64_t channel = 0; channel < dim; channel += kSlice) {
      const int64_t channels = std::min(kSlice, dim - channel), first = (first_key_tile + t) * kTile * dim;
      if (!out.dv.empty())
        work.push_back({source.dv_product, &strip.p, &source.dv_codes(), &strip.dv_factor, out.dv.data() + first, t,
                        channel, channels});
      if (!out.dk.empty())
        work.push_back(
            {source.product, &strip.ds_code, &q, &strip.dk_factor, out.dk.data() + first, t, channel, channels});
      if (!before_cast.empty())
        work.push_back({tile_kernels().product_f32, &strip.ds, &q, nullptr, before_cast.data() + t * kTile * dim, t,
                        channel, channels});
    }
  return work;
}

// Strips of key tiles one after the other, in each all threads: first its query tiles, then its own sums.
void all_tiles(const TileSource& source, Gradients& out, Diagnostics* diagnostics) {
  const HeadShape& shape = source.shape;
  const int64_t all = blocks_of(shape.keys, kTile), per_strip = Strip::key_tiles(source), dim = shape.dim_padded;
  Strip strip(source, per_strip, diagnostics != nullptr);
  std::vector<float> before_cast(diagnostics ? static_cast<size_t>(per_strip * kTile * dim) : 0);
  for (int64_t first_key = 0; first_key < all; first_key += per_strip) {
    const int64_t end_key = std::min(all, first_key + per_strip), first_query = source.first_query_tile(first_key);
    parallel_for(source.query_tiles() - first_query, source.config.threads, [&](int64_t i) {
      const int64_t query_tile = source.query_tiles() - 1 - i;  // the longest first
      const auto tile = std::make_unique<Tile>();
      Promoter promoter(source);
      for (int64_t key_tile = first_key; key_tile < std::min(end_key, source.key_tiles(query_tile)); ++key_tile)
        query_step(source, query_tile, key_tile, strip.at(key_tile - first_key, query_tile), *tile, promoter, strip,
                   out, diagnostics);
    });
    std::fill(before_cast.begin(), before_cast.end(), 0.0f);
    const std::vector<KeySum> work = key_sums(source, strip, first_key, end_key - first_key, out, before_cast);
    parallel_for(static_cast<int64_t>(work.size()), source.config.threads,
                 [&](int64_t i) { key_step(source, strip, first_key, work[static_cast<size_t>(i)]); });
    if (!diagnostics) continue;
    const int64_t rows = std::min(shape.keys, end_key * kTile) - first_key * kTile;
    for (int64_t i = 0; i < rows * dim; ++i)
      diagnostics->dk_magnitude +=
          std::abs(static_cast<double>(before_cast[static_cast<size_t>(i)])) * shape.softmax_scale;
  }
  for (auto* x : {&out.dq, &out.dk})
    for (float& value : *x) value *= shape.softmax_scale;
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
  if (diagnostics) {
    for (auto* rows :
         {&diagnostics->sum, &diagnostics->magnitude, &diagnostics->cast_sum, &diagnostics->cast_magnitude})
      rows->assign(static_cast<size_t>(shape.queries), 0.0);
    diagnostics->dk_magnitude = 0;
  }
  if (wanted.dq || wanted.dk || wanted.dv || diagnostics) all_tiles(source, out, diagnostics);
  if (diagnostics) measure_columns(source, *diagnostics);
  return out;
}

}  // namespace dmattn::cpu
