// Random layers of the sweep's input families.
#include <cmath>

#include "analysis/analysis.h"
#include "analysis/random.h"
#include "core/error.h"
#include "numerics/bf16.h"

namespace dmattn {
namespace {

constexpr float kSinkQuery = 4;  // channel 0 of every query, where the family has a sink

void fill_normal(std::vector<float>& x, Random& random, double spread) {
  for (float& value : x) value = static_cast<float>(spread * random.normal());
}

// Two loud value channels and rows of dO whose sizes differ: what makes one block scale serve badly.
void add_outliers(Layer& layer, Random& random) {
  const auto dim = static_cast<size_t>(layer.head_dim);
  for (size_t at = 0; at < layer.v.size(); at += dim)
    for (size_t c = 0; c < std::min<size_t>(2, dim); ++c) layer.v[at + c] *= 8;
  for (size_t at = 0; at < layer.d_o.size(); at += dim) {
    const auto size = static_cast<float>(std::exp(random.normal()));
    for (size_t c = 0; c < dim; ++c) layer.d_o[at + c] *= size;
  }
}

// Key 0 is zero but for channel 0, which every query reads with the same weight: its logit is `logit` in every row.
void add_sink(Layer& layer, double logit) {
  const auto dim = static_cast<size_t>(layer.head_dim);
  for (size_t at = 0; at < layer.q.size(); at += dim) layer.q[at] = kSinkQuery;
  for (size_t at = 0; at < layer.k.size(); at += dim) {
    layer.k[at] = 0;
    if (at / dim < static_cast<size_t>(layer.kv_heads))  // token 0
      for (size_t c = 0; c < dim; ++c)
        layer.k[at + c] = c == 0 ? static_cast<float>(logit / (kSinkQuery * layer.softmax_scale)) : 0.0f;
  }
}

}  // namespace

Layer random_layer(const std::string& family, double spread, const SweepOptions& sweep, uint64_t seed) {
  Layer layer;
  layer.q_tokens = layer.k_tokens = sweep.tokens;
  layer.q_heads = layer.kv_heads = sweep.heads;
  layer.head_dim = sweep.head_dim;
  layer.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(sweep.head_dim)));
  layer.causal = sweep.causal;
  Random random(seed);
  const auto elements = static_cast<size_t>(sweep.tokens * sweep.heads * sweep.head_dim);
  for (auto* x : {&layer.q, &layer.k, &layer.v, &layer.d_o}) {
    x->resize(elements);
    fill_normal(*x, random, x == &layer.q ? spread : 1.0);
  }
  if (family == "outlier") {
    add_outliers(layer, random);
  } else if (family == "sink") {
    add_sink(layer, sweep.sink_logit);
  } else if (family != "gaussian") {
    throw InvalidValue("inputs: expected gaussian, outlier or sink, got '" + family + "'");
  }
  for (auto* x : {&layer.q, &layer.k, &layer.v, &layer.d_o})
    for (float& value : *x) value = numerics::bf16_round(value);
  return layer;
}

}  // namespace dmattn
