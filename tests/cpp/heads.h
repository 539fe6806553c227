// Heads for tests: random or hand-made, as the twin takes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "analysis/random.h"
#include "cpu/reference.h"
#include "cpu/tiles.h"
#include "cpu/twin.h"
#include "numerics/bf16.h"

namespace dmattn::test {

struct Head {
  cpu::HeadShape shape;
  std::vector<float> q, k, v, d_o;

  Head(int64_t queries, int64_t keys, int64_t dim, bool causal = true) {
    const int64_t padded = cpu::round_up(dim, cpu::kLanes);
    shape = {queries, keys, dim, padded, static_cast<float>(1 / std::sqrt(static_cast<double>(dim))), causal};
    for (auto* x : {&q, &d_o}) x->assign(static_cast<size_t>(queries * padded), 0.0f);
    for (auto* x : {&k, &v}) x->assign(static_cast<size_t>(keys * padded), 0.0f);
  }

  // value(row, channel), rounded to BF16.
  void fill(std::vector<float>& x, const std::function<double(int64_t, int64_t)>& value) const {
    const int64_t rows = static_cast<int64_t>(x.size()) / shape.dim_padded;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t c = 0; c < shape.dim; ++c)
        x[static_cast<size_t>(i * shape.dim_padded + c)] = numerics::bf16_round(static_cast<float>(value(i, c)));
  }

  Head& gaussian(uint64_t seed, double spread = 1) {
    Random random(seed);
    for (auto* x : {&q, &k, &v, &d_o})
      fill(*x, [&](int64_t, int64_t) { return random.normal() * (x == &q ? spread : 1); });
    return *this;
  }

  // Key 0 holds about `share` of the last row.
  Head& sink(double share) {
    const double logit = std::log(static_cast<double>(shape.keys) * share / (1 - share)) + 0.5;
    for (int64_t i = 0; i < shape.queries; ++i) q[static_cast<size_t>(i * shape.dim_padded)] = 4;
    for (int64_t j = 0; j < shape.keys; ++j) k[static_cast<size_t>(j * shape.dim_padded)] = 0;
    for (int64_t c = 0; c < shape.dim; ++c) k[static_cast<size_t>(c)] = 0;
    k[0] = numerics::bf16_round(static_cast<float>(logit * std::sqrt(static_cast<double>(shape.dim)) / 4));
    return *this;
  }
};

struct HeadRun {
  cpu::Forward forward;
  std::vector<float> o_full, o;  // FP32 and BF16
  cpu::Gradients gradients;
  cpu::Diagnostics diagnostics;
};

// One head through forward and backward, as an operator would call them.
inline HeadRun run(const Head& head, const cpu::TwinConfig& config, Mode mode, bool diagnose = true,
                   cpu::KeySums* group = nullptr) {
  HeadRun out;
  const cpu::KvHead kv = cpu::prepare_kv(head.shape, config, head.k.data(), head.v.data(), mode == Mode::bf16_dp);
  const cpu::QueryHead query = cpu::prepare_query(head.shape, config, kv, head.q.data());
  out.forward = cpu::forward(head.shape, config, kv, query, head.q.data(), mode);
  out.o_full = cpu::divide_o(head.shape, config, out.forward, mode);
  out.o = out.o_full;
  for (size_t i = 0; i < out.o.size(); ++i) {
    out.o[i] = numerics::bf16_round(out.o_full[i]);
    if (config.numerics == Numerics::hopper) out.o_full[i] = out.o[i] + numerics::bf16_round(out.o_full[i] - out.o[i]);
  }
  cpu::BackwardInput in;
  in.mode = mode;
  in.d_o = head.d_o.data();
  in.o_stored = out.o.data();
  in.o_full = out.o_full.data();
  in.reference = out.forward.reference.data();
  in.sum = out.forward.sum.data();
  in.sum_rounded = out.forward.sum_rounded.data();
  out.gradients = cpu::backward(head.shape, config, kv, query, in, {}, diagnose ? &out.diagnostics : nullptr, group);
  return out;
}

inline cpu::TwinConfig hopper(Centre centre = Centre::qk, Accumulator accumulator = Accumulator::tensor_core) {
  return {Numerics::hopper, centre, accumulator, 0};
}
inline cpu::TwinConfig paper(Centre centre = Centre::k) { return {Numerics::paper, centre, Accumulator::fp32, 0}; }

// Relative Frobenius error.
template <class T>
double error(const std::vector<T>& mine, const std::vector<double>& truth) {
  double difference = 0, reference = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double d = static_cast<double>(mine[i]) - truth[i];
    difference += d * d;
    reference += truth[i] * truth[i];
  }
  return reference > 0 ? std::sqrt(difference / reference) : std::sqrt(difference);
}

inline double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// Median over rows of |sum dS| / sum|dS|.
inline double residual(const HeadRun& run) {
  std::vector<double> rows;
  for (size_t i = 1; i < run.diagnostics.sum.size(); ++i)
    if (run.diagnostics.magnitude[i] > 0)
      rows.push_back(std::abs(run.diagnostics.sum[i]) / run.diagnostics.magnitude[i]);
  return median_of(rows);
}

}  // namespace dmattn::test
