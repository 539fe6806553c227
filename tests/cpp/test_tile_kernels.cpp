// Products and row operations: against scalar definitions, and every instruction set against every other.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "analysis/random.h"
#include "cpu/tile_kernels.h"
#include "numerics/exp2.h"
#include "numerics/fp8.h"

namespace dmattn::cpu {
namespace {

// One output of the tensor core by the definition in docs/numerics.md, in FP64 (every term fits).
float tensor_core_output(const float* a, const float* b, int64_t ldb, int k, float start) {
  double sum = start;
  for (int first = 0; first < k; first += 32) {
    int largest = -1000;
    for (int i = first; i < first + 32; ++i) {
      if (a[i] == 0 || b[i * ldb] == 0) continue;
      largest = std::max(largest, std::max(-6, std::ilogb(a[i])) + std::max(-6, std::ilogb(b[i * ldb])));
    }
    if (sum != 0) largest = std::max(largest, std::ilogb(sum));
    if (largest == -1000) continue;
    const double unit = std::ldexp(1.0, std::max(largest - 13, -126));
    double total = std::trunc(sum / unit);
    for (int i = first; i < first + 32; ++i) total += std::trunc(static_cast<double>(a[i]) * b[i * ldb] / unit);
    if (total != 0) {
      const double kept = std::ldexp(1.0, std::ilogb(total) - 13);
      total = std::trunc(total / kept) * kept;
    }
    sum = total * unit;
  }
  return static_cast<float>(sum);
}

enum class Kind { wide, narrow, one_signed, sparse };

std::vector<float> codes(size_t n, Random& random, Kind kind) {
  std::vector<float> out(n);
  for (float& value : out) {
    const double x = kind == Kind::wide     ? random.normal() * std::exp2(3 * random.normal())
                     : kind == Kind::narrow ? random.normal() * 100
                     : kind == Kind::sparse ? (random.uniform() < 0.9 ? 0.0 : random.normal() * 0.02)
                                            : std::abs(random.normal()) * 200;
    value = numerics::e4m3_round(static_cast<float>(x));
  }
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class TensorCore : public ::testing::TestWithParam<Kind> {};

TEST_P(TensorCore, EqualsItsDefinitionBitForBit) {
  Random random(11);
  for (const auto& [m, n, k] : {std::tuple{64, 64, 128}, {3, 16, 32}, {65, 80, 96}, {64, 256, 64}, {1, 48, 512}}) {
    const std::vector<float> a = codes(static_cast<size_t>(m * k), random, GetParam());
    const std::vector<float> b = codes(static_cast<size_t>(k * n), random, GetParam());
    std::vector<float> start(static_cast<size_t>(m * n));
    for (float& value : start) value = std::trunc(static_cast<float>(random.normal()) * 4096);  // 13 bits
    for (const TileKernels& kernels : all_tile_kernels())
      for (const bool accumulate : {false, true}) {
        std::vector<float> c = start;
        kernels.product_tensor_core(m, n, k, a.data(), k, b.data(), n, c.data(), n, accumulate);
        for (int i = 0; i < m; ++i)
          for (int j = 0; j < n; ++j) {
            const float expected = tensor_core_output(a.data() + i * k, b.data() + j, n, k,
                                                      accumulate ? start[static_cast<size_t>(i * n + j)] : 0.0f);
            ASSERT_EQ(c[static_cast<size_t>(i * n + j)], expected) << kernels.name << " " << i << "," << j;
          }
      }
  }
}

TEST_P(TensorCore, KeepsSmallAccumulatorsBesideZeros) {
  // A rescaled accumulator may lie far below any product. Beside products of zero it keeps its 13 bits, down to 2^-126.
  Random random(15);
  const int n = 64, k = 64;
  std::vector<float> a = codes(k, random, GetParam());
  const std::vector<float> b = codes(static_cast<size_t>(k * n), random, GetParam());
  for (const bool zeros : {true, false}) {
    if (zeros)
      std::fill(a.begin(), a.end(), 0.0f);
    else
      a = codes(k, random, GetParam());
    for (int exponent = -140; exponent <= 20; ++exponent) {
      std::vector<float> start(n);
      for (float& value : start)
        value = std::ldexp(std::trunc(static_cast<float>(random.normal()) * 4096), exponent - 12);
      for (const TileKernels& kernels : all_tile_kernels()) {
        std::vector<float> c = start;
        kernels.product_tensor_core(1, n, k, a.data(), k, b.data(), n, c.data(), n, true);
        for (size_t j = 0; j < c.size(); ++j)
          ASSERT_EQ(c[j], tensor_core_output(a.data(), b.data() + j, n, k, start[j])) << kernels.name << exponent;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, TensorCore,
                         ::testing::Values(Kind::wide, Kind::narrow, Kind::one_signed, Kind::sparse));

TEST(TensorCoreFacts, TruncatesAndDriftsOnOneSignedSums) {
  // 4096 products of 1: in FP32 the sum is exact; 13 bits stop growing at 2^14, where a step's 32 still count.
  std::vector<float> a(512, 1.0f), b(512 * 16, 1.0f), c(16, 0.0f);
  const TileKernels& kernels = tile_kernels();
  for (int i = 0; i < 8; ++i) kernels.product_tensor_core(1, 16, 512, a.data(), 512, b.data(), 16, c.data(), 16, true);
  EXPECT_EQ(c[0], 4096.0f);
  a.assign(512, 1.125f);  // products that need a bit more than the unit keeps once the sum is large
  c.assign(16, 0.0f);
  for (int i = 0; i < 64; ++i) kernels.product_tensor_core(1, 16, 512, a.data(), 512, b.data(), 16, c.data(), 16, true);
  EXPECT_LT(c[0], 64 * 512 * 1.125f);
}

TEST(TensorCoreFacts, ACancelledSumIsPlusZero) {
  std::vector<float> a(32, 0.0f), b(32 * 16, 1.0f), c(16);
  a[0] = 3.0f;
  a[1] = -3.0f;
  for (const TileKernels& kernels : all_tile_kernels()) {
    kernels.product_tensor_core(1, 16, 32, a.data(), 32, b.data(), 16, c.data(), 16, false);
    EXPECT_EQ(c[5], 0.0f);
    EXPECT_FALSE(std::signbit(c[5])) << kernels.name;
  }
}

TEST(Products, AgreeWithScalarSumsOnEveryInstructionSet) {
  Random random(12);
  const int m = 67, n = 112, k = 45;
  std::vector<float> a(m * k), b(k * n);
  for (auto* x : {&a, &b})
    for (float& value : *x) value = static_cast<float>(random.normal());
  std::vector<float> first;
  for (const TileKernels& kernels : all_tile_kernels()) {
    std::vector<float> c(m * n, 1.0f);
    kernels.product_f32(m, n, k, a.data(), k, b.data(), n, c.data(), n, true);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < n; ++j) {
        double exact = 1, magnitude = 1;
        for (int l = 0; l < k; ++l) {
          exact += static_cast<double>(a[static_cast<size_t>(i * k + l)]) * b[static_cast<size_t>(l * n + j)];
          magnitude += std::abs(a[static_cast<size_t>(i * k + l)] * b[static_cast<size_t>(l * n + j)]);
        }
        ASSERT_NEAR(c[static_cast<size_t>(i * n + j)], exact, (k + 1) * 0x1p-23 * magnitude);  // one rounding a term
      }
    if (first.empty()) first = c;
    EXPECT_TRUE(same_bits(first, c)) << kernels.name;
    const std::vector<double> wide_a(a.begin(), a.end()), wide_b(b.begin(), b.end());
    std::vector<double> wide(m * n);
    kernels.product_f64(m, n, k, wide_a.data(), k, wide_b.data(), n, wide.data(), n, false);
    for (size_t i = 0; i < wide.size(); ++i) ASSERT_NEAR(wide[i] + 1, c[i], 1e-4);
  }
}

TEST(Products, OfCodesAreTheSameFusedOrNot) {
  Random random(14);
  const int m = 9, n = 112, k = 130;
  std::vector<float> a = codes(m * k, random, Kind::wide), b = codes(k * n, random, Kind::wide);
  for (const TileKernels& kernels : all_tile_kernels()) {
    std::vector<float> fused(m * n, 0.1f), plain(m * n, 0.1f);
    kernels.product_exact(m, n, k, a.data(), k, b.data(), n, fused.data(), n, true);
    kernels.product_f32(m, n, k, a.data(), k, b.data(), n, plain.data(), n, true);
    EXPECT_TRUE(same_bits(fused, plain)) << kernels.name;
  }
}

TEST(Rows, AgreeOnEveryInstructionSet) {
  Random random(13);
  std::vector<float> score(64), dp(64);
  for (int trial = 0; trial < 200; ++trial) {
    for (float& value : score) value = static_cast<float>(random.normal() * 1000);
    for (float& value : dp) value = static_cast<float>(random.normal() * 10);
    const int n = trial % 65;
    const float factor = 0.003f, offset = -2.0f + static_cast<float>(trial % 7);
    const float offsets[] = {offset, offset + 1, offset - 1, offset + 2}, scales[] = {0.5f, 0.25f, 2.0f, 3.0f};
    std::vector<float> seen;
    for (const TileKernels& kernels : all_tile_kernels()) {
      std::vector<float> p(64), code(64), plain(64), ds(64), cast(64), y(64, 0.25f), z(64, 0.25f);
      const ExpSums sums = kernels.exp_row(score.data(), factor, offsets, n, p.data(), code.data());
      const float total = kernels.exp_row_plain(score.data(), factor, -offset, n, plain.data());
      const float amax = kernels.ds_row(p.data(), scales, dp.data(), 0.1f, 0.2f, n, ds.data());
      kernels.cast(score.data(), 0.1f, 64, cast.data());
      kernels.axpy(score.data(), 0.3f, 64, y.data());
      kernels.add_scaled(score.data(), 0.3f, 64, z.data());
      float codes_sum = 0;
      for (int j = 0; j < 64; ++j) {
        const auto at = static_cast<size_t>(j);
        const auto power_at = [&](float shift) {
          return j < n ? numerics::exp2_polynomial(std::fma(score[at], factor, shift)) : 0.0f;
        };
        const float power = power_at(offsets[j / 16]);
        ASSERT_EQ(p[at], power);
        ASSERT_EQ(code[at], numerics::e4m3_round(power));
        ASSERT_EQ(plain[at], power_at(offset));
        ASSERT_EQ(ds[at], j < n ? (power * scales[j / 16]) * std::fma(dp[at], 0.1f, -0.2f) : 0.0f);
        ASSERT_EQ(y[at], std::fma(score[at], 0.3f, 0.25f));
        const float product = score[at] * 0.3f;
        ASSERT_EQ(z[at], 0.25f + product);
        codes_sum += code[at];
      }
      ASSERT_EQ(sums.rounded, codes_sum);  // exact in any order
      std::vector<float> all{sums.unrounded,
                             total,
                             amax,
                             kernels.row_max(score.data(), n),
                             kernels.dot_row(p.data(), dp.data(), n),
                             kernels.amax(score.data(), n)};
      for (const auto* x : {&p, &code, &ds, &cast}) all.insert(all.end(), x->begin(), x->end());
      if (seen.empty()) seen = all;
      ASSERT_TRUE(same_bits(seen, all)) << kernels.name;
    }
  }
}

TEST(Rows, CarryNanInSumsAndNeverInCodes) {
  std::vector<float> score(64, 1.0f), p(64), code(64);
  const float offsets[4] = {};
  for (const TileKernels& kernels : all_tile_kernels()) {
    const ExpSums sums =
        kernels.exp_row(score.data(), std::numeric_limits<float>::quiet_NaN(), offsets, 64, p.data(), code.data());
    EXPECT_TRUE(std::isnan(sums.unrounded));
    for (const float value : code) EXPECT_EQ(value, 0.0f);
    score[40] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(kernels.amax(score.data(), 64)));
    EXPECT_EQ(kernels.amax(score.data(), 40), 1.0f);
    score[40] = 1.0f;
  }
}

}  // namespace
}  // namespace dmattn::cpu
