// The C++ header: its defaults, its exceptions, and that its calls are the C ABI's.
#include "delta_matching/delta_matching.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace {

using namespace delta_matching;

constexpr int64_t kTokens = 80, kHeads = 4, kKvHeads = 2, kDim = 64;

std::vector<uint16_t> random_bf16(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) {  // in (-2, 2): the sum of two uniforms, minus 2
    const float x =
        static_cast<float>(generator() >> 8) * 0x1p-23f + static_cast<float>(generator() >> 8) * 0x1p-23f - 2;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    value = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}

struct Layer {
  std::vector<uint16_t> q = random_bf16(kTokens * kHeads * kDim, 1), k = random_bf16(kTokens * kKvHeads * kDim, 2),
                        v = random_bf16(kTokens * kKvHeads * kDim, 3), d_o = random_bf16(kTokens * kHeads * kDim, 4);
  std::vector<uint16_t> o = std::vector<uint16_t>(q.size()), dq = o, dk = std::vector<uint16_t>(k.size()), dv = dk;
  Problem problem{1, kHeads, kKvHeads, kTokens, kTokens, kDim};
  std::vector<float> lse = std::vector<float>(problem.rows());

  ForwardArgs forward_args() {
    ForwardArgs args;
    args.q = contiguous(q.data(), kTokens, kHeads, kDim);
    args.k = contiguous(k.data(), kTokens, kKvHeads, kDim);
    args.v = contiguous(v.data(), kTokens, kKvHeads, kDim);
    args.o = contiguous(o.data(), kTokens, kHeads, kDim);
    args.lse = lse.data();
    return args;
  }

  BackwardArgs backward_args(const Saved& saved) {
    BackwardArgs args;
    const ForwardArgs inputs = forward_args();
    args.q = inputs.q;
    args.k = inputs.k;
    args.v = inputs.v;
    args.o = inputs.o;
    args.d_o = contiguous(d_o.data(), kTokens, kHeads, kDim);
    args.saved = saved.raw();
    args.dq = contiguous(dq.data(), kTokens, kHeads, kDim);
    args.dk = contiguous(dk.data(), kTokens, kKvHeads, kDim);
    args.dv = contiguous(dv.data(), kTokens, kKvHeads, kDim);
    return args;
  }
};

// Calls fn and returns what it threw.
template <typename Fn>
Error thrown(Fn&& fn) {
  try {
    fn();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {Status::ok, ""};
}

TEST(Hpp, ProblemHasTheDocumentedDefaults) {
  const Problem problem(2, 8, 2, 100, 200, 64);
  const dmattn_problem& raw = problem.raw();
  EXPECT_EQ(raw.struct_size, sizeof(dmattn_problem));
  EXPECT_EQ(raw.softmax_scale, 0.125f);
  EXPECT_EQ(raw.causal, 1);
  EXPECT_EQ(raw.mode, DMATTN_MATCHED);
  EXPECT_EQ(raw.numerics, DMATTN_HOPPER);
  EXPECT_EQ(raw.centre, DMATTN_CENTRE_DEFAULT);
  EXPECT_EQ(raw.device, DMATTN_CPU);
  EXPECT_EQ(raw.threads, 0);
  EXPECT_EQ(problem.rows(), 2u * 8u * 100u);
}

TEST(Hpp, SettersReachTheCStruct) {
  const int32_t offsets[] = {0, 100};
  Problem problem(1, 8, 2, 100, 200, 96);
  problem.mode(Mode::stale).numerics(Numerics::paper).centre(Centre::none).accumulator(Accumulator::fp32);
  problem.softmax_scale(0.5f).causal(false).threads(3).variable_lengths(offsets, offsets);
  const dmattn_problem& raw = problem.raw();
  EXPECT_EQ(raw.mode, DMATTN_STALE);
  EXPECT_EQ(raw.numerics, DMATTN_PAPER);
  EXPECT_EQ(raw.centre, DMATTN_CENTRE_NONE);
  EXPECT_EQ(raw.accumulator, DMATTN_ACCUMULATOR_FP32);
  EXPECT_EQ(raw.softmax_scale, 0.5f);
  EXPECT_EQ(raw.causal, 0);
  EXPECT_EQ(raw.threads, 3);
  EXPECT_EQ(raw.cu_seqlens_q, offsets);
  EXPECT_EQ(problem.cuda(1, nullptr).raw().device, DMATTN_CUDA);
}

TEST(Hpp, VersionsAreTheLibrarys) {
  EXPECT_EQ(version(), dmattn_version());
  EXPECT_EQ(numerics_version(), dmattn_numerics_version());
  EXPECT_TRUE(available(Device::cpu));
}

TEST(Hpp, ForwardAndBackwardRunInEveryMode) {
  for (const Mode mode : {Mode::matched, Mode::onepass, Mode::consistent, Mode::stale}) {
    Layer layer;
    layer.problem.mode(mode);
    const Saved saved(layer.problem);
    EXPECT_EQ(saved.raw().o_low.data != nullptr, mode == Mode::onepass);
    ForwardArgs args = layer.forward_args();
    args.saved = saved.raw();
    forward(layer.problem, args);

    BackwardArgs back = layer.backward_args(saved);
    std::vector<float> used(layer.problem.rows()), alone(used);
    back.delta_out = used.data();
    backward(layer.problem, back);
    EXPECT_NE(layer.dq, std::vector<uint16_t>(layer.dq.size()));
    EXPECT_NE(layer.dk, std::vector<uint16_t>(layer.dk.size()));
    EXPECT_NE(layer.dv, std::vector<uint16_t>(layer.dv.size()));
    back.delta_out = alone.data();
    delta(layer.problem, back);
    EXPECT_EQ(used, alone);
  }
}

TEST(Hpp, SavedCodesSizeIsTheAbis) {
  EXPECT_EQ(saved_codes_size(Layer().problem), 0u);  // the CPU keeps none
  const Error dim = thrown([] { saved_codes_size(Problem(1, 1, 1, 8, 8, 63)); });
  EXPECT_EQ(dim.status(), Status::unsupported);
}

TEST(Hpp, SavedMayBeMoved) {
  Layer layer;
  layer.problem.mode(Mode::onepass);
  Saved first(layer.problem);
  const dmattn_saved before = first.raw();
  const Saved second(std::move(first));
  EXPECT_EQ(second.raw().sum, before.sum);
  EXPECT_EQ(second.raw().o_low.data, before.o_low.data);
}

TEST(Hpp, QuantiseFillsCodesAndScales) {
  Layer layer;
  std::vector<uint8_t> codes(layer.k.size());
  std::vector<float> scale(kKvHeads * 2), mean(kKvHeads * kDim);
  QuantiseArgs args;
  args.operand = static_cast<int32_t>(Operand::k);
  args.x = contiguous(layer.k.data(), kTokens, kKvHeads, kDim);
  args.codes = codes.data();
  args.scale = scale.data();
  args.mean = mean.data();
  quantise(layer.problem, args);
  for (const float s : scale) EXPECT_GT(s, 0.0f);
  EXPECT_NE(codes, std::vector<uint8_t>(codes.size()));
}

TEST(Hpp, ReferenceIsCloseToForward) {
  Layer layer;
  forward(layer.problem, layer.forward_args());
  std::vector<double> lse(layer.lse.size());
  ReferenceArgs args;
  args.q = contiguous(layer.q.data(), kTokens, kHeads, kDim);
  args.k = contiguous(layer.k.data(), kTokens, kKvHeads, kDim);
  args.v = contiguous(layer.v.data(), kTokens, kKvHeads, kDim);
  args.lse = lse.data();
  reference(layer.problem, args);
  for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(layer.lse[i], lse[i], 0.1) << i;
}

TEST(Hpp, ProbeReturnsTheDocument) {
  Layer layer;
  ProbeArgs args;
  args.q = contiguous(layer.q.data(), kTokens, kHeads, kDim);
  args.k = contiguous(layer.k.data(), kTokens, kKvHeads, kDim);
  args.v = contiguous(layer.v.data(), kTokens, kKvHeads, kDim);
  args.d_o = contiguous(layer.d_o.data(), kTokens, kHeads, kDim);
  args.modes = 1u << DMATTN_MATCHED;
  const std::string json = probe(layer.problem, args);
  EXPECT_NE(json.find("dmattn.probe/1"), std::string::npos);
  EXPECT_NE(json.find("\"matched\""), std::string::npos);
  EXPECT_EQ(json.find("\"stale\""), std::string::npos);
}

TEST(Hpp, ErrorsCarryStatusAndMessage) {
  Layer layer;
  layer.problem.raw().batch = -1;
  const Error negative = thrown([&] { forward(layer.problem, layer.forward_args()); });
  EXPECT_EQ(negative.status(), Status::invalid_value);
  EXPECT_NE(std::string(negative.what()).find("batch"), std::string::npos) << negative.what();

  const Error dim = thrown([] { workspace_size(Problem(1, 1, 1, 8, 8, 63)); });
  EXPECT_EQ(dim.status(), Status::unsupported);
  EXPECT_NE(std::string(dim.what()).find("head_dim"), std::string::npos) << dim.what();

  Layer good;
  const Error missing = thrown([&] {
    ForwardArgs args = good.forward_args();
    args.q.data = nullptr;
    forward(good.problem, args);
  });
  EXPECT_EQ(missing.status(), Status::invalid_value);
}

TEST(Hpp, WorkspaceIsZeroOnTheCpu) {
  const auto [forward_bytes, backward_bytes] = workspace_size(Problem(1, 4, 2, 512, 512, 128));
  EXPECT_EQ(forward_bytes, 0u);
  EXPECT_EQ(backward_bytes, 0u);
}

}  // namespace
