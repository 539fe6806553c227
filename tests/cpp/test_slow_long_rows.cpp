// Long rows: the exponent rule and the flush interval of hopper's backward (docs/numerics.md, section 4).
#include <gtest/gtest.h>

#include <algorithm>

#include "heads.h"

namespace dmattn::test {
namespace {

// Error of each key's row of dV, the median key.
double median_key_error(const std::vector<float>& dv, const std::vector<double>& truth, int64_t dim) {
  std::vector<double> errors;
  for (size_t at = 0; at < truth.size(); at += static_cast<size_t>(dim)) {
    double difference = 0, reference = 0;
    for (size_t c = at; c < at + static_cast<size_t>(dim); ++c) {
      difference += (dv[c] - truth[c]) * (dv[c] - truth[c]);
      reference += truth[c] * truth[c];
    }
    if (reference > 0) errors.push_back(std::sqrt(difference / reference));
  }
  return median_of(errors);
}

struct Measured {
  double residual, dv;
};

Measured measure(const Head& head, const cpu::Reference& truth, Accumulator accumulator, cpu::ExponentRule rule) {
  cpu::TwinConfig config = hopper(Centre::qk, accumulator);
  config.exponent_rule = rule;
  const HeadRun result = run(head, config, Mode::onepass);
  return {residual(result), median_key_error(result.gradients.dv, truth.dv, head.shape.dim_padded)};
}

class SlowLongRows : public ::testing::TestWithParam<double> {};

TEST_P(SlowLongRows, TileExponentsKeepTheInvariantAndTheForwardsCodes) {
  Head head(8192, 8192, 64);
  head.gaussian(1);
  if (GetParam() > 0) head.sink(GetParam());
  const cpu::Reference truth =
      cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), head.d_o.data(), 0);
  using enum cpu::ExponentRule;
  const Measured forwards_codes = measure(head, truth, Accumulator::fp32, row_group);
  const Measured exact = measure(head, truth, Accumulator::fp32, tile);
  const Measured modelled = measure(head, truth, Accumulator::tensor_core, tile);
  const Measured one_per_row = measure(head, truth, Accumulator::fp32, row);
  for (const auto& [name, m] : {std::pair{"row_group fp32", forwards_codes},
                                {"tile fp32", exact},
                                {"tile 13 bits", modelled},
                                {"row fp32", one_per_row}})
    std::printf("sink %.1f  %-15s residual %.2e  dV of the median key %.4f\n", GetParam(), name, m.residual, m.dv);
  // Limits of the contract; the rows' own rounding of O to BF16 hi + lo is 2^-17, far below both.
  EXPECT_LE(exact.residual, 1e-4);
  EXPECT_LE(modelled.residual, 2e-3);
  EXPECT_LE(modelled.dv, 1.05 * forwards_codes.dv);
  EXPECT_LE(exact.dv, 1.05 * forwards_codes.dv);
  // What the rule is for: with a sink, one reference per row drives every other key's code into the subnormals.
  if (GetParam() > 0) {
    EXPECT_GT(one_per_row.dv, 2 * exact.dv);
  }
}

INSTANTIATE_TEST_SUITE_P(Sinks, SlowLongRows, ::testing::Values(0.0, 0.9));

}  // namespace
}  // namespace dmattn::test
