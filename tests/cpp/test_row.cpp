// The worked row's identities (docs/method.md) on many seeds.
#include <gtest/gtest.h>

#include <cmath>

#include "analysis/analysis.h"

namespace dmattn {
namespace {

struct RowCase {
  int64_t head_dim;
  Centre centre;
};

class Identities : public ::testing::TestWithParam<RowCase> {};

TEST_P(Identities, HoldForAThousandSeeds) {
  RunOptions options;
  options.numerics = Numerics::paper;
  options.centre = GetParam().centre;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    const RowResult row = worked_row({8, GetParam().head_dim, seed}, options);
    const RowMode &stale = row.modes.at(Mode::stale), &consistent = row.modes.at(Mode::consistent);
    const RowMode &matched = row.modes.at(Mode::matched), &onepass = row.modes.at(Mode::onepass);
    // FP32 rounds every product of the row (2^-24 each, and P carries exp2's 2 ulp): 1e-6 of the magnitudes added up.
    const double limit = 1e-6 * row.magnitude;
    // 1. Where P sums to one, a row sums to the difference of the deltas.
    EXPECT_NEAR(stale.row_sum, matched.delta - stale.delta, limit) << seed;
    EXPECT_NEAR(consistent.row_sum, matched.delta - consistent.delta, limit) << seed;
    EXPECT_NEAR(matched.row_sum, 0, limit) << seed;
    EXPECT_NEAR(onepass.row_sum, 0, limit) << seed;
    // 2. Stale and consistent differ by the rounding of dO.
    EXPECT_NEAR(stale.row_sum - consistent.row_sum, row.gradient_rounding, limit) << seed;
    // 3. The stale row sum is rounding of P, of dO and of O; the last is bounded by BF16's half unit.
    EXPECT_NEAR(row.split_remainder, row.o_rounding, limit) << seed;
    EXPECT_NEAR(stale.row_sum, row.split_probability + row.split_gradient + row.split_remainder, 1e-12) << seed;
    EXPECT_LE(std::abs(row.split_remainder), 0x1p-8 * row.magnitude) << seed;
    double p = 0;
    for (const double value : row.p) p += value;
    EXPECT_NEAR(p, 1, 1e-6) << seed;
    EXPECT_EQ(stale.d_s.size(), 8u);
    EXPECT_NEAR(stale.sum_positive + stale.sum_negative, stale.row_sum, 1e-12 + 1e-12 * row.magnitude);
  }
}

INSTANTIATE_TEST_SUITE_P(DimsAndCentring, Identities,
                         ::testing::Values(RowCase{1, Centre::none}, RowCase{1, Centre::k}, RowCase{4, Centre::none},
                                           RowCase{4, Centre::k}, RowCase{64, Centre::none}, RowCase{64, Centre::k}));

TEST(WorkedRow, DefaultSeedShowsAClearRow) {
  RunOptions options;
  options.numerics = Numerics::paper;
  options.centre = Centre::k;
  const RowResult row = worked_row({}, options);
  EXPECT_GT(std::abs(row.modes.at(Mode::stale).share), 0.01);
  EXPECT_LT(std::abs(row.modes.at(Mode::consistent).share), 0.01);
  EXPECT_LT(std::abs(row.modes.at(Mode::matched).share), 1e-6);
}

TEST(WorkedRow, LongRowsAndHopperKeepTheSplit) {
  for (const Numerics numerics : {Numerics::paper, Numerics::hopper}) {
    RunOptions options;
    options.numerics = numerics;
    options.centre = default_centre(numerics);
    options.accumulator = Accumulator::fp32;  // the split knows codes, not the accumulator
    const RowResult row = worked_row({200, 64, 3}, options);
    // Codes of P in the backward's tiles may sit in E4M3's subnormals where the forward's do not: 2^-10 of a tile.
    EXPECT_NEAR(row.split_remainder, row.o_rounding, (numerics == Numerics::paper ? 1e-6 : 1e-4) * row.magnitude);
    EXPECT_EQ(row.p.size(), 200u);
  }
}

}  // namespace
}  // namespace dmattn
