#include "cpu/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "cpu/parallel.h"
#include "cpu/tile_kernels.h"
#include "numerics/constants.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kTile = numerics::kTile;
constexpr int64_t kElements = kTile * kTile;

std::vector<double> widen(const float* x, int64_t rows, int64_t dim) {
  std::vector<double> out(static_cast<size_t>(round_up(rows, kTile) * dim), 0.0);
  std::copy(x, x + rows * dim, out.begin());
  return out;
}

std::vector<double> widen_tiles(const float* x, int64_t rows, int64_t dim) {
  const std::vector<float> tiles = transpose_tiles(x, rows, dim);
  return {tiles.begin(), tiles.end()};
}

struct Operands {
  const HeadShape& shape;
  std::vector<double> q, k, v, d_o, k_tiles, v_tiles;
  std::vector<double> delta;

  int columns(int64_t row, int64_t key_tile) const {
    const int64_t n = shape.visible(row) - key_tile * kTile;
    return static_cast<int>(std::clamp<int64_t>(n, 0, kTile));
  }

  // left [64][dim] rows of query_tile times right tile [dim][64].
  void scores(const std::vector<double>& left, int64_t query_tile, const std::vector<double>& right, int64_t key_tile,
              double* out) const {
    const auto dim = static_cast<int>(shape.dim_padded);
    tile_kernels().product_f64(kTile, kTile, dim, left.data() + query_tile * kTile * dim, dim,
                               right.data() + key_tile * kTile * dim, kTile, out, kTile, false);
  }

  // P and dS of a tile from lse and delta.
  void backward_tile(int64_t query_tile, int64_t key_tile, const double* lse, double* p, double* ds) const {
    scores(q, query_tile, k_tiles, key_tile, p);
    scores(d_o, query_tile, v_tiles, key_tile, ds);
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t row = query_tile * kTile + i;
      const int n = columns(row, key_tile);
      for (int j = 0; j < kTile; ++j) {
        double& probability = p[i * kTile + j];
        double& gradient = ds[i * kTile + j];
        probability = j < n ? std::exp(probability * shape.softmax_scale - lse[row]) : 0.0;
        gradient = j < n ? probability * (gradient - delta[static_cast<size_t>(row)]) : 0.0;
      }
    }
  }
};

int64_t key_tiles(const HeadShape& shape, int64_t query_tile) {
  return blocks_of(shape.visible(std::min(shape.queries, (query_tile + 1) * kTile) - 1), kTile);
}

void forward_rows(const Operands& in, int64_t query_tile, Reference& out) {
  const HeadShape& shape = in.shape;
  const auto dim = static_cast<int>(shape.dim_padded);
  const int64_t first = query_tile * kTile, rows = std::min(kTile, shape.queries - first);
  std::vector<double> p(kElements), o(static_cast<size_t>(kTile * dim), 0.0);
  std::vector<double> largest(kTile, -std::numeric_limits<double>::infinity()), sum(kTile, 0.0);
  std::vector<double> weighted(kTile, 0.0);  // sum of e^(s - largest) (s - largest): with `sum`, the row's entropy
  for (int64_t key_tile = 0; key_tile < key_tiles(shape, query_tile); ++key_tile) {
    in.scores(in.q, query_tile, in.k_tiles, key_tile, p.data());
    for (int64_t i = 0; i < kTile; ++i) {
      const int n = in.columns(first + i, key_tile);
      double* row = p.data() + i * kTile;
      std::fill(row + n, row + kTile, 0.0);
      if (n == 0) continue;
      double top = largest[static_cast<size_t>(i)];
      for (int j = 0; j < n; ++j) {
        row[j] *= shape.softmax_scale;
        if (row[j] > top || row[j] != row[j]) top = row[j];
      }
      const double shift = largest[static_cast<size_t>(i)] - top, rescale = std::exp(shift);
      largest[static_cast<size_t>(i)] = top;
      double& total = sum[static_cast<size_t>(i)];
      double& moment = weighted[static_cast<size_t>(i)];
      moment = rescale > 0 ? rescale * (moment + shift * total) : 0.0;  // the first tile's shift is infinite
      total *= rescale;
      for (int j = 0; j < n; ++j) {
        const double below = row[j] - top;
        total += row[j] = std::exp(below);
        moment += row[j] * below;
      }
      for (int c = 0; c < dim; ++c) o[static_cast<size_t>(i * dim + c)] *= rescale;
    }
    tile_kernels().product_f64(kTile, dim, kTile, p.data(), kTile, in.v.data() + key_tile * kTile * dim, dim, o.data(),
                               dim, true);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const double total = sum[static_cast<size_t>(i)];
    const bool empty = shape.visible(first + i) == 0;
    out.lse[static_cast<size_t>(first + i)] =
        empty ? -std::numeric_limits<double>::infinity() : largest[static_cast<size_t>(i)] + std::log(total);
    out.entropy[static_cast<size_t>(first + i)] =
        empty ? 0.0 : std::log(total) - weighted[static_cast<size_t>(i)] / total;
    for (int c = 0; c < dim; ++c)
      out.o[static_cast<size_t>((first + i) * dim + c)] = empty ? 0.0 : o[static_cast<size_t>(i * dim + c)] / total;
  }
}

void query_gradient(const Operands& in, int64_t query_tile, Reference& out) {
  const auto dim = static_cast<int>(in.shape.dim_padded);
  const int64_t first = query_tile * kTile, rows = std::min(kTile, in.shape.queries - first);
  std::vector<double> p(kElements), ds(kElements), dq(static_cast<size_t>(kTile * dim), 0.0);
  for (int64_t key_tile = 0; key_tile < key_tiles(in.shape, query_tile); ++key_tile) {
    in.backward_tile(query_tile, key_tile, out.lse.data(), p.data(), ds.data());
    tile_kernels().product_f64(kTile, dim, kTile, ds.data(), kTile, in.k.data() + key_tile * kTile * dim, dim,
                               dq.data(), dim, true);
  }
  for (int64_t i = 0; i < rows * dim; ++i)
    out.dq[static_cast<size_t>(first * dim + i)] = dq[static_cast<size_t>(i)] * in.shape.softmax_scale;
}

void key_gradients(const Operands& in, int64_t key_tile, Reference& out) {
  const HeadShape& shape = in.shape;
  const auto dim = static_cast<int>(shape.dim_padded);
  const int64_t first = key_tile * kTile, rows = std::min(kTile, shape.keys - first);
  std::vector<double> p(kElements), ds(kElements), left(kElements);
  std::vector<double> dk(static_cast<size_t>(kTile * dim), 0.0), dv(dk);
  const auto add = [&](const std::vector<double>& x, const std::vector<double>& right, int64_t query_tile,
                       std::vector<double>& sum) {
    for (int64_t i = 0; i < kTile; ++i)
      for (int64_t j = 0; j < kTile; ++j)
        left[static_cast<size_t>(j * kTile + i)] = x[static_cast<size_t>(i * kTile + j)];
    tile_kernels().product_f64(kTile, dim, kTile, left.data(), kTile, right.data() + query_tile * kTile * dim, dim,
                               sum.data(), dim, true);
  };
  const int64_t first_query = shape.causal ? std::max<int64_t>(0, first + shape.queries - shape.keys) : 0;
  for (int64_t query_tile = first_query / kTile; query_tile < blocks_of(shape.queries, kTile); ++query_tile) {
    in.backward_tile(query_tile, key_tile, out.lse.data(), p.data(), ds.data());
    add(p, in.d_o, query_tile, dv);
    add(ds, in.q, query_tile, dk);
  }
  for (int64_t i = 0; i < rows * dim; ++i) {
    out.dk[static_cast<size_t>(first * dim + i)] = dk[static_cast<size_t>(i)] * shape.softmax_scale;
    out.dv[static_cast<size_t>(first * dim + i)] = dv[static_cast<size_t>(i)];
  }
}

}  // namespace

Reference reference_attention(const HeadShape& shape, const float* q, const float* k, const float* v, const float* d_o,
                              int threads) {
  const int64_t dim = shape.dim_padded;
  Operands in{shape, widen(q, shape.queries, dim),    widen(k, shape.keys, dim),       widen(v, shape.keys, dim),
              {},    widen_tiles(k, shape.keys, dim), widen_tiles(v, shape.keys, dim), {}};
  Reference out;
  out.o.assign(static_cast<size_t>(shape.queries * dim), 0.0);
  out.lse.assign(static_cast<size_t>(shape.queries), 0.0);
  out.entropy.assign(static_cast<size_t>(shape.queries), 0.0);
  const int64_t query_tiles = blocks_of(shape.queries, kTile);
  parallel_for(query_tiles, threads, [&](int64_t query_tile) { forward_rows(in, query_tile, out); });
  if (!d_o) return out;
  in.d_o = widen(d_o, shape.queries, dim);
  in.delta.assign(static_cast<size_t>(shape.queries), 0.0);
  for (int64_t i = 0; i < shape.queries; ++i)
    for (int64_t c = 0; c < dim; ++c)
      in.delta[static_cast<size_t>(i)] +=
          static_cast<double>(d_o[i * dim + c]) * out.o[static_cast<size_t>(i * dim + c)];
  out.dq.assign(static_cast<size_t>(shape.queries * dim), 0.0);
  out.dk.assign(static_cast<size_t>(shape.keys * dim), 0.0);
  out.dv.assign(static_cast<size_t>(shape.keys * dim), 0.0);
  parallel_for(query_tiles, threads, [&](int64_t query_tile) { query_gradient(in, query_tile, out); });
  parallel_for(blocks_of(shape.keys, kTile), threads, [&](int64_t key_tile) { key_gradients(in, key_tile, out); });
  return out;
}

}  // namespace dmattn::cpu
