// The twin on heads whose results are known, and on hostile ones.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "heads.h"

namespace dmattn::test {
namespace {

const cpu::TwinConfig kAll[] = {paper(Centre::none), paper(), hopper(Centre::none), hopper(Centre::k), hopper()};

cpu::Reference truth_of(const Head& head) {
  return cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), head.d_o.data(), 0);
}

bool finite(const std::vector<float>& x) {
  for (const float value : x)
    if (!std::isfinite(value)) return false;
  return true;
}

void expect_finite(const HeadRun& run) {
  for (const auto* x : {&run.o, &run.gradients.dq, &run.gradients.dk, &run.gradients.dv, &run.gradients.delta})
    EXPECT_TRUE(finite(*x));
}

// E4M3 rounds by at most 2^-4, typically 2^-5.5, per operand; independent errors of a product of two rounded
// operands and P add in squares, so whole-tensor errors stay below 0.2 on Gaussian heads of unit logits.
constexpr double kGaussianLimit = 0.2;

class EveryMode : public ::testing::TestWithParam<Mode> {};

TEST_P(EveryMode, StaysWithinFp8RoundingOfFp64) {
  for (const auto& [queries, keys] :
       {std::pair<int64_t, int64_t>{1, 1}, {63, 63}, {64, 64}, {65, 65}, {129, 129}, {200, 77}, {77, 200}, {130, 300}})
    for (const bool causal : {true, false})
      for (const cpu::TwinConfig& config : kAll) {
        Head head(queries, keys, 64, causal);
        head.gaussian(static_cast<uint64_t>(queries * 1000 + keys));
        const cpu::Reference truth = truth_of(head);
        const HeadRun result = run(head, config, GetParam());
        expect_finite(result);
        EXPECT_LT(error(result.o, truth.o), kGaussianLimit);
        EXPECT_LT(error(result.gradients.dv, truth.dv), kGaussianLimit);
        if (queries < 2 || keys < 2) continue;  // dS vanishes
        EXPECT_LT(error(result.gradients.dq, truth.dq), kGaussianLimit) << queries << "x" << keys;
        EXPECT_LT(error(result.gradients.dk, truth.dk), kGaussianLimit) << queries << "x" << keys;
        for (size_t i = 0; i < truth.lse.size(); ++i) {
          if (std::isinf(truth.lse[i])) {
            EXPECT_EQ(result.forward.lse[i], truth.lse[i]);
          } else {
            EXPECT_NEAR(result.forward.lse[i], truth.lse[i], 0.3);  // scores carry the codes' rounding
          }
        }
      }
}

TEST_P(EveryMode, OnesInVGiveOnesInO) {
  for (const cpu::TwinConfig& config : kAll) {
    Head head(150, 150, 64);
    head.gaussian(5, 3);
    head.fill(head.v, [](int64_t, int64_t) { return 1.0; });
    const HeadRun result = run(head, config, GetParam());
    const bool rounded = config.numerics == Numerics::hopper || GetParam() == Mode::onepass;
    // O = sum of codes / sum: exact where both sums are of the rounded codes (paper's other modes are off by the
    // rounding of P, at most 2^-4).
    for (const float value : result.o) EXPECT_NEAR(value, 1.0f, rounded ? 0.0f : 0x1p-4f);
  }
}

TEST_P(EveryMode, OneKeyCopiesItsValueAndHasNoScoreGradient) {
  for (const cpu::TwinConfig& config : kAll) {
    Head head(3, 1, 64, false);
    head.gaussian(6);
    head.fill(head.v, [](int64_t, int64_t c) { return c % 2 ? 448.0 : -224.0; });  // codes hold these exactly
    const HeadRun result = run(head, config, GetParam());
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t c = 0; c < 64; ++c) EXPECT_EQ(result.o[static_cast<size_t>(i * 64 + c)], c % 2 ? 448.0f : -224.0f);
    // dS = dP - delta: zero but for the rounding of dO (2^-4) and O (2^-9) between the two; none of it in matched.
    double size = 0;
    for (const float value : head.d_o) size = std::max(size, std::abs(static_cast<double>(value)));
    const double limit = GetParam() == Mode::matched ? 1e-6 : 0x1p-4;
    for (const double sum : result.diagnostics.sum) EXPECT_LE(std::abs(sum), limit * 64 * 448 * size);
  }
}

TEST_P(EveryMode, RowsWithoutKeysAreZero) {
  for (const cpu::TwinConfig& config : kAll) {
    Head head(100, 30, 64);  // causal: queries 0 ... 69 see nothing
    head.gaussian(7);
    head.d_o[5] = std::numeric_limits<float>::quiet_NaN();  // of a row that is never used
    const HeadRun result = run(head, config, GetParam());
    if (config.numerics == Numerics::paper) continue;  // its dO blocks carry the NaN on
    expect_finite(result);
    for (size_t i = 0; i < 70; ++i) {
      EXPECT_EQ(result.forward.lse[i], -std::numeric_limits<float>::infinity());
      EXPECT_EQ(result.gradients.delta[i], 0.0f);
      for (size_t c = 0; c < 64; ++c) {
        EXPECT_EQ(result.o[i * 64 + c], 0.0f);
        EXPECT_EQ(result.gradients.dq[i * 64 + c], 0.0f);
      }
    }
  }
}

TEST_P(EveryMode, EmptySidesGiveEmptyOrZero) {
  for (const cpu::TwinConfig& config : kAll)
    for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{0, 0}, {0, 5}, {5, 0}}) {
      Head head(queries, keys, 64, false);
      head.gaussian(8);
      const HeadRun result = run(head, config, GetParam());
      EXPECT_EQ(result.o.size(), static_cast<size_t>(queries * 64));
      for (const auto* x : {&result.o, &result.gradients.dq, &result.gradients.dk, &result.gradients.dv})
        for (const float value : *x) EXPECT_EQ(value, 0.0f);
    }
}

TEST_P(EveryMode, AllZeroInputsAndBlocks) {
  for (const cpu::TwinConfig& config : kAll) {
    Head zero(130, 130, 64);
    expect_finite(run(zero, config, GetParam()));
    Head head(200, 200, 64);
    head.gaussian(9);
    for (auto* x : {&head.q, &head.k, &head.v, &head.d_o})  // the second block of each is zero
      std::fill(x->begin() + 64 * 64, x->begin() + 128 * 64, 0.0f);
    const cpu::Reference truth = truth_of(head);
    const HeadRun result = run(head, config, GetParam());
    expect_finite(result);
    EXPECT_LT(error(result.o, truth.o), kGaussianLimit);
    EXPECT_LT(error(result.gradients.dq, truth.dq), kGaussianLimit);
    EXPECT_LT(error(result.gradients.dk, truth.dk), kGaussianLimit);
  }
}

TEST_P(EveryMode, LogitsFarBelowAreFinite) {
  for (const cpu::TwinConfig& config : kAll) {
    Head head(100, 100, 64);
    head.gaussian(10);
    head.fill(head.q, [](int64_t, int64_t) { return 300.0; });
    head.fill(head.k, [](int64_t j, int64_t) { return j == 0 ? 0.0 : -300.0; });  // logits of -7e5 beside 0
    const cpu::Reference truth = truth_of(head);
    const HeadRun result = run(head, config, GetParam());
    expect_finite(result);
    EXPECT_LT(error(result.o, truth.o), kGaussianLimit);  // key 0 holds every row
  }
}

TEST_P(EveryMode, LogitsBeyondTheDomainAreNan) {
  for (const cpu::TwinConfig& config : kAll)
    for (const float size : {0x1p13f, 0x1p40f}) {
      Head head(2, 2, 64, false);
      head.fill(head.v, [](int64_t, int64_t) { return 1.0; });
      head.q[0] = size;
      head.k[0] = size;  // with K's mean removed still size / 2
      const HeadRun result = run(head, config, GetParam());
      if (size > 0x1p20f) {
        EXPECT_TRUE(std::isnan(result.o[0]));
        EXPECT_TRUE(std::isnan(result.gradients.dv[0]));
      } else {
        EXPECT_EQ(result.o[0], 1.0f);
      }
    }
}

TEST_P(EveryMode, CodesOfPowersOfTwoTimes448AreExact) {
  for (const int exponent : {-20, -3, 0, 5, 20})
    for (const cpu::TwinConfig& config : kAll) {
      Head head(64, 64, 64, false);
      const double size = std::ldexp(448.0, exponent);
      head.fill(head.q, [](int64_t, int64_t) { return 0.0; });  // uniform attention
      head.fill(head.v, [&](int64_t j, int64_t) { return j % 2 ? size : size / 2; });
      head.fill(head.d_o, [&](int64_t, int64_t c) { return c == 0 ? size : 0.0; });
      const HeadRun result = run(head, config, GetParam());
      for (const float value : result.o) EXPECT_EQ(value, static_cast<float>(0.75 * size)) << exponent;
      for (int64_t j = 0; j < 64; ++j)  // dV = sum over 64 queries of dO / 64
        EXPECT_EQ(result.gradients.dv[static_cast<size_t>(j * 64)], static_cast<float>(size)) << exponent;
    }
}

TEST_P(EveryMode, SubnormalAmaxNeitherOverflowsNorInvents) {
  for (const cpu::TwinConfig& config : kAll)
    for (const double size : {0x1p-126, 0x1p-133}) {
      Head head(70, 70, 64);
      head.gaussian(11);
      for (auto* x : {&head.v, &head.d_o, &head.q, &head.k})
        for (float& value : *x) value = numerics::bf16_round(static_cast<float>(value * size));
      const HeadRun result = run(head, config, GetParam());
      expect_finite(result);
      // Codes of a block below the floor have steps of 2^-110 / 448 2^-9 and less: nothing larger may come out.
      for (const float value : result.o) EXPECT_LE(std::abs(value), 8 * size + 0x1p-127);
    }
}

TEST_P(EveryMode, AmplitudesScaleThrough) {
  for (const cpu::TwinConfig& config : kAll) {
    Head head(128, 128, 64);
    head.gaussian(12);
    const HeadRun plain = run(head, config, GetParam());
    Head scaled = head;
    for (float& value : scaled.v) value *= 0x1p40f;
    for (float& value : scaled.d_o) value *= 0x1p-30f;
    for (float& value : scaled.q) value *= 0x1p-25f;
    for (float& value : scaled.k) value *= 0x1p25f;
    const HeadRun result = run(scaled, config, GetParam());
    for (size_t i = 0; i < plain.o.size(); ++i) {  // powers of two commute with every rounding
      ASSERT_EQ(result.o[i], plain.o[i] * 0x1p40f);
      ASSERT_EQ(result.gradients.dv[i], plain.gradients.dv[i] * 0x1p-30f);
      ASSERT_EQ(result.gradients.dk[i], plain.gradients.dk[i] * 0x1p-15f);
      ASSERT_EQ(result.gradients.dq[i], plain.gradients.dq[i] * 0x1p35f);
    }
  }
}

TEST_P(EveryMode, NanSurfacesWhereItTouchesAndNowhereElse) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const cpu::TwinConfig& config : kAll) {
    Head head(1200, 1200, 64);  // a NaN of dO reaches 1,024 rows
    head.gaussian(13);
    Head in_v = head, in_d_o = head, in_k = head, in_q = head;
    in_v.v[200 * 64] = nan;     // key block 3
    in_d_o.d_o[10 * 64] = nan;  // query block 0
    in_k.k[200 * 64] = std::numeric_limits<float>::infinity();
    in_q.q[10 * 64] = nan;
    const HeadRun v = run(in_v, config, GetParam());
    EXPECT_TRUE(std::isnan(v.o[1199 * 64]));
    EXPECT_TRUE(std::isnan(v.gradients.dq[1199 * 64]));
    EXPECT_TRUE(std::isfinite(v.o[100 * 64]));  // causal: these rows do not see the block
    EXPECT_TRUE(std::isfinite(v.gradients.dq[100 * 64]));
    EXPECT_TRUE(finite(v.gradients.dv));  // dV does not use V
    const HeadRun d = run(in_d_o, config, GetParam());
    EXPECT_TRUE(finite(d.o));
    EXPECT_TRUE(std::isnan(d.gradients.dq[10 * 64]));
    EXPECT_TRUE(std::isnan(d.gradients.dv[0]));
    EXPECT_TRUE(std::isnan(d.gradients.dk[0]));
    EXPECT_TRUE(std::isfinite(d.gradients.dq[1100 * 64]));
    EXPECT_TRUE(std::isfinite(d.gradients.dv[1100 * 64]));
    const HeadRun q = run(in_q, config, GetParam());
    EXPECT_TRUE(std::isnan(q.o[10 * 64]));
    EXPECT_TRUE(std::isfinite(q.o[200 * 64]));
    const HeadRun k = run(in_k, config, GetParam());
    EXPECT_TRUE(std::isnan(k.o[1199 * 64]));
  }
}

std::vector<float> everything(const HeadRun& run) {
  std::vector<float> all;
  for (const auto* x :
       {&run.o, &run.forward.lse, &run.gradients.dq, &run.gradients.dk, &run.gradients.dv, &run.gradients.delta})
    all.insert(all.end(), x->begin(), x->end());
  for (const auto* x : {&run.diagnostics.sum, &run.diagnostics.column})
    for (const double value : *x) all.push_back(static_cast<float>(value));
  return all;
}

TEST_P(EveryMode, ThreadsNeverChangeABit) {
  for (cpu::TwinConfig config : {paper(), hopper()}) {
    Head head(300, 300, 64);
    head.gaussian(14, 2);
    config.threads = 1;
    const std::vector<float> one = everything(run(head, config, GetParam()));
    for (const int threads : {2, 3, 7}) {
      config.threads = threads;
      const std::vector<float> many = everything(run(head, config, GetParam()));
      ASSERT_EQ(std::memcmp(one.data(), many.data(), one.size() * sizeof(float)), 0) << threads;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, EveryMode,
                         ::testing::Values(Mode::stale, Mode::consistent, Mode::matched, Mode::onepass),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(Modes, DifferWhereTheyShould) {
  Head head(512, 512, 64);
  head.gaussian(15);
  for (const cpu::TwinConfig& config : {paper(), hopper()}) {
    const double stale = residual(run(head, config, Mode::stale)),
                 consistent = residual(run(head, config, Mode::consistent));
    const double matched = residual(run(head, config, Mode::matched)),
                 onepass = residual(run(head, config, Mode::onepass));
    EXPECT_GT(stale, consistent);
    EXPECT_GT(consistent, 1000 * matched);
    EXPECT_LT(matched, 5e-7);
    EXPECT_LT(onepass, config.numerics == Numerics::paper ? 5e-7 : 1e-4);  // 13-bit accumulator
  }
}

TEST(Modes, OnepassIsExactWithAnExactAccumulator) {
  Head head(512, 512, 64);
  head.gaussian(16);
  EXPECT_LT(residual(run(head, hopper(Centre::qk, Accumulator::fp32), Mode::onepass)), 5e-7);
}

// On a row of one key O's codes are V's, so what the tensor core truncates of dP is truncated of delta as well. What is
// left of dS, measured by the sum of |dO O|: O's rounding by 1 / l, and delta's own three, each 2^-24. The truncation
// would leave 2^-14.
TEST(Modes, OnepassLeavesNothingOfRowsOfOneKey) {
  for (const int64_t dim : {64, 128, 256}) {
    Head head(200, 200, dim);
    head.gaussian(20);  // every query is eight times its own key, whose score is far above the others
    head.fill(head.q, [&](int64_t i, int64_t c) { return 8.0 * head.k[static_cast<size_t>(i * dim + c)]; });
    const HeadRun result = run(head, hopper(), Mode::onepass);
    double worst = 0;
    for (int64_t i = 0; i < head.shape.queries; ++i) {
      double size = 0;
      for (int64_t c = 0; c < dim; ++c) {
        const auto at = static_cast<size_t>(i * dim + c);
        size += std::abs(static_cast<double>(head.d_o[at]) * result.o_full[at]);
      }
      worst = std::max(worst, result.diagnostics.magnitude[static_cast<size_t>(i)] / size);
    }
    EXPECT_LT(worst, 0x1p-22) << dim;
  }
}

TEST(Modes, ConstantQueriesAreCarriedByTheBiasAlone) {
  Head head(200, 200, 64);
  head.gaussian(18);
  head.fill(head.q, [](int64_t, int64_t c) { return c % 3 ? 1.5 : -2.0; });  // q - mean is all zero
  const cpu::Reference truth = truth_of(head);
  const HeadRun result = run(head, hopper(), Mode::matched);
  // The bias is held to 2^-16 and 13 bits of the accumulator: scores are nearly exact, what is left is P and V.
  EXPECT_LT(error(result.o, truth.o), 0.06);
  EXPECT_LT(error(result.gradients.dq, truth.dq), kGaussianLimit);
}

TEST(Modes, MatchedSurvivesAForeignDelta) {
  Head head(64, 64, 64);
  head.gaussian(19);
  const cpu::TwinConfig config = hopper();
  const HeadRun own = run(head, config, Mode::matched);
  const cpu::KvHead kv = cpu::prepare_kv(head.shape, config, head.k.data(), head.v.data());
  const cpu::QueryHead query = cpu::prepare_query(head.shape, config, kv, head.q.data());
  cpu::BackwardInput in;
  in.mode = Mode::stale;  // an external delta takes the place of the mode's own
  in.d_o = head.d_o.data();
  in.o_stored = in.o_full = own.o.data();
  in.reference = own.forward.reference.data();
  in.sum = own.forward.sum.data();
  in.sum_rounded = own.forward.sum_rounded.data();
  in.delta = own.gradients.delta.data();
  const cpu::Gradients same = cpu::backward(head.shape, config, kv, query, in, {});
  double difference = 0, size = 0;
  for (size_t i = 0; i < same.dq.size(); ++i) {
    difference += std::pow(same.dq[i] - own.gradients.dq[i], 2);
    size += std::pow(own.gradients.dq[i], 2);
  }
  EXPECT_LE(difference, 1e-6 * size);  // delta' = w delta is rounded twice: a code may flip, rarely
}

TEST(Strips, LongHeadsTakeMoreThanOne) {
  // 4160 queries: a strip holds 7 of 65 key tiles. A wrong seam would lose or repeat whole tiles.
  Head head(4160, 4160, 64);
  head.gaussian(21);
  const cpu::Reference truth = truth_of(head);
  for (const cpu::TwinConfig& config : {paper(), hopper()}) {
    const HeadRun result = run(head, config, Mode::matched);
    EXPECT_LT(error(result.gradients.dq, truth.dq), kGaussianLimit);
    EXPECT_LT(error(result.gradients.dk, truth.dk), kGaussianLimit);
    EXPECT_LT(error(result.gradients.dv, truth.dv), kGaussianLimit);
    EXPECT_LT(residual(result), 5e-7);
  }
}

TEST(Reference, EqualsFiniteDifferences) {
  Head head(5, 7, 16);
  head.gaussian(20);
  const auto loss = [&] {
    const cpu::Reference r =
        cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), nullptr, 1);
    double total = 0;
    for (size_t i = 0; i < r.o.size(); ++i) total += r.o[i] * head.d_o[i];
    return total;
  };
  const cpu::Reference truth = truth_of(head);
  const auto check = [&](std::vector<float>& x, const std::vector<double>& gradient) {
    for (size_t i = 0; i < x.size(); i += 5) {
      const float kept = x[i];
      const float step = 0x1p-10f;  // exact in FP32 around BF16 values; truncation error about step^2
      x[i] = kept + step;
      const double up = loss();
      x[i] = kept - step;
      const double down = loss();
      x[i] = kept;
      EXPECT_NEAR((up - down) / (2 * step), gradient[i], 1e-5);
    }
  };
  check(head.q, truth.dq);
  check(head.k, truth.dk);
  check(head.v, truth.dv);
}

}  // namespace
}  // namespace dmattn::test
