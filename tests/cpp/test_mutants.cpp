// Faults that every other fast C++ test let pass when scripts/mutate.py planted them, and what tells them apart.
#include <gtest/gtest.h>

#include <cmath>

#include "analysis/head_run.h"
#include "analysis/statistics.h"
#include "cpu/backend.h"
#include "cpu/tile_kernels.h"
#include "heads.h"
#include "numerics/bias.h"

namespace dmattn::test {
namespace {

// As in test_twin.cpp: each operand's rounding is at most 2^-4, typically 2^-5.5, and errors add in squares.
constexpr double kGaussianLimit = 0.2;

size_t at(int64_t row, int64_t dim, int64_t channel) { return static_cast<size_t>(row * dim + channel); }

// ---- Plain attention in FP64, with a mask written from its definition -----------------------------------------------

struct Plain {
  std::vector<double> o, lse, dq, dk, dv;
};

Plain plain_attention(const Head& head) {
  const auto [queries, keys, unused, dim, scale, causal] = head.shape;
  Plain out;
  out.o.assign(head.q.size(), 0.0);
  out.dq = out.o;
  out.dk.assign(head.k.size(), 0.0);
  out.dv = out.dk;
  for (int64_t i = 0; i < queries; ++i) {
    std::vector<double> p, dp;
    double sum = 0, delta = 0;
    for (int64_t j = 0; j < keys && (!causal || j - keys <= i - queries); ++j) {  // the last query sees the last key
      double score = 0, gradient = 0;
      for (int64_t c = 0; c < dim; ++c) {
        score += static_cast<double>(head.q[at(i, dim, c)]) * head.k[at(j, dim, c)];
        gradient += static_cast<double>(head.d_o[at(i, dim, c)]) * head.v[at(j, dim, c)];
      }
      p.push_back(std::exp(score * scale));
      dp.push_back(gradient);
      sum += p.back();
    }
    out.lse.push_back(std::log(sum));
    for (size_t j = 0; j < p.size(); ++j) {
      p[j] /= sum;
      delta += p[j] * dp[j];
    }
    for (size_t j = 0; j < p.size(); ++j)
      for (int64_t c = 0; c < dim; ++c) {
        const size_t key = at(static_cast<int64_t>(j), dim, c), query = at(i, dim, c);
        const double ds = p[j] * (dp[j] - delta) * scale;
        out.o[query] += p[j] * head.v[key];
        out.dq[query] += ds * head.k[key];
        out.dk[key] += ds * head.q[query];
        out.dv[key] += p[j] * head.d_o[query];
      }
  }
  return out;
}

TEST(Mutants, ReferenceEqualsPlainAttentionAcrossTilesAndUnderTheMask) {
  for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{130, 130}, {130, 200}, {70, 70}})
    for (const bool causal : {true, false}) {
      Head head(queries, keys, 16, causal);
      head.gaussian(31);
      for (int64_t j = 0; j < keys; ++j) head.k[at(j, 16, 0)] = static_cast<float>(j) / 64;  // maxima rise over tiles
      const Plain truth = plain_attention(head);
      const cpu::Reference mine =
          cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), head.d_o.data(), 0);
      // FP64: 200 terms of a sum at 2^-53 each, once per product in the chain; exp doubles nothing at scores below 10.
      EXPECT_LT(error(mine.o, truth.o), 1e-12);
      EXPECT_LT(error(mine.dq, truth.dq), 1e-12);
      EXPECT_LT(error(mine.dk, truth.dk), 1e-12);
      EXPECT_LT(error(mine.dv, truth.dv), 1e-12);
      for (size_t i = 0; i < truth.lse.size(); ++i) EXPECT_NEAR(mine.lse[i], truth.lse[i], 1e-12);
    }
}

// ---- The tensor core ------------------------------------------------------------------------------------------------

TEST(Mutants, AZeroOperandHasNoExponent) {
  // 0 x 448 would raise the step's exponent to 2 and its unit to 2^-11, which 2^-18 falls below.
  std::vector<float> a(32, 0.0f), b(32 * 16, 0.0f), c(16);
  a[1] = 0x1p-9f;
  for (size_t j = 0; j < 16; ++j) {
    b[j] = 448.0f;
    b[16 + j] = 0x1p-9f;
  }
  for (const cpu::TileKernels& kernels : cpu::all_tile_kernels()) {
    kernels.product_tensor_core(1, 16, 32, a.data(), 32, b.data(), 16, c.data(), 16, false);
    for (const float value : c) EXPECT_EQ(value, 0x1p-18f) << kernels.name;
    std::vector<float> left(32 * 16, 0.0f), right(32 * 16, 0.0f);  // the same with the zero on the right
    left[0] = 448.0f;
    left[1] = 0x1p-9f;
    for (size_t j = 0; j < 16; ++j) right[16 + j] = 0x1p-9f;
    kernels.product_tensor_core(1, 16, 32, left.data(), 32, right.data(), 16, c.data(), 16, false);
    for (const float value : c) EXPECT_EQ(value, 0x1p-18f) << kernels.name;
  }
}

// ---- Centring -------------------------------------------------------------------------------------------------------

TEST(Mutants, MeansAreThoseOfTheRows) {
  Random random(32);
  for (const int64_t rows : {1, 63, 64, 65, 200}) {
    std::vector<float> x(static_cast<size_t>(rows * 16));
    for (float& value : x) value = static_cast<float>(random.normal() + 3);
    const std::vector<float> mean = cpu::channel_mean(x.data(), rows, 16);
    for (int64_t c = 0; c < 16; ++c) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < rows; ++i) {
        sum += x[at(i, 16, c)];
        magnitude += std::abs(x[at(i, 16, c)]);
      }
      const auto count = static_cast<double>(rows);  // a term passes 64 + 4 additions and a division
      EXPECT_NEAR(mean[static_cast<size_t>(c)], sum / count, 69 * 0x1p-24 * magnitude / count) << rows;
    }
  }
}

TEST(Mutants, BiasesAreTheContractsBitForBit) {
  Head head(200, 70, 64);
  head.gaussian(38);
  const cpu::TwinConfig config = hopper();
  const cpu::KvHead kv = cpu::prepare_kv(head.shape, config, head.k.data(), head.v.data());
  const cpu::QueryHead query = cpu::prepare_query(head.shape, config, kv, head.q.data());
  for (int64_t block = 0; block < 2; ++block) {
    const int64_t first = block * 128, rows = std::min<int64_t>(128, 200 - first);
    const std::vector<float> mean = cpu::channel_mean(head.q.data() + first * 64, rows, 64);
    for (int64_t j = 0; j < 70; ++j) {
      float dot = 0;
      for (int64_t c = 0; c < 64; ++c) {
        const auto channel = static_cast<size_t>(c);
        dot = std::fma(numerics::bf16_round(mean[channel]), head.k[at(j, 64, c)] - kv.k_mean[channel], dot);
      }
      EXPECT_EQ(query.bias_dots[static_cast<size_t>(block * 128 + j)], dot);  // rows of keys rounded up to 128
    }
  }
}

TEST(Mutants, TheRaggedLastBlockIsCentredLikeTheRest) {
  Head head(80, 80, 64, false);
  head.gaussian(33);
  for (float& value : head.k) value = numerics::bf16_round(value + 4);  // a key left out is off by 4 <q, 1> / 8
  const cpu::Reference truth =
      cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), nullptr, 0);
  for (const cpu::TwinConfig& config : {paper(), hopper(Centre::k), hopper()})
    EXPECT_LT(error(run(head, config, Mode::matched).o, truth.o), kGaussianLimit);
}

// lse of query i over all keys, and the largest |score| once K's mean is gone: what the bias step has to carry.
struct Scores {
  double lse = 0, largest = 0;
};

Scores scores_of(const Head& head, int64_t i) {
  const int64_t dim = head.shape.dim_padded, keys = head.shape.keys;
  std::vector<double> score(static_cast<size_t>(keys), 0.0);
  double mean = 0, sum = 0;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = 0; c < dim; ++c)
      score[static_cast<size_t>(j)] +=
          static_cast<double>(head.q[at(i, dim, c)]) * head.k[at(j, dim, c)] * head.shape.softmax_scale;
    mean += score[static_cast<size_t>(j)] / static_cast<double>(keys);
  }
  Scores out;
  for (const double value : score) {
    sum += std::exp(value);
    out.largest = std::max(out.largest, std::abs(value - mean));
  }
  out.lse = std::log(sum);
  return out;
}

// Constant queries leave the codes of q - mu zero: scores are the bias step alone. Each of its 16 products and the
// result is cut by less than 2^-13 of the largest product, which is at most (1 + 2^-4) of the bias; exp2, sums and the
// K mean add less than 1e-5.
double bias_limit(const Scores& scores) { return 17 * 0x1p-13 * (1 + 0x1p-4) * scores.largest + 1e-5; }

TEST(Mutants, TheBiasReachesEveryKeyTile) {
  Head head(64, 80, 64, false);
  head.gaussian(34);
  head.fill(head.q, [](int64_t, int64_t) { return 1.0; });
  for (int64_t j = 64; j < 80; ++j)  // the ragged tile's logits are 2 above the rest
    for (int64_t c = 0; c < 64; ++c) head.k[at(j, 64, c)] = numerics::bf16_round(head.k[at(j, 64, c)] + 0.25f);
  const HeadRun result = run(head, hopper(), Mode::matched, false);
  const Scores truth = scores_of(head, 0);
  ASSERT_LT(bias_limit(truth), 0.05);
  for (const float lse : result.forward.lse) EXPECT_NEAR(lse, truth.lse, bias_limit(truth));
}

TEST(Mutants, Above8192QueriesEachRowTakesItsOwnBlocksBias) {
  Head head(8448, 64, 64, false);  // means run over 256 rows
  head.gaussian(35);
  head.fill(head.q, [](int64_t i, int64_t c) { return (i / 256 % 2 ? 1.0 : -1.0) * (c % 3 ? 1.0 : 0.5); });
  const cpu::TwinConfig config = hopper();
  const cpu::KvHead kv = cpu::prepare_kv(head.shape, config, head.k.data(), head.v.data());
  const cpu::QueryHead query = cpu::prepare_query(head.shape, config, kv, head.q.data());
  ASSERT_EQ(query.bias_rows, 256);
  const cpu::Forward result = cpu::forward(head.shape, config, kv, query, head.q.data(), Mode::matched);
  const Scores even = scores_of(head, 0), odd = scores_of(head, 256);
  ASSERT_GT(std::abs(even.lse - odd.lse), 10 * bias_limit(even));
  for (int64_t i = 0; i < head.shape.queries; ++i) {
    const Scores& truth = i / 256 % 2 ? odd : even;
    ASSERT_NEAR(result.lse[static_cast<size_t>(i)], truth.lse, bias_limit(truth)) << i;
  }
}

TEST(Mutants, ALargeMeanOfQKeepsWhatIsBesideIt) {
  Head head(128, 128, 64, false);
  head.gaussian(36);
  for (int64_t i = 0; i < 128; ++i) {
    head.q[at(i, 64, 0)] = 256;  // the mean of the block, exactly; its bias of 256 units of k is above the capacity
    head.k[at(i, 64, 0)] = i % 2 ? 1.0f : -1.0f;
  }
  const cpu::TwinConfig config = hopper();
  const cpu::KvHead kv = cpu::prepare_kv(head.shape, config, head.k.data(), head.v.data());
  const cpu::QueryHead query = cpu::prepare_query(head.shape, config, kv, head.q.data());
  // |q - mu| and |k| stay below 5: without the guard, q_scale k_scale is at most (5 / 448)^2.
  ASSERT_GT(256 / (5.0 / 448 * 5.0 / 448), numerics::kBiasCapacity);
  ASSERT_GE(query.s.scale[0] * kv.k.scale[0] * numerics::kBiasCapacity, 256 * (1 - 0x1p-20));
  const cpu::Reference truth =
      cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), head.d_o.data(), 0);
  const HeadRun result = run(head, config, Mode::matched);
  EXPECT_LT(error(result.o, truth.o), kGaussianLimit);
  EXPECT_LT(error(result.gradients.dq, truth.dq), kGaussianLimit);
  EXPECT_LT(error(result.gradients.dk, truth.dk), kGaussianLimit);  // of plain q: channel 0 is all mean
}

// ---- Sums of the backward -------------------------------------------------------------------------------------------

// Every row has one P of 1 and 63 of 0.529, whose code is 128 / 256: hopper's rounded sum is 5 % below the unrounded
// one, paper's (0.529 as 240 / 448) 1 % above. V and dO are 1, and so are their codes.
Head skewed() {
  Head head(64, 64, 64, false);
  head.fill(head.q, [](int64_t, int64_t c) { return c == 0 ? 8.0 : 0.0; });
  head.fill(head.k, [](int64_t j, int64_t c) { return c == 0 && j > 0 ? -0.63671875 : 0.0; });
  head.fill(head.v, [](int64_t, int64_t) { return 1.0; });
  head.fill(head.d_o, [](int64_t, int64_t) { return 1.0; });
  return head;
}

// Sums over 64 such rows or keys: w, scales and FP32 sums round by 2^-24, at most 64 + 8 times.
constexpr double kSumLimit = 72 * 0x1p-24;

TEST(Mutants, CodesThatDvMultipliesSumToOne) {
  const Head head = skewed();
  const cpu::TwinConfig config = hopper(Centre::none, Accumulator::fp32);
  for (const Mode mode : kModes) {
    const HeadRun result = run(head, config, mode);
    ASSERT_LT(result.forward.sum_rounded[0], 0.96f * result.forward.sum[0]);
    for (int64_t c = 0; c < 64; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < 64; ++j) sum += result.gradients.dv[at(j, 64, c)];
      EXPECT_NEAR(sum, 64.0, 64 * kSumLimit) << name(mode);  // sum_j dV_j = sum_i dO_i
    }
  }
}

// One head's backward with delta = 0 from outside: dS = P dP.
cpu::Gradients without_delta(const Head& head, const cpu::TwinConfig& config, Mode mode,
                             cpu::Diagnostics& diagnostics) {
  const HeadRun own = run(head, config, mode, false);
  const cpu::KvHead kv = cpu::prepare_kv(head.shape, config, head.k.data(), head.v.data());
  const cpu::QueryHead query = cpu::prepare_query(head.shape, config, kv, head.q.data());
  const std::vector<float> zero(static_cast<size_t>(head.shape.queries), 0.0f);
  cpu::BackwardInput in;
  in.mode = mode;
  in.d_o = head.d_o.data();
  in.o_stored = own.o.data();
  in.o_full = own.o_full.data();
  in.reference = own.forward.reference.data();
  in.sum = own.forward.sum.data();
  in.sum_rounded = own.forward.sum_rounded.data();
  in.delta = zero.data();
  return cpu::backward(head.shape, config, kv, query, in, {}, &diagnostics);
}

TEST(Mutants, ProbabilitiesOfDsSumToOne) {
  // A row's sum of dS vanishes whatever P is divided by, as long as delta agrees; its size tells.
  const Head head = skewed();
  for (const cpu::TwinConfig& config : {paper(Centre::none), hopper(Centre::none, Accumulator::fp32)})
    for (const Mode mode : kModes) {
      cpu::Diagnostics diagnostics;
      without_delta(head, config, mode, diagnostics);
      for (const double sum : diagnostics.sum) EXPECT_NEAR(sum, 64.0, 64 * kSumLimit) << name(mode);  // dP is 64
    }
}

TEST(Mutants, ColumnSumsAreThoseOfDk) {
  // V, dO and q positive make every dS and dK positive: nothing cancels.
  Head head(100, 100, 64);
  head.gaussian(37);
  for (auto* x : {&head.v, &head.d_o})
    for (float& value : *x) value = std::abs(value);
  head.fill(head.q, [](int64_t, int64_t) { return 1.0; });
  for (const cpu::TwinConfig& config : {paper(), hopper(Centre::qk, Accumulator::fp32)}) {
    cpu::Diagnostics diagnostics;
    const cpu::Gradients result = without_delta(head, config, Mode::matched, diagnostics);
    double total = 0;
    for (int64_t c = 0; c < 64; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < 100; ++j) sum += result.dk[at(j, 64, c)];
      // dK is of cast dS: 2^-4 of an element, and below the normal codes 2^-10 of a unit, at most 4 units a tile whose
      // largest element is 128 units or more.
      EXPECT_NEAR(diagnostics.column[static_cast<size_t>(c)], sum, (0x1p-4 + 0x1p-5) * sum);
      EXPECT_NEAR(diagnostics.column_after_cast[static_cast<size_t>(c)], sum, 400 * 0x1p-24 * sum);  // FP32 sums
      total += diagnostics.column[static_cast<size_t>(c)];
    }
    EXPECT_NEAR(diagnostics.dk_magnitude, total, 200 * 0x1p-24 * total);  // FP32 sums over at most 200 roundings
    double before = 0, after = 0;
    for (size_t i = 0; i < 100; ++i) {
      before += diagnostics.magnitude[i];
      after += diagnostics.cast_magnitude[i];
    }
    EXPECT_NEAR(after, before, (0x1p-4 + 0x1p-5) * before);
  }
}

}  // namespace
}  // namespace dmattn::test
