// The small rules of src/numerics, each against its stated domain and error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "analysis/random.h"
#include "numerics/bf16.h"
#include "numerics/bias.h"
#include "numerics/exp2.h"
#include "numerics/exponent.h"
#include "numerics/reduce.h"
#include "numerics/scale.h"
#include "numerics/softmax.h"

namespace dmattn::numerics {
namespace {

constexpr double kUlp = 0x1p-23;

double relative_error(float y) {
  const double truth = std::exp2(static_cast<double>(y));
  return std::abs(exp2_polynomial(y) - truth) / truth;
}

TEST(Exp2, ErrorIsBelowItsBoundOnAWholeBinadeOfArguments) {
  double worst = 0;  // [1, 2) and (-2, -1]: every r that the fraction can take, at the finest spacing
  for (uint32_t bits = float_bits(1.0f); bits < float_bits(2.0f); ++bits)
    worst = std::max({worst, relative_error(bits_float(bits)), relative_error(-bits_float(bits))});
  EXPECT_LE(worst, 2.2 * kUlp);
  EXPECT_GE(worst, 0.5 * kUlp);  // the test looks at something
}

TEST(Exp2, ErrorIsBelowItsBoundOnTheWholeDomain) {
  Random random(1);
  for (int i = 0; i < 2'000'000; ++i) {
    const auto y = static_cast<float>(random.uniform() * 253 - 126);
    ASSERT_LE(relative_error(y), 2.2 * kUlp) << y;
  }
}

TEST(Exp2, IntegersAreExactAndEndsAreDefined) {
  for (int n = -126; n <= 127; ++n) EXPECT_EQ(exp2_polynomial(static_cast<float>(n)), std::ldexp(1.0f, n)) << n;
  EXPECT_EQ(exp2_polynomial(std::nextafter(-126.0f, -200.0f)), 0.0f);
  EXPECT_EQ(exp2_polynomial(-5e4f), 0.0f);
  EXPECT_EQ(exp2_polynomial(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(exp2_polynomial(1e30f), 0x1p127f);
  EXPECT_TRUE(std::isnan(exp2_polynomial(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Bf16, RoundsHalfToEvenAndKeepsNan) {
  EXPECT_EQ(bf16_round(1.00390625f), 1.0f);                    // 1 + 2^-8: halfway, down to even
  EXPECT_EQ(bf16_round(1.01171875f), 1.015625f);               // 1 + 3 2^-8: halfway, up to even
  EXPECT_EQ(bf16_round(bits_float(0x3f808001u)), 1.0078125f);  // just above halfway
  EXPECT_TRUE(std::isinf(bf16_round(std::numeric_limits<float>::max())));
  EXPECT_TRUE(std::isnan(bf16_round(bits_float(0x7f800001u))));
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float x = bf16_decode(static_cast<uint16_t>(bits));
    if (x == x) {
      EXPECT_EQ(bf16_encode(x), bits);
    }
  }
}

TEST(BlockScale, DividesAsIeeeDoes) {
  EXPECT_EQ(block_scale(448.0f).scale, 1.0f);
  EXPECT_EQ(block_scale(0.0f).scale, 0.0f);
  EXPECT_EQ(block_scale(0.0f).inverse, 0.0f);
  EXPECT_TRUE(std::isnan(block_scale(std::numeric_limits<float>::infinity()).scale));
  EXPECT_TRUE(std::isnan(block_scale(std::numeric_limits<float>::quiet_NaN()).inverse));
  const auto tiny = block_scale(1e-42f);  // subnormal amax
  EXPECT_EQ(tiny.scale, 0x1p-110f / 448.0f);
  EXPECT_TRUE(std::isfinite(tiny.inverse));
  for (int k = -100; k < 118; ++k) EXPECT_EQ(block_scale(std::ldexp(448.0f, k)).scale, std::ldexp(1.0f, k)) << k;
}

TEST(TileScale, IsAPowerOfTwoThatNeverSaturates) {
  Random random(2);
  for (int i = 0; i < 100'000; ++i) {
    const auto amax = static_cast<float>(std::exp2(random.uniform() * 200 - 108));
    const auto scale = tile_scale(amax);
    int exponent = 0;
    ASSERT_EQ(std::frexp(scale.scale, &exponent), 0.5f);
    ASSERT_EQ(scale.scale * scale.inverse, 1.0f);
    ASSERT_GE(amax * scale.inverse, 128.0f);
    ASSERT_LT(amax * scale.inverse, 256.0f);
  }
  EXPECT_EQ(tile_scale(0.0f).scale, 0.0f);
  EXPECT_TRUE(std::isnan(tile_scale(std::numeric_limits<float>::infinity()).scale));
}

TEST(Exponents, RiseWhereACodeIsFullAndNeverFall) {
  const float unset = negative_infinity();
  EXPECT_EQ(raise_exponent(unset, -3.0f, 0.0f), -2.0f);  // with room for codes twice as large
  EXPECT_EQ(raise_exponent(unset, unset, 0.0f), unset);
  EXPECT_EQ(raise_exponent(2.0f, 4.0f, 431.9f), 2.0f);  // up to the code 416
  EXPECT_EQ(raise_exponent(2.0f, 4.0f, 432.0f), 5.0f);  // half way is rounded to 448
  EXPECT_EQ(raise_exponent(2.0f, 4.0f, std::numeric_limits<float>::infinity()), 5.0f);
  EXPECT_EQ(raise_exponent(2.0f, 1.0f, 448.0f), 2.0f);
  EXPECT_EQ(raise_exponent(2.0f, unset, 0.0f), 2.0f);
  EXPECT_EQ(raise_exponent(2.0f, quiet_nan(), quiet_nan()), 2.0f);
  EXPECT_EQ(tile_exponent(128.0f), 0.0f);
  EXPECT_EQ(tile_exponent(255.0f), 0.0f);
  EXPECT_EQ(tile_exponent(1e-42f), -117.0f);
  EXPECT_EQ(tile_exponent(0.0f), unset);
  EXPECT_TRUE(std::isnan(tile_exponent(quiet_nan())));
  EXPECT_EQ(exponent_scale(unset).inverse, 0.0f);
  EXPECT_EQ(exponent_scale(5.0f).inverse, 0x1p-5f);
}

TEST(Exponents, AreForgottenAtPowersOfTwo) {
  for (const int64_t interval : {0, 1, 2, 4, 8, 1024}) EXPECT_TRUE(forgets_exponents(interval)) << interval;
  for (const int64_t interval : {3, 5, 6, 7, 9, 1023}) EXPECT_FALSE(forgets_exponents(interval)) << interval;
}

TEST(PowerOfTwo, IsExactAndFlushesBelowNormal) {
  for (int n = -126; n <= 127; ++n) EXPECT_EQ(power_of_two(static_cast<float>(n)), std::ldexp(1.0f, n));
  EXPECT_EQ(power_of_two(-127.0f), 0.0f);
  EXPECT_EQ(power_of_two(128.0f), std::numeric_limits<float>::infinity());
  EXPECT_EQ(power_of_two(1e30f), std::numeric_limits<float>::infinity());
  EXPECT_EQ(power_of_two(negative_infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(power_of_two(quiet_nan())));
}

TEST(Amax, KeepsNan) {
  EXPECT_TRUE(std::isnan(amax_step(quiet_nan(), 1.0f)));
  EXPECT_TRUE(std::isnan(amax_step(1.0f, quiet_nan())));
  EXPECT_EQ(amax_step(1.0f, -2.0f), 2.0f);
}

TEST(References, AreIntegersAtOrAboveTheScore) {
  EXPECT_EQ(group_reference(1.25f), 2.0f);
  EXPECT_EQ(group_reference(-1.25f), -1.0f);
  EXPECT_EQ(group_reference(3.0f), 3.0f);
  EXPECT_EQ(group_reference(negative_infinity()), negative_infinity());
  EXPECT_EQ(raise_reference(negative_infinity(), -5.0f), -5.0f);
  EXPECT_EQ(raise_reference(4.0f, -5.0f), 4.0f);
  EXPECT_TRUE(std::isnan(raise_reference(4.0f, quiet_nan())));
  EXPECT_TRUE(std::isnan(raise_reference(quiet_nan(), 4.0f)));
}

TEST(RowWeight, LiesInOneToTwoAndInvertsTheSum) {
  Random random(3);
  for (int i = 0; i < 100'000; ++i) {
    const auto sum = static_cast<float>(std::exp2(random.uniform() * 40 - 4));
    const auto [weight, exponent] = row_weight(sum);
    ASSERT_GE(weight, 1.0f);
    ASSERT_LT(weight, 2.0f);
    ASSERT_NEAR(weight * sum * std::exp2(-exponent), 1.0, kUlp);
  }
  EXPECT_EQ(row_weight(8.0f).weight, 1.0f);
  EXPECT_EQ(row_weight(8.0f).exponent, 3.0f);
  EXPECT_EQ(row_weight(0.0f).weight, 0.0f);
  EXPECT_TRUE(std::isnan(row_weight(quiet_nan()).weight));
}

TEST(Scale, PowersHoldTheirBlock) {
  const auto check = [](float amax) {
    const numerics::BlockScale scale = numerics::power_scale(amax);
    int exponent = 0;
    EXPECT_EQ(std::frexp(scale.scale, &exponent), 0.5f) << amax;
    EXPECT_EQ(scale.scale * scale.inverse, 1.0f) << amax;
    EXPECT_LE(static_cast<double>(amax), 448.0 * scale.scale) << amax;
    EXPECT_GT(std::max(amax, numerics::kAmaxFloor), 224.0 * scale.scale) << amax;
  };
  for (int e = -126; e <= 127; ++e)
    for (const double mantissa : {1.0, 1.0 + 0x1p-23, 1.75 - 0x1p-23, 1.75, 1.75 + 0x1p-23, 2.0 - 0x1p-23})
      check(static_cast<float>(std::ldexp(mantissa, e)));
  check(std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(numerics::power_scale(0.0f).scale, 0.0f);
  EXPECT_EQ(numerics::power_scale(0.0f).inverse, 0.0f);
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    EXPECT_TRUE(std::isnan(numerics::power_scale(bad).scale)) << bad;
}

TEST(Bias, SplitHoldsWhatTheAccumulatorKeeps) {
  Random random(4);
  for (int i = 0; i < 100'000; ++i) {
    const double size = std::exp2(random.uniform() * 24 - 4);
    const auto units = static_cast<float>(std::min<double>(size, kBiasCapacity) * (random.uniform() < 0.5 ? -1 : 1));
    float slots[kBiasSlots];
    bias_split(units, slots, 1);
    double sum = 0;
    for (const float slot : slots) sum += static_cast<double>(slot) * kBiasWeight;
    ASSERT_LE(std::abs(sum - units), std::max(0.5, std::abs(units) * 0x1p-16)) << units;
  }
}

TEST(Bias, GuardTakesTheSmallestPowerThatFits) {
  EXPECT_EQ(bias_guard_exponent(1.0, 1.0), 0);
  EXPECT_EQ(bias_guard_exponent(1.0 + 1e-9, 1.0), 1);
  EXPECT_EQ(bias_guard_exponent(1000.0, 1.0), 10);
  EXPECT_EQ(bias_guard_exponent(0.0, 1.0), 0);
  EXPECT_EQ(bias_units(1.0f, 0x1p-80f, 0x1p-80f), 0.0f);  // scores that vanish
  EXPECT_EQ(bias_units(6.0f, 2.0f, 3.0f), 1.0f);
}

TEST(QueryMean, HasAtMost64Blocks) {
  EXPECT_EQ(query_mean_rows(1), 128);
  EXPECT_EQ(query_mean_rows(8192), 128);
  EXPECT_EQ(query_mean_rows(8193), 256);
  for (int64_t n = 1; n < 300'000; n += 777) EXPECT_LE((n + query_mean_rows(n) - 1) / query_mean_rows(n), 64);
}

TEST(TreeDot, AddsLanesFarHalfFirst) {
  // Numbers that tell orders apart: a lane of 1e8, one of 1, one of -1e8, far apart in the butterfly.
  float a[128] = {};
  a[0] = 1e8f;       // lane 0
  a[8 * 8] = -1e8f;  // lane 8: meets lane 0 in the first step that both take part in
  a[4 * 8] = 1.0f;   // lane 4
  const auto one = [](int) { return 1.0f; };
  EXPECT_EQ(tree_dot([&](int i) { return a[i]; }, one, 128), 1.0f);
  a[8 * 8] = 1.0f;
  a[4 * 8] = -1e8f;  // now 1e8 + 1 is rounded before -1e8 arrives
  EXPECT_EQ(tree_dot([&](int i) { return a[i]; }, one, 128), 0.0f);
}

}  // namespace
}  // namespace dmattn::numerics
