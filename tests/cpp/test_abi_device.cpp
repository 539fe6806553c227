// device = DMATTN_CUDA through the C ABI, on machines without a GPU first of all: every call fails with a line that says
// why, and reads nothing. DMATTN_HAVE_CUDA: the library has the backend.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "delta_matching/delta_matching.h"

namespace {

#if defined(DMATTN_HAVE_CUDA)
constexpr bool kHaveCuda = true;
#else
constexpr bool kHaveCuda = false;
#endif

struct Call {
  dmattn_problem problem{};
  std::vector<uint16_t> memory = std::vector<uint16_t>(2 * 8 * 64);
  std::vector<float> rows = std::vector<float>(2 * 2 * 8);
  std::vector<uint8_t> codes = std::vector<uint8_t>(2 * 8 * 64);

  Call() {
    problem.struct_size = sizeof problem;
    problem.batch = 1, problem.q_heads = 2, problem.kv_heads = 1;
    problem.q_len = problem.k_len = 8, problem.head_dim = 64;
    problem.softmax_scale = 0.125f;
    problem.device = DMATTN_CUDA;
  }
  dmattn_tensor tensor() { return {memory.data(), 2 * 8 * 64, 2 * 64, 64}; }
  dmattn_status workspace() {
    size_t forward = 0, backward = 0;
    return dmattn_workspace_size(&problem, &forward, &backward);
  }
  dmattn_status codes_size() {
    size_t bytes = 0;
    return dmattn_saved_codes_size(&problem, &bytes);
  }
  dmattn_status forward() {
    dmattn_forward_args args{};
    args.struct_size = sizeof args;
    args.q = args.k = args.v = args.o = tensor();
    args.lse = rows.data();
    return dmattn_forward(&problem, &args);
  }
  dmattn_backward_args backward_args() {
    dmattn_backward_args args{};
    args.struct_size = sizeof args;
    args.q = args.k = args.v = args.o = args.d_o = args.dq = args.dk = args.dv = tensor();
    args.lse = args.delta_out = rows.data();
    return args;
  }
  dmattn_status backward() {
    const dmattn_backward_args args = backward_args();
    return dmattn_backward(&problem, &args);
  }
  dmattn_status delta() {
    const dmattn_backward_args args = backward_args();
    return dmattn_delta(&problem, &args);
  }
  dmattn_status quantise(int32_t operand) {
    dmattn_quantise_args args{};
    args.struct_size = sizeof args;
    args.operand = operand;
    args.x = args.k = tensor();
    args.codes = codes.data(), args.scale = rows.data();
    return dmattn_quantise(&problem, &args);
  }
};

void expect_says(const char* part) {
  const std::string message = dmattn_last_error();
  EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

bool have_gpu() { return dmattn_device_available(DMATTN_CUDA) != 0; }

TEST(AbiDevice, AvailabilityIsAnAnswerAndNoError) {
  EXPECT_EQ(dmattn_device_available(DMATTN_CPU), 1);
  for (const int32_t device : {-1, 2, 77}) EXPECT_EQ(dmattn_device_available(device), 0);
  EXPECT_LE(dmattn_device_available(DMATTN_CUDA), kHaveCuda ? 1 : 0);
}

TEST(AbiDevice, CallsWithoutAGpuSayWhy) {
  if (have_gpu()) GTEST_SKIP() << "needs a machine without a GPU";
  Call call;
  const dmattn_status expected = kHaveCuda ? DMATTN_DEVICE_ERROR : DMATTN_UNSUPPORTED;
  const char* says = kHaveCuda ? "device: no GPU can be used: " : "this build has no CUDA backend";
  for (int32_t variable : {0, 1}) {
    if (variable) call.problem.cu_seqlens_q = call.problem.cu_seqlens_k = reinterpret_cast<int32_t*>(64);  // not read
    EXPECT_EQ(call.workspace(), expected);
    expect_says(says);
    EXPECT_EQ(call.codes_size(), expected);
    expect_says(says);
    EXPECT_EQ(call.forward(), expected);
    expect_says(says);
    EXPECT_EQ(call.backward(), expected);
    expect_says(says);
    EXPECT_EQ(call.delta(), expected);
    expect_says(says);
    EXPECT_EQ(call.quantise(DMATTN_OPERAND_K), expected);
    expect_says(says);
  }
}

// What is refused by name before anyone looks for a GPU.
TEST(AbiDevice, RefusalsOfTheBackendNameTheArgument) {
  if (!kHaveCuda) GTEST_SKIP() << "needs a build with the CUDA backend (scripts/test build_cuda)";
  const auto refused = [](void (*spoil)(dmattn_problem&), dmattn_status status, const char* says) {
    Call call;
    spoil(call.problem);
    EXPECT_EQ(call.forward(), status);
    expect_says(says);
  };
  refused([](dmattn_problem& p) { p.numerics = DMATTN_PAPER; }, DMATTN_UNSUPPORTED, "numerics: expected hopper");
  refused([](dmattn_problem& p) { p.accumulator = DMATTN_ACCUMULATOR_FP32; }, DMATTN_UNSUPPORTED,
          "accumulator: expected tensor_core");
  refused([](dmattn_problem& p) { p.head_dim = 96; }, DMATTN_UNSUPPORTED, "head_dim");
  refused([](dmattn_problem& p) { p.device_index = -1; }, DMATTN_INVALID_VALUE, "device_index: expected 0 ...");
  refused([](dmattn_problem& p) { p.q_len = int64_t{1} << 31; }, DMATTN_INVALID_VALUE, "q_len (on CUDA)");
  refused([](dmattn_problem& p) { p.batch = 1 << 30; }, DMATTN_INVALID_VALUE, "q_len (on CUDA): expected batch");
  const auto variable = [](dmattn_problem& p) {
    p.cu_seqlens_q = p.cu_seqlens_k = reinterpret_cast<const int32_t*>(64);
    p.max_q_len = 9;
  };
  refused(variable, DMATTN_INVALID_VALUE, "max_q_len: expected 0 ... 8, got 9");
}

TEST(AbiDevice, WhatRunsOnTheCpuAloneIsRefused) {
  if (!kHaveCuda) GTEST_SKIP() << "needs a build with the CUDA backend (scripts/test build_cuda)";
  Call call;
  for (const int32_t operand : {DMATTN_OPERAND_Q, DMATTN_OPERAND_D_O}) {
    EXPECT_EQ(call.quantise(operand), DMATTN_UNSUPPORTED);
    expect_says("operand: expected K (1), V (2) or Q_SCORES (4)");
  }
  EXPECT_EQ(call.quantise(5), DMATTN_INVALID_VALUE);
  dmattn_reference_args reference{};
  reference.struct_size = sizeof reference;
  reference.q = reference.k = reference.v = call.tensor();
  EXPECT_EQ(dmattn_reference(&call.problem, &reference), DMATTN_UNSUPPORTED);
  expect_says("reference runs on the CPU alone");
  dmattn_probe_args probe{};
  probe.struct_size = sizeof probe;
  probe.q = probe.k = probe.v = probe.d_o = call.tensor();
  char* json = nullptr;
  EXPECT_EQ(dmattn_probe(&call.problem, &probe, &json), DMATTN_UNSUPPORTED);
  expect_says("probe runs on the CPU alone");
}

// With codes k and v may be missing; the call then gets as far as the GPU. Without, they are asked for by name.
TEST(AbiDevice, CodesStandInForKeysAndValues) {
  if (!kHaveCuda || have_gpu()) GTEST_SKIP() << "needs a build with the CUDA backend, and no GPU";
  Call call;
  dmattn_backward_args args = call.backward_args();
  args.k.data = args.v.data = nullptr;
  EXPECT_EQ(dmattn_backward(&call.problem, &args), DMATTN_INVALID_VALUE);
  expect_says("k.data: expected a pointer, got NULL");
  args.saved.codes = call.codes.data();
  for (const auto function : {dmattn_backward, dmattn_delta}) {
    EXPECT_EQ(function(&call.problem, &args), DMATTN_DEVICE_ERROR);
    expect_says("device: no GPU can be used: ");
  }
}

TEST(AbiDevice, QScoresAreOfferedOnCudaAlone) {
  Call call;
  call.problem.device = DMATTN_CPU;
  EXPECT_EQ(call.quantise(DMATTN_OPERAND_Q_SCORES), DMATTN_UNSUPPORTED);
  expect_says("operand: expected 0 ... 3 with device cpu");
}

}  // namespace
