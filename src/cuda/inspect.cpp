#include "cuda/inspect.h"

#include "core/error.h"
#include "cuda/launch/backward.h"
#include "cuda/launch/device.h"
#include "cuda/launch/operands.h"
#include "cuda/tile/image.h"
#include "numerics/constants.h"

namespace dmattn::cuda {
namespace {

enum class Kind { rows, sigma, rho };  // row image, or transposed with rows in that order

template <class T>
std::vector<T> fetch(const Launch& launch, const T* device, int64_t count) {
  std::vector<T> host(static_cast<size_t>(count));
  if (device == nullptr || count == 0) return host;
  check_cuda(cudaMemcpyAsync(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost, launch.stream),
             "copy of operands");
  check_cuda(cudaStreamSynchronize(launch.stream), "operands");
  return host;
}

// Where the code of (row, channel) lies in its image.
int64_t place(Kind kind, int dim, int row, int channel) {
  if (kind == Kind::rows) return image_offset(kImageRows, row, channel);
  for (int position = 0; position < 16; ++position)
    if ((kind == Kind::sigma ? sigma(position) : rho(position)) == row % 16)
      return image_offset(dim, channel, row / 16 * 16 + position);
  return 0;
}

InspectedCodes fetch_codes(const Launch& launch, Kind kind, int64_t heads, int64_t blocks, int64_t batch,
                           const uint8_t* images, const float* scales, int64_t rows_of_scale) {
  const int dim = launch.head_dim;
  const int64_t all = heads * blocks * kBlockRows, image_bytes = int64_t{kImageRows} * dim;
  InspectedCodes out{heads, batch > 0 ? blocks / batch * kBlockRows : 0, rows_of_scale, {}, {}};
  const std::vector<uint8_t> raw = fetch(launch, images, all * dim);
  out.codes.resize(raw.size());
  for (int64_t row = 0; row < all; ++row)
    for (int channel = 0; channel < dim; ++channel)
      out.codes[static_cast<size_t>(row * dim + channel)] = raw[static_cast<size_t>(
          row / kImageRows * image_bytes + place(kind, dim, static_cast<int>(row % kImageRows), channel))];
  out.scales = fetch(launch, scales, all / rows_of_scale);
  return out;
}

void check_equal_lengths(const Problem& problem) {
  if (problem.variable_length) throw Unsupported("cu_seqlens: operands are inspected for sequences of one length only");
}

InspectedScores fetch_scores(const Launch& launch, const Problem& problem, const Shape& shape, const KeyCodes& keys,
                             const QueryCodes& queries) {
  const Sequences& s = shape.sequences;
  const int64_t q_heads = problem.q_heads, kv_heads = problem.kv_heads, means = shape.mean_blocks_max;
  InspectedScores out{};
  out.q = fetch_codes(launch, Kind::rows, q_heads, s.q_blocks, problem.batch, queries.q, queries.q_scale,
                      numerics::kQueryScaleRows);
  out.k = fetch_codes(launch, Kind::rows, kv_heads, s.k_blocks, problem.batch, keys.k, keys.k_scale,
                      numerics::kKeyScaleRows);
  out.mean_blocks = means;
  out.k_mean = fetch(launch, keys.k_mean, kv_heads * problem.batch * problem.head_dim);
  out.q_mean = fetch(launch, queries.mean, q_heads * problem.batch * means * problem.head_dim);
  out.bias = fetch(launch, queries.bias, q_heads * means * s.k_blocks * kBlockRows);
  if (queries.mean_dot != nullptr) out.mean_dot = fetch(launch, queries.mean_dot, q_heads * s.q_blocks * kBlockRows);
  return out;
}

}  // namespace

InspectedForward inspect_forward(const Problem& problem, const dmattn_forward_args& args) {
  check_equal_lengths(problem);
  const Launch launch = launch_on(problem);
  const CurrentDevice current(problem.device_index);
  const ForwardPlan plan = plan_forward(problem, args.workspace);
  check_workspace(problem, args.workspace, args.workspace_bytes, plan.bytes);
  const TensorView q = tensor_view(problem, args.q, true, "q"), k = tensor_view(problem, args.k, false, "k");
  queue_keys(launch, problem, plan.shape, k, tensor_view(problem, args.v, false, "v"), plan.keys);
  queue_queries(launch, plan.shape, q, k, plan.keys, plan.queries);
  return {fetch_scores(launch, problem, plan.shape, plan.keys, plan.queries),
          fetch_codes(launch, Kind::sigma, problem.kv_heads, plan.shape.sequences.k_blocks, problem.batch,
                      plan.keys.v_t, plan.keys.v_scale, numerics::kKeyScaleRows)};
}

InspectedBackward inspect_backward(const Problem& problem, const dmattn_backward_args& args) {
  check_equal_lengths(problem);
  const Launch launch = launch_on(problem);
  const CurrentDevice current(problem.device_index);
  const BackwardPlan plan = plan_backward(problem, key_gradients_partial_bytes(launch), args.workspace);
  check_workspace(problem, args.workspace, args.workspace_bytes, plan.bytes);
  queue_backward_operands(launch, problem, args, plan);
  const Sequences& s = plan.shape.sequences;
  const GradientCodes& made = plan.gradients;
  const auto of_keys = [&](Kind kind, const uint8_t* images, const float* scales) {
    return fetch_codes(launch, kind, problem.kv_heads, s.k_blocks, problem.batch, images, scales,
                       numerics::kKeyScaleRows);
  };
  const auto of_queries = [&](Kind kind, const uint8_t* images, const float* scales) {
    return fetch_codes(launch, kind, problem.q_heads, s.q_blocks, problem.batch, images, scales, kBlockRows);
  };
  const int64_t rows = problem.q_heads * s.q_blocks * kBlockRows;
  return {fetch_scores(launch, problem, plan.shape, plan.keys, plan.queries),
          of_keys(Kind::rho, plan.keys.k_t, plan.keys.k_scale),
          of_keys(Kind::rows, plan.keys.v, plan.keys.v_scale),
          of_queries(Kind::rows, made.d_o, made.d_scale),
          of_queries(Kind::sigma, made.d_o_t, made.dv_scale),
          of_queries(Kind::sigma, made.q_t, made.q_scale),
          fetch(launch, made.shift, rows),
          fetch(launch, made.delta, rows),
          fetch(launch, made.weight, rows)};
}

}  // namespace dmattn::cuda
