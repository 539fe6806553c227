#include "abi/layer_kernels.h"

#include <algorithm>
#include <utility>

#include "numerics/bf16.h"

namespace dmattn::abi {
namespace {

std::vector<uint16_t> bits_of(const std::vector<float>& x) {
  std::vector<uint16_t> bits(x.size());
  std::transform(x.begin(), x.end(), bits.begin(), [](float value) { return numerics::bf16_encode(value); });
  return bits;
}

// Keys or values with a copy of the KV head for each of its query heads.
std::vector<uint16_t> repeated(const Layer& layer, const std::vector<uint16_t>& x) {
  const int64_t copies = layer.q_heads / layer.kv_heads, dim = layer.head_dim;
  std::vector<uint16_t> out;
  out.reserve(x.size() * static_cast<size_t>(copies));
  for (auto head = x.begin(); head != x.end(); head += dim)
    for (int64_t copy = 0; copy < copies; ++copy) out.insert(out.end(), head, head + dim);
  return out;
}

int32_t code(Centre centre) {
  switch (centre) {
    case Centre::none: return DMATTN_CENTRE_NONE;
    case Centre::k: return DMATTN_CENTRE_K;
    default: return DMATTN_CENTRE_QK;
  }
}

Results forward_and_backward(const Side& side, const dmattn_problem& problem, const Inputs& inputs) {
  Attention attention(side, problem, inputs);
  attention.forward();
  attention.backward();
  return attention.results();
}

Results backward_after(const Results& forward, const Side& side, const dmattn_problem& problem, const Inputs& inputs) {
  Attention attention(side, problem, inputs);
  attention.take_forward(forward);
  attention.backward();
  return attention.results();
}

}  // namespace

dmattn_problem AbiKernels::problem_of(const Layer& layer, Mode mode) const {
  dmattn_problem problem = hopper_problem(side_, mode);
  problem.batch = layer.batch;
  problem.q_heads = layer.q_heads;
  problem.kv_heads = layer.kv_heads;
  problem.q_len = layer.q_tokens;
  problem.k_len = layer.k_tokens;
  problem.head_dim = layer.head_dim;
  problem.softmax_scale = layer.softmax_scale;
  problem.causal = layer.causal ? 1 : 0;
  problem.centre = code(options_.centre);
  problem.accumulator =
      options_.accumulator == Accumulator::fp32 ? DMATTN_ACCUMULATOR_FP32 : DMATTN_ACCUMULATOR_TENSOR_CORE;
  problem.threads = options_.threads;
  return problem;
}

LayerOutputs AbiKernels::run(const Layer& layer, Mode mode) {
  dmattn_problem problem = problem_of(layer, mode);
  Inputs inputs{bits_of(layer.q), bits_of(layer.k), bits_of(layer.v), bits_of(layer.d_o)};
  Results results = forward_and_backward(side_, problem, inputs);
  LayerOutputs out;
  if (layer.q_heads == layer.kv_heads) {
    out.head_dk = results.dk;
    out.head_dv = results.dv;
  } else {
    problem.kv_heads = problem.q_heads;
    inputs.k = repeated(layer, inputs.k);
    inputs.v = repeated(layer, inputs.v);
    Results own = backward_after(results, side_, problem, inputs);
    out.head_dk = std::move(own.dk);
    out.head_dv = std::move(own.dv);
  }
  out.o = std::move(results.o);
  out.dq = std::move(results.dq);
  out.dk = std::move(results.dk);
  out.dv = std::move(results.dv);
  const auto rounded = results.sum.begin() + static_cast<std::ptrdiff_t>(results.reference.size());
  out.sum.assign(results.sum.begin(), rounded);
  out.sum_rounded.assign(rounded, results.sum.end());
  out.reference = std::move(results.reference);
  out.delta = std::move(results.delta);
  return out;
}

}  // namespace dmattn::abi
