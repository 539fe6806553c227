// Long rows: exponents and the flush interval of hopper's backward (docs/numerics.md, section 4).
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

Measured measure(const Head& head, const cpu::Reference& truth, Accumulator accumulator) {
  const HeadRun result = run(head, hopper(Centre::qk, accumulator), Mode::onepass);
  return {residual(result), median_key_error(result.gradients.dv, truth.dv, head.shape.dim_padded)};
}

struct LongRows {
  double sink;
  double codes;  // dV of the median key where the codes of P are the forward's own and sums are FP32 (docs/numerics.md)
};

class SlowLongRows : public ::testing::TestWithParam<LongRows> {};

TEST_P(SlowLongRows, ExponentsKeepTheInvariantAndTheForwardsCodes) {
  Head head(8192, 8192, 64);
  head.gaussian(1);
  if (GetParam().sink > 0) head.sink(GetParam().sink);
  const cpu::Reference truth =
      cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), head.d_o.data(), 0);
  const Measured exact = measure(head, truth, Accumulator::fp32);
  const Measured modelled = measure(head, truth, Accumulator::tensor_core);
  for (const auto& [name, m] : {std::pair{"fp32", exact}, {"13 bits", modelled}})
    std::printf("sink %.1f  %-7s residual %.2e  dV of the median key %.4f\n", GetParam().sink, name, m.residual, m.dv);
  // Limits of the contract; the rows' own rounding of O to BF16 hi + lo is 2^-17, far below both.
  EXPECT_LE(exact.residual, 5e-4);
  EXPECT_LE(modelled.residual, 2e-3);
  EXPECT_LE(exact.dv, 1.05 * GetParam().codes);
  EXPECT_LE(modelled.dv, 1.05 * GetParam().codes);
}

INSTANTIATE_TEST_SUITE_P(Sinks, SlowLongRows, ::testing::Values(LongRows{0.0, 0.0531}, LongRows{0.9, 0.0594}));

}  // namespace
}  // namespace dmattn::test
