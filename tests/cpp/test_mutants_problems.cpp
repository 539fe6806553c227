// Whole problems and reports, where scripts/mutate.py found tests blind: heads of the backend are heads of the twin.
#include <gtest/gtest.h>

#include <cmath>

#include "analysis/head_run.h"
#include "analysis/statistics.h"
#include "cpu/backend.h"
#include "heads.h"

namespace dmattn::test {
namespace {

size_t at(int64_t row, int64_t dim, int64_t channel) { return static_cast<size_t>(row * dim + channel); }

// ---- Whole problems: heads of the backend are heads of the twin -----------------------------------------------------

struct Grouped {  // 4 query heads on 2 KV heads, two intervals of queries
  static constexpr int64_t kTokens = 560, kDim = 64, kHeads = 4, kKvHeads = 2, kGroup = kHeads / kKvHeads;
  std::vector<Head> heads;
  std::vector<uint16_t> q = side(kHeads), d_o = q, o = q, low = q, dq = q, k = side(kKvHeads), v = k, dk = k, dv = k;
  std::vector<float> lse = std::vector<float>(kTokens * kHeads), reference = lse, delta = lse,
                     sum = std::vector<float>(2 * kTokens * kHeads);
  Problem problem;

  explicit Grouped(Mode mode, dmattn_mode abi_mode) {
    dmattn_problem raw{};
    raw.struct_size = sizeof raw;
    raw.batch = 1;
    raw.q_heads = kHeads;
    raw.kv_heads = kKvHeads;
    raw.q_len = raw.k_len = kTokens;
    raw.head_dim = kDim;
    raw.softmax_scale = 0.1f;  // no power of two: what is multiplied first shows
    raw.causal = 1;
    raw.mode = abi_mode;
    problem = check_problem(&raw);
    EXPECT_EQ(problem.mode, mode);
    for (int64_t head = 0; head < kHeads; ++head) {
      heads.emplace_back(kTokens, kTokens, kDim);
      Head& one = heads.back().gaussian(static_cast<uint64_t>(40 + head));
      one.shape.softmax_scale = raw.softmax_scale;
      for (float& value : one.k) value = numerics::bf16_round(value + 1);  // a mean that lse has to hold
      if (head % kGroup != 0) {
        one.k = heads[static_cast<size_t>(head - 1)].k;
        one.v = heads[static_cast<size_t>(head - 1)].v;
      }
      put(one.q, q, head, kHeads);
      put(one.d_o, d_o, head, kHeads);
      put(one.k, k, head / kGroup, kKvHeads);
      put(one.v, v, head / kGroup, kKvHeads);
    }
  }

  static std::vector<uint16_t> side(int64_t count) { return std::vector<uint16_t>(kTokens * kDim * count); }
  static size_t place(int64_t row, int64_t count, int64_t head, int64_t c) {
    return static_cast<size_t>((row * count + head) * kDim + c);
  }
  static void put(const std::vector<float>& x, std::vector<uint16_t>& out, int64_t head, int64_t count) {
    for (int64_t i = 0; i < kTokens; ++i)
      for (int64_t c = 0; c < kDim; ++c) out[place(i, count, head, c)] = numerics::bf16_encode(x[at(i, kDim, c)]);
  }
  static dmattn_tensor tensor(std::vector<uint16_t>& x, int64_t count) {
    return {x.data(), kTokens * kDim * count, kDim * count, kDim};
  }

  void forward() {
    dmattn_forward_args args{};
    args.q = tensor(q, kHeads);
    args.k = tensor(k, kKvHeads);
    args.v = tensor(v, kKvHeads);
    args.o = tensor(o, kHeads);
    args.lse = lse.data();
    args.saved = {reference.data(), sum.data(), tensor(low, kHeads), nullptr, 0};
    cpu::forward(problem, args);
  }
  void backward(bool saved) {
    dmattn_backward_args args{};
    args.q = tensor(q, kHeads);
    args.k = tensor(k, kKvHeads);
    args.v = tensor(v, kKvHeads);
    args.o = tensor(o, kHeads);
    args.d_o = tensor(d_o, kHeads);
    args.lse = lse.data();
    if (saved) args.saved = {reference.data(), sum.data(), tensor(low, kHeads), nullptr, 0};
    args.delta_out = delta.data();
    args.dq = tensor(dq, kHeads);
    args.dk = tensor(dk, kKvHeads);
    args.dv = tensor(dv, kKvHeads);
    cpu::backward(problem, args);
  }
};

TEST(MutantProblems, GroupedHeadsAreTheTwinsHeadsBitForBit) {
  for (const auto& [mode, abi_mode] : {std::pair{Mode::matched, DMATTN_MATCHED}, {Mode::onepass, DMATTN_ONEPASS}}) {
    Grouped all(mode, abi_mode);
    all.forward();
    all.backward(true);
    for (int64_t kv_head = 0; kv_head < Grouped::kKvHeads; ++kv_head) {
      cpu::KeySums sums;
      for (int64_t head = kv_head * Grouped::kGroup; head < (kv_head + 1) * Grouped::kGroup; ++head) {
        const HeadRun one = run(all.heads[static_cast<size_t>(head)], hopper(), mode, false, &sums);
        for (int64_t i = 0; i < Grouped::kTokens; ++i) {
          const auto row = static_cast<size_t>(head * Grouped::kTokens + i);
          ASSERT_EQ(all.delta[row], one.gradients.delta[static_cast<size_t>(i)]) << name(mode);
          for (int64_t c = 0; c < Grouped::kDim; ++c) {
            const size_t mine = at(i, Grouped::kDim, c), theirs = Grouped::place(i, Grouped::kHeads, head, c);
            ASSERT_EQ(all.o[theirs], numerics::bf16_encode(one.o[mine]));
            ASSERT_EQ(all.dq[theirs], numerics::bf16_encode(one.gradients.dq[mine]));
          }
        }
      }
      cpu::finish(Numerics::hopper, all.problem.softmax_scale, sums);
      for (int64_t j = 0; j < Grouped::kTokens; ++j)
        for (int64_t c = 0; c < Grouped::kDim; ++c) {
          const size_t mine = at(j, Grouped::kDim, c), theirs = Grouped::place(j, Grouped::kKvHeads, kv_head, c);
          ASSERT_EQ(all.dk[theirs], numerics::bf16_encode(sums.dk[mine]));
          ASSERT_EQ(all.dv[theirs], numerics::bf16_encode(sums.dv[mine]));
        }
    }
  }
}

TEST(MutantProblems, ABackwardFromLseHasTheSavedOnesDq) {
  Grouped all(Mode::matched, DMATTN_MATCHED);
  all.forward();
  all.backward(true);
  const std::vector<uint16_t> saved = all.dq;
  all.backward(false);
  // The sums agree to about 2^-20, so codes flip where a value lies that close to a midpoint. One code in a hundred
  // flipped by its step of 2^-3 would be 0.0125 of the whole.
  double difference = 0, size = 0;
  for (size_t i = 0; i < saved.size(); ++i) {
    difference += std::pow(numerics::bf16_decode(saved[i]) - numerics::bf16_decode(all.dq[i]), 2);
    size += std::pow(numerics::bf16_decode(saved[i]), 2);
  }
  EXPECT_LE(std::sqrt(difference / size), 0.0125);
}

TEST(MutantProblems, SequencesOfVariableLengthStartAtTheirOwnRows) {
  const int32_t first_query[] = {0, 30, 80}, first_key[] = {0, 50, 130};
  dmattn_problem raw{};
  raw.struct_size = sizeof raw;
  raw.batch = 2;
  raw.q_heads = raw.kv_heads = 1;
  raw.q_len = 80;
  raw.k_len = 130;
  raw.head_dim = 64;
  raw.softmax_scale = 0.125f;
  raw.causal = 1;
  raw.cu_seqlens_q = first_query;
  raw.cu_seqlens_k = first_key;
  std::vector<uint16_t> q, k, v, o(80 * 64);
  std::vector<Head> heads;
  for (uint64_t s = 0; s < 2; ++s) {
    heads.emplace_back(first_query[s + 1] - first_query[s], first_key[s + 1] - first_key[s], 64);
    const Head& one = heads.back().gaussian(50 + s);
    for (const auto& [from, to] : {std::pair{&one.q, &q}, {&one.k, &k}, {&one.v, &v}})
      for (const float value : *from) to->push_back(numerics::bf16_encode(value));
  }
  std::vector<float> lse(80);
  dmattn_forward_args args{};
  args.q = {q.data(), 0, 64, 64};
  args.k = {k.data(), 0, 64, 64};
  args.v = {v.data(), 0, 64, 64};
  args.o = {o.data(), 0, 64, 64};
  args.lse = lse.data();
  cpu::forward(check_problem(&raw), args);
  for (size_t s = 0; s < 2; ++s) {
    const HeadRun one = run(heads[s], hopper(), Mode::matched, false);
    for (size_t i = 0; i < one.forward.lse.size(); ++i) {
      const size_t row = static_cast<size_t>(first_query[s]) + i;
      ASSERT_EQ(lse[row], one.forward.lse[i]);
      for (size_t c = 0; c < 64; ++c) ASSERT_EQ(o[row * 64 + c], numerics::bf16_encode(one.o[i * 64 + c]));
    }
  }
}

// ---- Reports --------------------------------------------------------------------------------------------------------

TEST(MutantProblems, QueryHeadsShareKvHeadsInRuns) {
  Layer layer;
  layer.batch = 2;
  layer.q_tokens = layer.k_tokens = 3;
  layer.q_heads = 4;
  layer.kv_heads = 2;
  for (int batch = 0; batch < 2; ++batch)
    for (int token = 0; token < 3; ++token) {
      for (int head = 0; head < 4; ++head) layer.q.push_back(static_cast<float>(100 * batch + 10 * token + head));
      for (int head = 0; head < 2; ++head) layer.k.push_back(static_cast<float>(100 * batch + 10 * token + head));
    }
  layer.d_o = layer.q;
  layer.v = layer.k;
  for (int batch = 0; batch < 2; ++batch)
    for (int head = 0; head < 4; ++head) {
      const HeadInputs inputs = head_inputs(layer, batch, head);
      for (int token = 0; token < 3; ++token) {
        const size_t first = at(token, inputs.shape.dim_padded, 0);
        EXPECT_EQ(inputs.q[first], static_cast<float>(100 * batch + 10 * token + head));
        EXPECT_EQ(inputs.k[first], static_cast<float>(100 * batch + 10 * token + head / 2));
        EXPECT_EQ(inputs.v[first], inputs.k[first]);
        EXPECT_EQ(inputs.d_o[first], inputs.q[first]);
      }
    }
}

TEST(MutantProblems, QuantilesInterpolateBetweenOrderStatistics) {
  EXPECT_EQ(quantile({4, 1, 3, 2}, 0.5), 2.5);
  EXPECT_EQ(quantile({3, 1, 2}, 0.5), 2.0);
  EXPECT_EQ(quantile({8, 0}, 0.75), 6.0);
  EXPECT_EQ(quantile({5}, 0.95), 5.0);
  EXPECT_EQ(quantile({5, 9}, 1.0), 9.0);
  EXPECT_TRUE(std::isnan(quantile({}, 0.5)));
  const Statistic all = statistic({1, 2, 3, 4, 5});
  EXPECT_EQ(all.median, 3.0);
  EXPECT_DOUBLE_EQ(all.p95, 4.8);
  EXPECT_EQ(all.max, 5.0);
}

}  // namespace
}  // namespace dmattn::test
