// From tiles to gradients. A key tile's exponents pass from query tile to query tile until they are forgotten, so runs
// of tiles in between are computed side by side and kept, a strip of key tiles at a time. Every output has one owner:
// dQ's rows add key tiles in ascending order, dK's and dV's rows query tiles in ascending order, whatever computes
// them.
#include <algorithm>
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/tiles.h"
#include "numerics/exponent.h"

namespace dmattn::cpu {
namespace {

// Tiles of a run of key tiles. Matrices are [key tile][query tile][64 x 64].
class Strip {
 public:
  Strip(const TileSource& source, int64_t key_tiles, bool diagnose)
      : query_tiles_(source.query_tiles()),
        p(at(key_tiles, 0) * kTileElements),
        ds_code(p.size()),
        ds(diagnose ? p.size() : 0),
        ds_scale(at(key_tiles, 0)),
        dv(ds_scale.size()),
        dk(ds_scale.size()) {}

  // As many key tiles as fit: memory stays linear in the number of rows, and threads meet rarely.
  static int64_t key_tiles(const TileSource& source) {
    constexpr int64_t kBytes = 16 << 20;  // speed alone: any number gives the same bits
    const int64_t one = source.query_tiles() * kTileElements * static_cast<int64_t>(2 * sizeof(float));
    return std::max<int64_t>(1, std::min(kBytes / std::max<int64_t>(one, 1), blocks_of(source.shape.keys, kTile)));
  }

  size_t at(int64_t key_tile, int64_t query_tile) const {  // key_tile counted from the strip's first
    return static_cast<size_t>(key_tile * query_tiles_ + query_tile);
  }

 private:
  int64_t query_tiles_;

 public:
  std::vector<float> p, ds_code, ds;  // codes of P and dS; dS itself for diagnostics alone
  std::vector<float> ds_scale;
  std::vector<KeyScale> dv, dk;
};

// The query tiles of one key tile, in ascending order, from the first that starts without exponents in an interval, if
// one does, to the last before they are forgotten.
void fill_run(const TileSource& source, int64_t interval, int64_t key_tile, int64_t in_strip, Strip& strip) {
  const int64_t begin = interval * kIntervalTiles, first = std::max(begin, source.first_query_tile(key_tile));
  if (first >= begin + kIntervalTiles || source.exponents_start(first, key_tile) != first) return;
  int64_t next = interval + 1;
  while (next * kIntervalTiles < source.query_tiles() && !numerics::forgets_exponents(next)) ++next;
  const int64_t end = std::min(source.query_tiles(), next * kIntervalTiles);
  const auto tile = std::make_unique<Tile>();
  Exponents exponents;
  for (int64_t query_tile = first; query_tile < end; ++query_tile) {
    source.compute(query_tile, key_tile, exponents, *tile);
    const size_t at = strip.at(in_strip, query_tile), element = at * kTileElements;
    std::copy_n(tile->p_code, kTileElements, strip.p.data() + element);
    std::copy_n(tile->ds_code, kTileElements, strip.ds_code.data() + element);
    if (!strip.ds.empty()) std::copy_n(tile->ds, kTileElements, strip.ds.data() + element);
    strip.ds_scale[at] = tile->ds_scale;
    strip.dv[at] = tile->dv;
    strip.dk[at] = tile->dk;
  }
}

void measure_rows(const TileSource& source, int64_t query_tile, const Strip& strip, size_t at, Diagnostics& out) {
  const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, source.shape.queries - first);
  const float* ds = strip.ds.data() + at * kTileElements;
  const float* code = strip.ds_code.data() + at * kTileElements;
  const double scale = strip.ds_scale[at];
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0, magnitude = 0, cast_sum = 0, cast_magnitude = 0;
    for (int j = 0; j < kTile; ++j) {
      const double before = ds[i * kTile + j], after = code[i * kTile + j] * scale;
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

// What a strip's tiles mean for the rows of a query tile, key tiles ascending: dQ, and sums to be reported.
void query_step(const TileSource& source, int64_t query_tile, int64_t first_key, int64_t end_key, const Strip& strip,
                Gradients& out, Diagnostics* diagnostics) {
  const auto dim = static_cast<int>(source.shape.dim_padded);
  const int64_t first = query_tile * kTile, rows = std::min<int64_t>(kTile, source.shape.queries - first);
  std::vector<float> buffer(static_cast<size_t>(kTile * dim));
  for (int64_t key_tile = first_key; key_tile < std::min(end_key, source.key_tiles(query_tile)); ++key_tile) {
    const size_t at = strip.at(key_tile - first_key, query_tile);
    if (diagnostics) measure_rows(source, query_tile, strip, at, *diagnostics);
    if (out.dq.empty()) continue;
    source.product(kTile, dim, kTile, strip.ds_code.data() + at * kTileElements, kTile,
                   source.kv.k.row(key_tile * kTile, dim), dim, buffer.data(), dim, false);
    tile_kernels().axpy(buffer.data(), strip.ds_scale[at] * source.kv.k.scale[static_cast<size_t>(key_tile)],
                        rows * dim, out.dq.data() + first * dim);
  }
}

// A slice of channels of one key tile's sum over queries: left^T . right, times the scales.
struct KeySum {
  ProductFn<float> product;
  const std::vector<float>* left;  // of the strip
  const Codes* right;
  const std::vector<KeyScale>* scale;  // by tile; null: the right operand's own
  float* sum;                          // [64 keys][dim_padded]
  float* group_sum;                    // likewise, or null
  int64_t key_tile, first_channel, channels;
};

// The tensor core's accumulator over the query tiles of an interval.
class KeyAccumulator {
 public:
  KeyAccumulator(const TileSource& source, const Strip& strip, const KeySum& work)
      : source_(source), strip_(strip), work_(work), sum_(static_cast<size_t>(kTile * work.channels)) {}

  void add(int64_t query_tile, bool fresh) {
    const int64_t dim = source_.shape.dim_padded, row = query_tile * kTile;
    const size_t at = strip_.at(work_.key_tile, query_tile);
    KeyScale now;
    if (work_.scale) {
      now = (*work_.scale)[at];
    } else {
      std::fill_n(now.factor, kGroups, work_.right->scale_of_row(row));
    }
    if (!fresh) follow(now);
    scale_ = now;
    const float* left = work_.left->data() + at * kTileElements;
    for (int i = 0; i < kTile; ++i)
      for (int j = 0; j < kTile; ++j) left_[j * kTile + i] = left[i * kTile + j];
    const auto width = static_cast<int>(work_.channels);
    work_.product(kTile, width, kTile, left_, kTile, work_.right->row(row, dim) + work_.first_channel, dim, sum_.data(),
                  width, !fresh);
  }

  void promote(int64_t rows) const {
    const int64_t dim = source_.shape.dim_padded;
    for (int64_t j = 0; j < rows; ++j)
      for (float* sum : {work_.sum, work_.group_sum})
        if (sum)
          source_.promote(sum_.data() + j * work_.channels, scale_.factor[j / numerics::kExponentKeys], work_.channels,
                          sum + j * dim + work_.first_channel);
  }

 private:
  // Brings the sum to the exponents of the next tile; a NaN stays.
  void follow(KeyScale& now) {
    constexpr int64_t kKeys = numerics::kExponentKeys;
    for (int w = 0; w < kGroups; ++w) {
      if (numerics::is_nan(scale_.factor[w])) now.factor[w] = scale_.factor[w];
      if (now.exponent[w] == scale_.exponent[w]) continue;
      const float rescale = numerics::power_of_two(scale_.exponent[w] - now.exponent[w]);
      float* rows = sum_.data() + w * kKeys * work_.channels;
      for (int64_t i = 0; i < kKeys * work_.channels; ++i) rows[i] *= rescale;
    }
  }

  const TileSource& source_;
  const Strip& strip_;
  const KeySum& work_;
  std::vector<float> sum_;  // [64 keys][channels]
  KeyScale scale_;
  alignas(64) float left_[kTileElements];
};

void key_step(const TileSource& source, const Strip& strip, int64_t first_key_tile, const KeySum& work) {
  const int64_t key_tile = first_key_tile + work.key_tile, tiles = source.query_tiles();
  const int64_t rows = std::min<int64_t>(kTile, source.shape.keys - key_tile * kTile);
  const int64_t first = source.first_query_tile(key_tile);
  KeyAccumulator accumulator(source, strip, work);
  for (int64_t query_tile = first; query_tile < tiles; ++query_tile) {
    accumulator.add(query_tile, query_tile == first || query_tile % source.flush_tiles == 0);
    if (query_tile + 1 == tiles || (query_tile + 1) % source.flush_tiles == 0) accumulator.promote(rows);
  }
}

// dV, dK and, to be measured, dK from dS before its cast, of a strip. Slices of channels share nothing.
std::vector<KeySum> key_sums(const TileSource& source, const Strip& strip, int64_t first_key_tile, int64_t key_tiles,
                             Gradients& out, KeySums* group, std::vector<float>& before_cast) {
  constexpr int64_t kSlice = 64;
  const int64_t dim = source.shape.dim_padded;
  const Codes& q = source.query.plain_codes();
  std::vector<KeySum> work;
  for (int64_t t = 0; t < key_tiles; ++t)
    for (int64_t channel = 0; channel < dim; channel += kSlice) {
      const int64_t channels = std::min(kSlice, dim - channel), first = (first_key_tile + t) * kTile * dim;
      if (!out.dv.empty())
        work.push_back({source.dv_product, &strip.p, &source.dv_codes(), &strip.dv, out.dv.data() + first,
                        group ? group->dv.data() + first : nullptr, t, channel, channels});
      if (!out.dk.empty())
        work.push_back({source.product, &strip.ds_code, &q, &strip.dk, out.dk.data() + first,
                        group ? group->dk.data() + first : nullptr, t, channel, channels});
      if (!before_cast.empty())
        work.push_back({tile_kernels().product_f32, &strip.ds, &q, nullptr, before_cast.data() + t * kTile * dim,
                        nullptr, t, channel, channels});
    }
  return work;
}

// Strips of key tiles one after the other, in each all threads: first its tiles, then the sums of rows, then of keys.
void all_tiles(const TileSource& source, Gradients& out, KeySums* group, Diagnostics* diagnostics) {
  const HeadShape& shape = source.shape;
  const int64_t all = blocks_of(shape.keys, kTile), per_strip = Strip::key_tiles(source), dim = shape.dim_padded;
  const int64_t tiles = source.query_tiles(), intervals = blocks_of(tiles, kIntervalTiles);
  Strip strip(source, per_strip, diagnostics != nullptr);
  std::vector<float> before_cast(diagnostics ? static_cast<size_t>(per_strip * kTile * dim) : 0);
  for (int64_t first_key = 0; first_key < all; first_key += per_strip) {
    const int64_t end_key = std::min(all, first_key + per_strip), first_query = source.first_query_tile(first_key);
    const int64_t first_interval = first_query / kIntervalTiles, width = end_key - first_key;
    parallel_for((intervals - first_interval) * width, source.config.threads, [&](int64_t i) {
      fill_run(source, intervals - 1 - i / width, first_key + i % width, i % width, strip);  // the fullest first
    });
    parallel_for(tiles - first_query, source.config.threads,
                 [&](int64_t i) { query_step(source, tiles - 1 - i, first_key, end_key, strip, out, diagnostics); });
    std::fill(before_cast.begin(), before_cast.end(), 0.0f);
    const std::vector<KeySum> work = key_sums(source, strip, first_key, width, out, group, before_cast);
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
  const auto add_rows = [&](const std::vector<double>& row_sum, std::vector<double>& column) {
    column.assign(static_cast<size_t>(dim), 0.0);
    for (int64_t i = 0; i < source.shape.queries; ++i) {
      const double weight = row_sum[static_cast<size_t>(i)] * q.scale_of_row(i) * source.shape.softmax_scale;
      for (int64_t c = 0; c < dim; ++c) column[static_cast<size_t>(c)] += weight * q.row(i, dim)[c];
    }
  };
  add_rows(out.sum, out.column);
  add_rows(out.cast_sum, out.column_after_cast);
}

void add(std::vector<float>& sum, const std::vector<float>& part) {
  for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
}

}  // namespace

Gradients run_backward(const TileSource& source, const Wanted& wanted, Diagnostics* diagnostics, KeySums* group) {
  const HeadShape& shape = source.shape;
  const auto query_elements = static_cast<size_t>(shape.queries * shape.dim_padded);
  const auto key_elements = static_cast<size_t>(shape.keys * shape.dim_padded);
  Gradients out;
  out.delta.resize(static_cast<size_t>(shape.queries));
  for (int64_t i = 0; i < shape.queries; ++i) out.delta[static_cast<size_t>(i)] = source.true_delta(i);
  if (wanted.dq) out.dq.assign(query_elements, 0.0f);
  if (wanted.dk) out.dk.assign(key_elements, 0.0f);
  if (wanted.dv) out.dv.assign(key_elements, 0.0f);
  if (group && wanted.dk) group->dk.resize(key_elements, 0.0f);
  if (group && wanted.dv) group->dv.resize(key_elements, 0.0f);
  if (diagnostics) {
    for (auto* rows :
         {&diagnostics->sum, &diagnostics->magnitude, &diagnostics->cast_sum, &diagnostics->cast_magnitude})
      rows->assign(static_cast<size_t>(shape.queries), 0.0);
    diagnostics->dk_magnitude = 0;
  }
  const bool running = source.config.numerics == Numerics::hopper;  // its sums go on from head to head
  if (wanted.dq || wanted.dk || wanted.dv || diagnostics)
    all_tiles(source, out, running ? group : nullptr, diagnostics);
  if (group && !running) {
    add(group->dk, out.dk);
    add(group->dv, out.dv);
  }
  if (diagnostics) measure_columns(source, *diagnostics);
  return out;
}

void finish(Numerics numerics, float softmax_scale, KeySums& group) {
  if (numerics == Numerics::paper) return;
  for (float& value : group.dk) value *= softmax_scale;
}

}  // namespace dmattn::cpu
