// Hopper's backward keeps dV and dK in the tensor core over an interval of queries; exponents rise, also across
// intervals, until they are forgotten.
#include <gtest/gtest.h>

#include "heads.h"

namespace dmattn::test {
namespace {

constexpr double kGaussianLimit = 0.2;  // as in test_twin.cpp
constexpr int64_t kInterval = numerics::kFlushRows;

cpu::Reference truth_of(const Head& head) {
  return cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), head.d_o.data(), 0);
}

// Error over some keys' rows alone.
double error_of_keys(const std::vector<float>& mine, const std::vector<double>& truth, int64_t first, int64_t count) {
  const auto begin = first * 64, end = (first + count) * 64;
  return error(std::vector<float>(mine.begin() + begin, mine.begin() + end),
               std::vector<double>(truth.begin() + begin, truth.begin() + end));
}

// Channel 0 carries S alone: rows have `logit(i)` on keys 0 ... 15 and 0 on the others. V and dO are random.
Head steered(int64_t queries, int64_t keys, const std::function<double(int64_t)>& logit) {
  Head head(queries, keys, 64, false);
  head.gaussian(60);
  head.fill(head.q, [&](int64_t i, int64_t c) { return c == 0 ? logit(i) / 2 : 0.0; });
  head.fill(head.k, [](int64_t j, int64_t c) { return c == 0 && j < 16 ? 16.0 : 0.0; });
  return head;
}

// dO of some rows, times a factor for each.
void scale_rows(Head& head, const std::function<double(int64_t)>& factor) {
  for (size_t i = 0; i < head.d_o.size(); ++i) {
    const auto row = static_cast<int64_t>(i) / head.shape.dim_padded;
    head.d_o[i] = numerics::bf16_round(static_cast<float>(head.d_o[i] * factor(row)));
  }
}

class Intervals : public ::testing::TestWithParam<Accumulator> {};

TEST_P(Intervals, SumsFollowExponentsThatRise) {
  // P of the first keys rises by 2^17 over the interval, dO by 2^12: without their rescaling, early rows would weigh as
  // much as late ones.
  Head head = steered(512, 80, [](int64_t i) { return -12 + static_cast<double>(i) / 512 * 14; });
  scale_rows(head, [](int64_t i) { return std::exp2(static_cast<double>(i) / 512 * 12 - 12); });
  const cpu::Reference truth = truth_of(head);
  for (const Mode mode : kModes) {
    const HeadRun result = run(head, hopper(Centre::none, GetParam()), mode);
    EXPECT_LT(error_of_keys(result.gradients.dv, truth.dv, 0, 16), kGaussianLimit) << name(mode);
    EXPECT_LT(error_of_keys(result.gradients.dv, truth.dv, 16, 64), kGaussianLimit) << name(mode);
    EXPECT_LT(error(result.gradients.dq, truth.dq), kGaussianLimit) << name(mode);
    EXPECT_LT(error(result.gradients.dk, truth.dk), kGaussianLimit) << name(mode);
  }
}

// Rows before `loud` have a P of 1/16 on the first keys and no dO, the others 2^-26, for which the codes have no room
// beside it: dV is theirs alone.
Head quiet_after(int64_t loud, int64_t queries) {
  Head head = steered(queries, 80, [=](int64_t i) { return i < loud ? 10.0 : -14.0; });
  scale_rows(head, [=](int64_t i) { return i < loud ? 0.0 : 1.0; });
  return head;
}

TEST_P(Intervals, StartAnewWhereExponentsAreForgotten) {
  for (const int64_t interval : {1, 2}) {
    const Head head = quiet_after(interval * kInterval, (interval + 1) * kInterval);
    const HeadRun result = run(head, hopper(Centre::none, GetParam()), Mode::matched);
    EXPECT_LT(error_of_keys(result.gradients.dv, truth_of(head).dv, 0, 16), kGaussianLimit) << interval;
  }
}

TEST_P(Intervals, GoOnWithTheirExponentsElsewhere) {
  const Head head = quiet_after(3 * kInterval, 3 * kInterval + 64);
  const HeadRun result = run(head, hopper(Centre::none, GetParam()), Mode::matched);
  for (size_t i = 0; i < 16 * 64; ++i) EXPECT_EQ(result.gradients.dv[i], 0.0f);
}

TEST_P(Intervals, KeepTheirExponents) {
  const Head head = quiet_after(64, kInterval);
  const HeadRun result = run(head, hopper(Centre::none, GetParam()), Mode::matched);
  for (size_t i = 0; i < 16 * 64; ++i) EXPECT_EQ(result.gradients.dv[i], 0.0f);  // the codes' end, by the contract
  // Groups of 16 keys are on their own: the next one never had a large P.
  EXPECT_LT(error_of_keys(result.gradients.dv, truth_of(head).dv, 16, 16), kGaussianLimit);
}

TEST_P(Intervals, ScalesOfDOAndPlainQSpanThem) {
  Head head(2070, 70, 64);
  head.gaussian(61);
  for (const Centre centre : {Centre::none, Centre::k, Centre::qk}) {
    const cpu::TwinConfig config = hopper(centre, GetParam());
    const cpu::KvHead kv = cpu::prepare_kv(head.shape, config, head.k.data(), head.v.data());
    const cpu::QueryHead query = cpu::prepare_query(head.shape, config, kv, head.q.data());
    EXPECT_EQ(query.s.scale.size(), 17u);
    EXPECT_EQ(query.plain_codes().scale.size(), 3u);
  }
  EXPECT_EQ(cpu::prepare_query(head.shape, paper(), {}, head.q.data()).plain_codes().scale.size(), 17u);
}

TEST_P(Intervals, ANanOfOneTileStaysToTheirEnd) {
  // A delta from outside can be NaN in one row alone.
  Head head(1100, 70, 64, false);  // two intervals
  head.gaussian(64);
  const cpu::TwinConfig config = hopper(Centre::qk, GetParam());
  const HeadRun own = run(head, config, Mode::matched, false);
  const cpu::KvHead kv = cpu::prepare_kv(head.shape, config, head.k.data(), head.v.data());
  const cpu::QueryHead query = cpu::prepare_query(head.shape, config, kv, head.q.data());
  std::vector<float> delta = own.gradients.delta;
  delta[3] = numerics::quiet_nan();
  cpu::BackwardInput in;
  in.d_o = head.d_o.data();
  in.o_stored = in.o_full = own.o.data();
  in.reference = own.forward.reference.data();
  in.sum = own.forward.sum.data();
  in.sum_rounded = own.forward.sum_rounded.data();
  in.delta = delta.data();
  const cpu::Gradients result = cpu::backward(head.shape, config, kv, query, in, {});
  for (const float value : result.dk) EXPECT_TRUE(std::isnan(value));
  EXPECT_EQ(result.dv, own.gradients.dv);  // it has no need of delta
  for (size_t i = 0; i < result.dq.size(); ++i) EXPECT_EQ(std::isnan(result.dq[i]), i < 64 * 64) << i;
}

INSTANTIATE_TEST_SUITE_P(Accumulators, Intervals, ::testing::Values(Accumulator::tensor_core, Accumulator::fp32));

TEST(KeySums, QueryHeadsContinueEachOthersSums) {
  Head first(1100, 70, 64, false), second = first;  // two intervals
  first.gaussian(62);
  second.gaussian(63);
  second.k = first.k;
  second.v = first.v;
  for (const cpu::TwinConfig& config : {hopper(), paper()}) {
    cpu::KeySums sums;
    const HeadRun one = run(first, config, Mode::onepass, false, &sums);
    const cpu::KeySums alone = sums;
    const HeadRun two = run(second, config, Mode::onepass, false, &sums);
    cpu::finish(config.numerics, first.shape.softmax_scale, sums);
    EXPECT_EQ(alone.dv, one.gradients.dv);  // a head by itself is a group of one
    const float scale = config.numerics == Numerics::hopper ? first.shape.softmax_scale : 1.0f;
    for (size_t i = 0; i < sums.dk.size(); ++i) {
      ASSERT_EQ(alone.dk[i] * scale, one.gradients.dk[i]);
      // Each sum is rounded four times: 2^-22 of what was added up, and far less than that is left out.
      ASSERT_NEAR(sums.dk[i], one.gradients.dk[i] + two.gradients.dk[i], 1e-3);
      ASSERT_NEAR(sums.dv[i], one.gradients.dv[i] + two.gradients.dv[i], 1e-3);
    }
  }
}

}  // namespace
}  // namespace dmattn::test
