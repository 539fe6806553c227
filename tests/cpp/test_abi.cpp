// The C ABI through the shared library: layouts, variable lengths, saved statistics, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "delta_matching/delta_matching.h"

namespace {

uint16_t bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

constexpr uint16_t kPoison = 0x7fc1;  // a NaN that nothing computes

struct Tensor {
  std::vector<uint16_t> data;
  dmattn_tensor view{};
  Tensor(int64_t batch, int64_t rows, int64_t heads, int64_t dim, uint32_t seed = 0, int64_t pad = 0) {
    const int64_t head = dim + pad, row = head * heads + pad, entry = row * rows + pad;
    data.assign(static_cast<size_t>(entry * batch), kPoison);
    view = {data.data(), entry, row, head};
    if (seed == 0) return;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t c = 0; c < dim; ++c) at(b, i, h, c) = bf16(normal(random));
  }
  Tensor(const Tensor&) = delete;
  uint16_t& at(int64_t b, int64_t i, int64_t h, int64_t c) {
    return static_cast<uint16_t*>(view.data)[b * view.batch_stride + i * view.seq_stride + h * view.head_stride + c];
  }
};

struct Sizes {
  int64_t batch, q_len, k_len, q_heads, kv_heads, dim;
};

struct Call {
  dmattn_problem problem{};
  Tensor q, k, v, d_o, o, o_low, dq, dk, dv;
  std::vector<float> lse, reference, sum, delta;
  std::vector<int32_t> cu_q, cu_k;
  Sizes sizes;

  explicit Call(const Sizes& s, dmattn_mode mode = DMATTN_MATCHED, int64_t pad = 0)
      : q(s.batch, s.q_len, s.q_heads, s.dim, 1, pad),
        k(s.batch, s.k_len, s.kv_heads, s.dim, 2, pad),
        v(s.batch, s.k_len, s.kv_heads, s.dim, 3, pad),
        d_o(s.batch, s.q_len, s.q_heads, s.dim, 4, pad),
        o(s.batch, s.q_len, s.q_heads, s.dim, 0, pad),
        o_low(s.batch, s.q_len, s.q_heads, s.dim, 0, pad),
        dq(s.batch, s.q_len, s.q_heads, s.dim, 0, pad),
        dk(s.batch, s.k_len, s.kv_heads, s.dim, 0, pad),
        dv(s.batch, s.k_len, s.kv_heads, s.dim, 0, pad),
        sizes(s) {
    const auto rows = static_cast<size_t>(s.batch * s.q_len * s.q_heads);
    for (auto* x : {&lse, &reference, &delta}) x->assign(rows, 0);
    sum.assign(2 * rows, 0);
    problem.struct_size = sizeof problem;
    problem.batch = s.batch, problem.q_len = s.q_len, problem.k_len = s.k_len;
    problem.q_heads = s.q_heads, problem.kv_heads = s.kv_heads, problem.head_dim = s.dim;
    problem.softmax_scale = 1 / std::sqrt(static_cast<float>(s.dim));
    problem.causal = 1;
    problem.mode = mode;
  }
  dmattn_forward_args forward_args() {
    dmattn_forward_args a{};
    a.struct_size = sizeof a;
    a.q = q.view, a.k = k.view, a.v = v.view, a.o = o.view, a.lse = lse.data();
    a.saved = {reference.data(), sum.data(), o_low.view, nullptr, 0};
    return a;
  }
  dmattn_backward_args backward_args() {
    dmattn_backward_args a{};
    a.struct_size = sizeof a;
    a.q = q.view, a.k = k.view, a.v = v.view, a.o = o.view, a.d_o = d_o.view, a.lse = lse.data();
    a.saved = {reference.data(), sum.data(), o_low.view, nullptr, 0};
    a.delta_out = delta.data();
    a.dq = dq.view, a.dk = dk.view, a.dv = dv.view;
    return a;
  }
  void run() {
    const dmattn_forward_args f = forward_args();
    ASSERT_EQ(dmattn_forward(&problem, &f), DMATTN_OK) << dmattn_last_error();
    const dmattn_backward_args b = backward_args();
    ASSERT_EQ(dmattn_backward(&problem, &b), DMATTN_OK) << dmattn_last_error();
  }
};

// Every element of b, addressed through its strides, equals a's.
void expect_same(Tensor& a, Tensor& b, int64_t batch, int64_t rows, int64_t heads, int64_t dim) {
  for (int64_t e = 0; e < batch; ++e)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < dim; ++c) ASSERT_EQ(a.at(e, i, h, c), b.at(e, i, h, c)) << e << i << h << c;
}

double relative(Tensor& a, Tensor& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.data.size(); ++i) {
    difference += std::pow(widen(a.data[i]) - widen(b.data[i]), 2);
    size += std::pow(widen(a.data[i]), 2);
  }
  return std::sqrt(difference / size);
}

const dmattn_mode kModes[] = {DMATTN_MATCHED, DMATTN_ONEPASS, DMATTN_CONSISTENT, DMATTN_STALE};

TEST(Abi, StridesChangeNoBitAndGapsAreNotWritten) {
  const Sizes s{2, 70, 90, 4, 2, 64};
  for (const dmattn_mode mode : kModes) {
    Call dense(s, mode), padded(s, mode, 3);
    dense.run();
    padded.run();
    expect_same(dense.o, padded.o, 2, 70, 4, 64);
    expect_same(dense.dq, padded.dq, 2, 70, 4, 64);
    expect_same(dense.dk, padded.dk, 2, 90, 2, 64);
    expect_same(dense.dv, padded.dv, 2, 90, 2, 64);
    EXPECT_EQ(padded.dk.data[64], kPoison);  // the gap behind the first head
    EXPECT_EQ(padded.dk.data.back(), kPoison);
    EXPECT_EQ(dense.lse, padded.lse);
    EXPECT_EQ(dense.delta, padded.delta);
  }
}

TEST(Abi, VariableLengthsEqualSequencesOneByOne) {
  const std::vector<int32_t> cu_q{0, 5, 5, 70, 71}, cu_k{0, 9, 12, 77, 77};
  for (const dmattn_mode mode : kModes) {
    Call packed({1, 80, 90, 4, 2, 64}, mode);  // rows past 71 and 77 belong to no sequence
    for (int64_t c = 0; c < 64; ++c) packed.q.at(0, 75, 0, c) = packed.v.at(0, 80, 0, c) = kPoison;
    packed.problem.batch = 4;
    packed.problem.cu_seqlens_q = cu_q.data();
    packed.problem.cu_seqlens_k = cu_k.data();
    packed.run();
    for (size_t n = 0; n + 1 < cu_q.size(); ++n) {
      const int64_t q0 = cu_q[n], k0 = cu_k[n], rows = cu_q[n + 1] - q0, keys = cu_k[n + 1] - k0;
      Call one({1, rows, keys, 4, 2, 64}, mode);
      const auto copy = [](Tensor& to, Tensor& from, int64_t first, int64_t count, int64_t heads) {
        for (int64_t i = 0; i < count; ++i)
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t c = 0; c < 64; ++c) to.at(0, i, h, c) = from.at(0, first + i, h, c);
      };
      copy(one.q, packed.q, q0, rows, 4);
      copy(one.d_o, packed.d_o, q0, rows, 4);
      copy(one.k, packed.k, k0, keys, 2);
      copy(one.v, packed.v, k0, keys, 2);
      one.run();
      for (int64_t h = 0; h < 4; ++h)
        for (int64_t i = 0; i < rows; ++i) {
          EXPECT_EQ(one.lse[static_cast<size_t>(h * rows + i)], packed.lse[static_cast<size_t>(h * 80 + q0 + i)]);
          EXPECT_EQ(one.delta[static_cast<size_t>(h * rows + i)], packed.delta[static_cast<size_t>(h * 80 + q0 + i)]);
          for (int64_t c = 0; c < 64; ++c) {
            ASSERT_EQ(one.o.at(0, i, h, c), packed.o.at(0, q0 + i, h, c));
            ASSERT_EQ(one.dq.at(0, i, h, c), packed.dq.at(0, q0 + i, h, c));
          }
        }
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t j = 0; j < keys; ++j)
          for (int64_t c = 0; c < 64; ++c) {
            ASSERT_EQ(one.dk.at(0, j, h, c), packed.dk.at(0, k0 + j, h, c));
            ASSERT_EQ(one.dv.at(0, j, h, c), packed.dv.at(0, k0 + j, h, c));
          }
    }
    EXPECT_EQ(packed.o.at(0, 71, 0, 0), kPoison);  // padding rows are left alone
    EXPECT_EQ(packed.dk.at(0, 77, 0, 0), kPoison);
  }
}

TEST(Abi, GroupedHeadsSumTheirKeyGradients) {
  // One KV head for two query heads equals two calls with one head each, added: within BF16's rounding of each.
  Call both({1, 100, 100, 2, 1, 64});
  both.run();
  Call first({1, 100, 100, 1, 1, 64}), second({1, 100, 100, 1, 1, 64});
  for (int64_t i = 0; i < 100; ++i)
    for (int64_t c = 0; c < 64; ++c)
      for (const int64_t h : {0, 1}) {
        Call& one = h == 0 ? first : second;
        one.q.at(0, i, 0, c) = both.q.at(0, i, h, c);
        one.d_o.at(0, i, 0, c) = both.d_o.at(0, i, h, c);
        one.k.at(0, i, 0, c) = both.k.at(0, i, 0, c);
        one.v.at(0, i, 0, c) = both.v.at(0, i, 0, c);
      }
  first.run();
  second.run();
  for (int64_t i = 0; i < 100; ++i)
    for (int64_t c = 0; c < 64; ++c) {
      const float a = widen(first.dk.at(0, i, 0, c)), b = widen(second.dk.at(0, i, 0, c));
      EXPECT_NEAR(widen(both.dk.at(0, i, 0, c)), a + b, 0x1p-8f * (std::abs(a) + std::abs(b) + std::abs(a + b)));
    }
}

TEST(Abi, GradientsThatAreNotWantedAreLeftOut) {
  Call call({1, 80, 80, 2, 2, 64}), all({1, 80, 80, 2, 2, 64});
  all.run();
  const dmattn_forward_args f = call.forward_args();
  ASSERT_EQ(dmattn_forward(&call.problem, &f), DMATTN_OK);
  dmattn_backward_args b = call.backward_args();
  b.dq.data = b.dv.data = nullptr;
  ASSERT_EQ(dmattn_backward(&call.problem, &b), DMATTN_OK) << dmattn_last_error();
  EXPECT_EQ(call.dk.data, all.dk.data);
  EXPECT_EQ(call.dq.data[0], kPoison);
  EXPECT_EQ(call.dv.data[0], kPoison);
}

TEST(Abi, DeltaComesBackAndGoesInAgain) {
  for (const dmattn_mode mode : kModes) {
    Call call({1, 100, 100, 1, 1, 64}, mode);
    call.run();
    std::vector<float> alone(call.delta.size());
    dmattn_backward_args d = call.backward_args();
    d.delta_out = alone.data();
    ASSERT_EQ(dmattn_delta(&call.problem, &d), DMATTN_OK) << dmattn_last_error();
    EXPECT_EQ(alone, call.delta);
    Call again({1, 100, 100, 1, 1, 64}, mode);
    const dmattn_forward_args f = again.forward_args();
    ASSERT_EQ(dmattn_forward(&again.problem, &f), DMATTN_OK);
    dmattn_backward_args b = again.backward_args();
    b.delta = alone.data();
    ASSERT_EQ(dmattn_backward(&again.problem, &b), DMATTN_OK);
    EXPECT_LE(relative(call.dq, again.dq), 1e-3);  // delta / w and back: two roundings, few codes flip
  }
}

TEST(Abi, WithoutSavedStatisticsLseServes) {
  for (const dmattn_mode mode : kModes) {
    Call call({1, 150, 150, 2, 1, 64}, mode);
    call.run();
    Call bare({1, 150, 150, 2, 1, 64}, mode);
    const dmattn_forward_args f = bare.forward_args();
    ASSERT_EQ(dmattn_forward(&bare.problem, &f), DMATTN_OK);
    dmattn_backward_args b = bare.backward_args();
    b.saved = {};
    ASSERT_EQ(dmattn_backward(&bare.problem, &b), DMATTN_OK) << dmattn_last_error();
    // Another w rounds dO elsewhere: two draws of the same E4M3 error, 4 % each on this head.
    EXPECT_LE(relative(call.dq, bare.dq), 0.1);
    EXPECT_LE(relative(call.dv, bare.dv), 0.1);
  }
}

TEST(Abi, TheCpuKeepsNoCodes) {
  for (const dmattn_mode mode : kModes) {
    Call call({1, 100, 100, 2, 1, 64}, mode), other({1, 100, 100, 2, 1, 64}, mode);
    size_t bytes = 1;
    ASSERT_EQ(dmattn_saved_codes_size(&call.problem, &bytes), DMATTN_OK) << dmattn_last_error();
    EXPECT_EQ(bytes, 0u);
    call.run();
    void* const nowhere = reinterpret_cast<void*>(1);  // not looked at
    dmattn_forward_args f = other.forward_args();
    f.saved.codes = nowhere;
    ASSERT_EQ(dmattn_forward(&other.problem, &f), DMATTN_OK) << dmattn_last_error();
    dmattn_backward_args b = other.backward_args();
    b.saved.codes = nowhere;
    ASSERT_EQ(dmattn_backward(&other.problem, &b), DMATTN_OK) << dmattn_last_error();
    EXPECT_EQ(call.dq.data, other.dq.data);
    EXPECT_EQ(call.dk.data, other.dk.data);
    b.k.data = nullptr;  // codes or not: the twin starts from k and v
    EXPECT_EQ(dmattn_backward(&other.problem, &b), DMATTN_INVALID_VALUE);
    EXPECT_STREQ(dmattn_last_error(), "k.data: expected a pointer, got NULL");
  }
}

TEST(Abi, SavedCodesSizeRefusesByName) {
  Call call({1, 100, 100, 2, 1, 64});
  EXPECT_EQ(dmattn_saved_codes_size(&call.problem, nullptr), DMATTN_INVALID_VALUE);
  EXPECT_STREQ(dmattn_last_error(), "bytes: expected a pointer, got NULL");
  size_t bytes = 7;
  EXPECT_EQ(dmattn_saved_codes_size(nullptr, &bytes), DMATTN_INVALID_VALUE);
  EXPECT_STREQ(dmattn_last_error(), "problem: expected a pointer, got NULL");
  call.problem.head_dim = 80;
  EXPECT_EQ(dmattn_saved_codes_size(&call.problem, &bytes), DMATTN_UNSUPPORTED);
  EXPECT_NE(std::string(dmattn_last_error()).find("head_dim"), std::string::npos);
  call.problem.head_dim = 64, call.problem.struct_size = 8;
  EXPECT_EQ(dmattn_saved_codes_size(&call.problem, &bytes), DMATTN_INVALID_VALUE);
  EXPECT_NE(std::string(dmattn_last_error()).find("problem.struct_size: expected"), std::string::npos);
  EXPECT_EQ(bytes, 7u);
}

TEST(Abi, QuantiseGivesCodesScalesAndMean) {
  Call call({1, 130, 130, 1, 1, 64});
  std::vector<uint8_t> codes(130 * 64);
  std::vector<float> scale(3), mean(64);
  dmattn_quantise_args a{};
  a.struct_size = sizeof a;
  a.operand = DMATTN_OPERAND_K;
  a.x = call.k.view;
  a.codes = codes.data(), a.scale = scale.data(), a.mean = mean.data();
  ASSERT_EQ(dmattn_quantise(&call.problem, &a), DMATTN_OK) << dmattn_last_error();
  double difference = 0, size = 0;
  for (int64_t i = 0; i < 130; ++i)
    for (int64_t c = 0; c < 64; ++c) {
      const uint8_t code = codes[static_cast<size_t>(i * 64 + c)];
      const int exponent = code >> 3 & 15, fraction = code & 7;
      const double value = (code & 128 ? -1 : 1) *
                           (exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9)) *
                           scale[static_cast<size_t>(i / 64)];
      const double expected = widen(call.k.at(0, i, 0, c)) - mean[static_cast<size_t>(c)];
      EXPECT_LE(std::abs(value - expected),
                std::max(std::abs(expected) * 0x1p-4, 0x1p-10 * scale[static_cast<size_t>(i / 64)]) * 1.0001);
      difference += std::pow(value - expected, 2);
      size += expected * expected;
    }
  EXPECT_LT(std::sqrt(difference / size), 0x1p-4);
  EXPECT_GT(std::sqrt(difference / size), 0x1p-8);  // it did round
  call.k.at(0, 70, 0, 3) = kPoison;
  ASSERT_EQ(dmattn_quantise(&call.problem, &a), DMATTN_OK);
  EXPECT_TRUE(std::isnan(scale[0]));  // the mean carries a NaN to every block
  EXPECT_EQ(codes[0], 0x7f);
}

TEST(Abi, EmptyProblemsAreFine) {
  for (const Sizes& s : {Sizes{0, 5, 5, 1, 1, 64}, {1, 0, 5, 1, 1, 64}, {1, 5, 0, 1, 1, 64}, {2, 0, 0, 2, 1, 64}}) {
    Call call(s);
    call.run();
    for (const uint16_t value : call.o.data) EXPECT_EQ(value, 0);
  }
}

TEST(Abi, SequencesWithoutRowsCostNothing) {
  Call call({1, 0, 0, 1, 1, 64});
  call.problem.batch = int64_t{1} << 31;  // would be 64 GB of bookkeeping
  call.run();
}

TEST(Abi, MeanOfNoRowsIsZero) {
  Call call({3, 0, 0, 2, 1, 64});
  std::vector<float> mean(3 * 64, -1.0f);
  dmattn_quantise_args a{};
  a.struct_size = sizeof a;
  a.operand = DMATTN_OPERAND_K;
  a.mean = mean.data();
  ASSERT_EQ(dmattn_quantise(&call.problem, &a), DMATTN_OK) << dmattn_last_error();
  EXPECT_EQ(mean, std::vector<float>(3 * 64, 0.0f));
}

std::string refusal(const std::function<void(Call&, dmattn_forward_args&)>& spoil, dmattn_status expected) {
  Call call({1, 8, 8, 2, 1, 64});
  dmattn_forward_args f = call.forward_args();
  spoil(call, f);
  EXPECT_EQ(dmattn_forward(&call.problem, &f), expected) << dmattn_last_error();
  for (const uint16_t value : call.o.data) EXPECT_EQ(value, kPoison);  // nothing is written
  const std::string message = dmattn_last_error();
  EXPECT_EQ(message.find('\n'), std::string::npos);
  return message;
}

TEST(Abi, RefusalsNameTheArgument) {
  const auto has = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  has(refusal([](Call& c, auto&) { c.problem.head_dim = 96; }, DMATTN_UNSUPPORTED),
      "head_dim: expected 64, 128 or 256");
  has(refusal([](Call& c, auto&) { c.problem.q_heads = 3, c.problem.kv_heads = 2; }, DMATTN_INVALID_VALUE), "q_heads");
  has(refusal([](Call& c, auto&) { c.problem.softmax_scale = nan; }, DMATTN_INVALID_VALUE), "softmax_scale");
  has(refusal([](Call& c, auto&) { c.problem.softmax_scale = 0; }, DMATTN_INVALID_VALUE), "softmax_scale");
  has(refusal([](Call& c, auto&) { c.problem.mode = 4; }, DMATTN_INVALID_VALUE), "mode");
  has(refusal([](Call& c, auto&) { c.problem.numerics = -1; }, DMATTN_INVALID_VALUE), "numerics");
  has(refusal([](Call& c, auto&) { c.problem.causal = 2; }, DMATTN_INVALID_VALUE), "causal");
  has(refusal([](Call& c, auto&) { c.problem.batch = -1; }, DMATTN_INVALID_VALUE), "batch");
  has(refusal([](Call& c, auto&) { c.problem.q_len = INT64_MAX; }, DMATTN_INVALID_VALUE), "q_len");
  has(refusal([](Call& c, auto&) { c.problem.q_len = c.problem.batch = int64_t{1} << 30; }, DMATTN_INVALID_VALUE), "q");
#if !defined(DMATTN_HAVE_CUDA)  // a build that has it: test_abi_device.cpp
  has(refusal([](Call& c, auto&) { c.problem.device = DMATTN_CUDA; }, DMATTN_UNSUPPORTED), "device");
#endif
  has(refusal([](Call& c, auto&) { c.problem.threads = -1; }, DMATTN_INVALID_VALUE), "threads");
  has(refusal([](Call& c, auto&) { c.problem.struct_size = 8; }, DMATTN_INVALID_VALUE), "struct_size");
  has(refusal([](Call&, auto& f) { f.struct_size = 8; }, DMATTN_INVALID_VALUE), "struct_size");
  has(refusal([](Call&, auto& f) { f.k.data = nullptr; }, DMATTN_INVALID_VALUE), "k.data");
  has(refusal([](Call&, auto& f) { f.v.seq_stride = -64; }, DMATTN_INVALID_VALUE), "v.seq_stride");
  has(refusal([](Call&, auto& f) { f.q.head_stride = INT64_MAX; }, DMATTN_INVALID_VALUE), "q.head_stride");
  has(refusal([](Call&, auto& f) { f.o.seq_stride = 64; }, DMATTN_INVALID_VALUE), "o.");  // heads overlap rows
  static const int32_t fine[] = {0, 8}, falling[] = {0, -1}, beyond[] = {0, 9}, late[] = {1, 8};
  has(refusal([](Call& c, auto&) { c.problem.cu_seqlens_q = fine; }, DMATTN_INVALID_VALUE), "cu_seqlens");
  for (const int32_t* wrong : {falling, beyond, late})
    has(refusal([&](Call& c, auto&) { c.problem.cu_seqlens_q = wrong, c.problem.cu_seqlens_k = fine; },
                DMATTN_INVALID_VALUE),
        "cu_seqlens_q");
}

TEST(Abi, ThreadsCallAtTheSameTime) {
  Call reference({1, 100, 100, 2, 1, 64});
  reference.problem.threads = 1;
  reference.run();
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 4; ++i) calls.push_back(std::make_unique<Call>(Sizes{1, 100, 100, 2, 1, 64}));
  std::vector<std::thread> threads;
  for (auto& call : calls)
    threads.emplace_back([&call] {
      call->problem.threads = 1;
      call->run();
    });
  for (auto& thread : threads) thread.join();
  for (auto& call : calls) EXPECT_EQ(call->dq.data, reference.dq.data);
}

}  // namespace
