// The probe of other kernels than the twin. They are the twin here too, but through the C ABI: what the probe makes of
// their outputs has to be what it makes of its own.
#include "abi/layer_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "analysis/random.h"
#include "core/error.h"
#include "numerics/bf16.h"

namespace dmattn {
namespace {

constexpr abi::Side kCpu{};

Layer random_layer_of(int64_t batch, int64_t q_heads, int64_t kv_heads, int64_t head_dim, bool causal = true) {
  Layer layer;
  layer.batch = batch;
  layer.q_tokens = 100;  // with causality the first ten see no key
  layer.k_tokens = causal ? 90 : 150;
  layer.q_heads = q_heads;
  layer.kv_heads = kv_heads;
  layer.head_dim = head_dim;
  layer.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)));
  layer.causal = causal;
  Random random(5);
  const auto fill = [&](std::vector<float>& x, int64_t tokens, int64_t heads, double mean) {
    x.resize(static_cast<size_t>(batch * tokens * heads * head_dim));
    for (float& value : x) value = numerics::bf16_round(static_cast<float>(random.normal() + mean));
  };
  fill(layer.q, layer.q_tokens, q_heads, 0.5);
  fill(layer.k, layer.k_tokens, kv_heads, 1);
  fill(layer.v, layer.k_tokens, kv_heads, 0);
  fill(layer.d_o, layer.q_tokens, q_heads, 0);
  return layer;
}

// First element of a row of q.
float& query(Layer& layer, int64_t batch, int64_t token, int64_t head) {
  return layer.q[static_cast<size_t>(((batch * layer.q_tokens + token) * layer.q_heads + head) * layer.head_dim)];
}

void expect_same(double a, double b) {
  if (std::isnan(a) && std::isnan(b)) return;
  EXPECT_EQ(a, b);
}

// delta comes out divided by its row's weight and goes back multiplied: at most two roundings, 2^-23 of it together,
// and the rounding of a dS before its cast may follow. In these rows delta, and dP that it is subtracted from, are a
// few times sum |dS| at most. Behind the cast a code here and there falls on the other side of its rounding, which is
// at most 2^-3 of one dS of a row.
constexpr double kBeforeCast = 4e-6, kAfterCast = 2e-3;

void expect_near(double a, double b, double limit) {
  if (std::isnan(a) && std::isnan(b)) return;
  EXPECT_NEAR(a, b, limit);
}

void expect_same_residuals(const ModeResult& a, const ModeResult& b) {
  expect_near(a.residual.median, b.residual.median, kBeforeCast);
  expect_near(a.residual.p95, b.residual.p95, kBeforeCast);
  expect_near(a.signed_residual.rms, b.signed_residual.rms, kBeforeCast);
  expect_near(a.signed_residual.mean, b.signed_residual.mean, kBeforeCast);
  expect_near(a.column_sum, b.column_sum, kBeforeCast);
  expect_near(a.residual_after_cast.median, b.residual_after_cast.median, kAfterCast);
  expect_near(a.signed_residual_after_cast.rms, b.signed_residual_after_cast.rms, kAfterCast);
  expect_near(a.column_sum_after_cast, b.column_sum_after_cast, kAfterCast);
}

void expect_same_probe(const Layer& layer, const RunOptions& options = {}) {
  abi::AbiKernels kernels(kCpu, options);
  const ProbeResult twin = probe(layer, options), other = probe(layer, options, &kernels);
  EXPECT_EQ(other.nonfinite_heads, twin.nonfinite_heads);
  for (const auto& [mode, a] : other.modes) {
    SCOPED_TRACE(name(mode));
    const ModeResult& b = twin.modes.at(mode);
    expect_same(a.error.o, b.error.o);
    expect_same(a.error.dq, b.error.dq);
    expect_same(a.error.dk, b.error.dk);
    expect_same(a.error.dv, b.error.dv);
    EXPECT_EQ(a.worst_head, b.worst_head);
    expect_same_residuals(a, b);
  }
  ASSERT_EQ(other.heads.size(), twin.heads.size());
  for (size_t i = 0; i < twin.heads.size(); ++i) {
    SCOPED_TRACE("head " + std::to_string(i));
    expect_same(other.heads[i].entropy, twin.heads[i].entropy);
    for (const auto& [mode, b] : twin.heads[i].modes) {
      const ModeResult& a = other.heads[i].modes.at(mode);
      expect_same(a.error.o, b.error.o);
      expect_same(a.error.dq, b.error.dq);
      // A head's own dk and dv come back in BF16, half a unit in the eighth bit from the twin's FP32.
      expect_near(a.error.dk, b.error.dk, std::ldexp(1 + b.error.dk, -9));
      expect_near(a.error.dv, b.error.dv, std::ldexp(1 + b.error.dv, -9));
      expect_same_residuals(a, b);
    }
  }
}

TEST(LayerKernels, GroupsOfHeads) { expect_same_probe(random_layer_of(2, 4, 2, 64)); }

TEST(LayerKernels, PlainHeads) { expect_same_probe(random_layer_of(1, 3, 3, 64, false)); }

TEST(LayerKernels, OtherHeadDimensions) {
  for (const int64_t dim : {128, 256}) expect_same_probe(random_layer_of(1, 2, 1, dim));
}

TEST(LayerKernels, ScaleCentreAndAccumulator) {
  Layer layer = random_layer_of(1, 2, 1, 64);
  layer.softmax_scale = 0.3f;
  for (const Centre centre : {Centre::none, Centre::k, Centre::qk})
    for (const Accumulator accumulator : {Accumulator::tensor_core, Accumulator::fp32}) {
      RunOptions options;
      options.centre = centre;
      options.accumulator = accumulator;
      options.threads = 1;
      expect_same_probe(layer, options);
    }
}

TEST(LayerKernels, OneMode) {
  RunOptions options;
  options.modes = {Mode::onepass};
  expect_same_probe(random_layer_of(1, 4, 2, 64), options);
}

// The other head of the group, and the sums of the group, are what they are without the head.
TEST(LayerKernels, HeadsAreLeftOut) {
  Layer layer = random_layer_of(2, 6, 3, 64);
  query(layer, 0, 50, 0) = std::numeric_limits<float>::quiet_NaN();
  query(layer, 1, 99, 3) = 1e30f;                                                 // logits beyond 2^24
  layer.k[static_cast<size_t>(2 * 64)] = std::numeric_limits<float>::infinity();  // both heads of the last group
  const RunOptions options;
  EXPECT_EQ(probe(layer, options).nonfinite_heads, (std::vector<int64_t>{0, 3, 4, 5}));
  expect_same_probe(layer, options);
}

TEST(LayerKernels, NothingIsLeft) {
  Layer layer = random_layer_of(1, 1, 1, 64);
  query(layer, 0, 0, 0) = std::numeric_limits<float>::infinity();
  expect_same_probe(layer);
}

TEST(LayerKernels, NoTokens) {
  Layer layer = random_layer_of(1, 2, 1, 64);
  layer.q_tokens = layer.k_tokens = 0;
  for (auto* x : {&layer.q, &layer.k, &layer.v, &layer.d_o}) x->clear();
  const RunOptions options;
  abi::AbiKernels kernels(kCpu, options);
  const ProbeResult result = probe(layer, options, &kernels);
  EXPECT_TRUE(std::isnan(result.modes.at(Mode::stale).error.o));
}

// Kernels that are wrong in one output.
class Changed : public LayerKernels {
 public:
  Changed(const RunOptions& options, std::function<void(LayerOutputs&)> change)
      : kernels_(kCpu, options), change_(std::move(change)) {}
  LayerOutputs run(const Layer& layer, Mode mode) override {
    LayerOutputs outputs = kernels_.run(layer, mode);
    change_(outputs);
    return outputs;
  }

 private:
  abi::AbiKernels kernels_;
  std::function<void(LayerOutputs&)> change_;
};

TEST(LayerKernels, EveryOutputIsMeasured) {
  const Layer layer = random_layer_of(1, 2, 1, 64);
  const auto measured = [&](Mode mode, const std::function<void(LayerOutputs&)>& change) {
    RunOptions options;
    options.modes = {mode};
    Changed kernels(options, change);
    return probe(layer, options, &kernels);
  };
  const auto whole = [&](Mode mode, const std::function<void(LayerOutputs&)>& change) {
    return measured(mode, change).modes.at(mode);
  };
  const auto head = [&](const std::function<void(LayerOutputs&)>& change) {
    return measured(Mode::matched, change).heads.at(1).modes.at(Mode::matched);
  };
  const auto zero = [](std::vector<uint16_t>& x) { std::fill(x.begin(), x.end(), uint16_t{0}); };
  EXPECT_EQ(whole(Mode::matched, [&](LayerOutputs& out) { zero(out.o); }).error.o, 1);
  EXPECT_EQ(whole(Mode::matched, [&](LayerOutputs& out) { zero(out.dq); }).error.dq, 1);
  EXPECT_EQ(whole(Mode::matched, [&](LayerOutputs& out) { zero(out.dk); }).error.dk, 1);
  EXPECT_EQ(whole(Mode::matched, [&](LayerOutputs& out) { zero(out.dv); }).error.dv, 1);
  EXPECT_EQ(head([&](LayerOutputs& out) { zero(out.head_dk); }).error.dk, 1);
  EXPECT_EQ(head([&](LayerOutputs& out) { zero(out.head_dv); }).error.dv, 1);

  // delta too large by e makes a row's sum -e.
  const ModeResult shifted = whole(Mode::matched, [](LayerOutputs& out) {
    for (float& delta : out.delta) delta += 0.5f;
  });
  EXPECT_LT(whole(Mode::matched, [](LayerOutputs&) {}).residual.median, 1e-6);
  EXPECT_GT(shifted.residual.median, 0.05);
  EXPECT_EQ(shifted.signed_residual.sharpens, 1);

  // Another P in some rows weighs the rows of dS otherwise.
  const auto column_sum = [&](Mode mode, const std::function<void(LayerOutputs&)>& change) {
    return whole(mode, change).column_sum;
  };
  const auto every_third = [](std::vector<float>& x, float factor, float more) {
    for (size_t i = 0; i < x.size(); i += 3) x[i] = factor * x[i] + more;
  };
  for (const Mode mode : {Mode::stale, Mode::onepass}) {
    const double plain = column_sum(mode, [](LayerOutputs&) {});
    EXPECT_GT(std::abs(column_sum(mode, [&](LayerOutputs& out) { every_third(out.reference, 1, 3); }) / plain - 1),
              0.01);
    EXPECT_GT(std::abs(column_sum(mode,
                                  [&](LayerOutputs& out) {
                                    every_third(mode == Mode::stale ? out.sum : out.sum_rounded, 8, 0);
                                  }) /
                           plain -
                       1),
              0.01);
  }
}

TEST(LayerKernels, WhatIsNotOffered) {
  const Layer layer = random_layer_of(1, 1, 1, 64);
  RunOptions options;
  options.numerics = Numerics::paper;
  options.centre = Centre::k;
  abi::AbiKernels kernels(kCpu, options);
  EXPECT_THROW(probe(layer, options, &kernels), Unsupported);
  EXPECT_THROW(abi::hopper_problem(kCpu, Mode::bf16_dp), Unsupported);
  Layer short_of_keys = layer;
  short_of_keys.k.resize(64);
  EXPECT_THROW(abi::AbiKernels(kCpu, {}).run(short_of_keys, Mode::stale), std::logic_error);
}

TEST(LayerKernels, CallsSayWhatFailed) {
  dmattn_problem problem = abi::hopper_problem(kCpu, Mode::stale);
  problem.batch = problem.q_heads = problem.kv_heads = problem.q_len = problem.k_len = 1;
  problem.head_dim = 65;
  problem.softmax_scale = 1;
  try {
    abi::workspace_sizes(problem);
    ADD_FAILURE() << "accepted";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("dmattn_workspace_size: head_dim"), std::string::npos) << error.what();
  }
  problem.head_dim = 64;
  problem.batch = -1;
  EXPECT_THROW(abi::workspace_sizes(problem), InvalidValue);
}

}  // namespace
}  // namespace dmattn
