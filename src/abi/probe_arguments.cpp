#include "abi/probe_arguments.h"

#include <fmt/format.h>

#include "core/error.h"
#include "numerics/bf16.h"

namespace dmattn {
namespace {

std::vector<float> gather(const Problem& problem, const dmattn_tensor& tensor, int64_t rows, int64_t heads) {
  std::vector<float> out(static_cast<size_t>(problem.batch * rows * heads * problem.head_dim));
  size_t at = 0;
  for (int64_t b = 0; b < problem.batch; ++b)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const uint16_t* source = static_cast<const uint16_t*>(tensor.data) + b * tensor.batch_stride +
                                 i * tensor.seq_stride + h * tensor.head_stride;
        for (int64_t c = 0; c < problem.head_dim; ++c) out[at++] = numerics::bf16_decode(source[c]);
      }
  return out;
}

}  // namespace

Layer probe_layer(const Problem& problem, const dmattn_probe_args& args) {
  if (problem.variable_length)
    throw Unsupported("cu_seqlens: probe takes sequences of one length; call it per sequence");
  Layer layer;
  layer.batch = problem.batch;
  layer.q_tokens = problem.q_len;
  layer.k_tokens = problem.k_len;
  layer.q_heads = problem.q_heads;
  layer.kv_heads = problem.kv_heads;
  layer.head_dim = problem.head_dim;
  layer.softmax_scale = problem.softmax_scale;
  layer.causal = problem.causal;
  layer.q = gather(problem, args.q, problem.q_len, problem.q_heads);
  layer.d_o = gather(problem, args.d_o, problem.q_len, problem.q_heads);
  layer.k = gather(problem, args.k, problem.k_len, problem.kv_heads);
  layer.v = gather(problem, args.v, problem.k_len, problem.kv_heads);
  return layer;
}

RunOptions probe_options(const Problem& problem, uint32_t modes) {
  if (modes >= 1u << kModes.size()) throw InvalidValue(fmt::format("modes: expected a mask below 16, got {}", modes));
  RunOptions options;
  options.numerics = problem.numerics;
  options.centre = problem.centre;
  options.accumulator = problem.accumulator;
  options.threads = problem.threads;
  options.modes.clear();
  constexpr dmattn_mode kNumbers[] = {DMATTN_STALE, DMATTN_CONSISTENT, DMATTN_MATCHED, DMATTN_ONEPASS};
  for (size_t i = 0; i < kModes.size(); ++i)
    if (modes == 0 || (modes >> kNumbers[i] & 1u)) options.modes.push_back(kModes[i]);
  return options;
}

}  // namespace dmattn
