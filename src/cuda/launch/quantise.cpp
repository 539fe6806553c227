// Quantise: the pack kernels of the forward, then gathers into the caller's plain layout.
#include "cuda/backend.h"
#include "cuda/kernels/unpack.h"
#include "cuda/launch/device.h"
#include "cuda/launch/operands.h"
#include "numerics/constants.h"

namespace dmattn::cuda {
namespace {

struct Packed {
  const uint8_t* images;
  const float *scale, *mean;  // mean null: nothing was subtracted
  int32_t scales_of_block;
  int64_t mean_width;
};

Packed queue_key_operand(const Launch& launch, const Problem& problem, const dmattn_quantise_args& args,
                         ForwardPlan& plan) {
  const TensorView x = tensor_view(problem, args.x, false, "x");
  plan.keys.v = plan.keys.v_t;  // row images in place of transposed ones: as many bytes
  plan.keys.v_t = nullptr;
  queue_tables(launch, problem, plan.shape, plan.tables);
  queue_keys(launch, problem, plan.shape, x, x, plan.keys);
  constexpr int32_t per_block = kBlockRows / numerics::kKeyScaleRows;
  if (args.operand == DMATTN_OPERAND_V) return {plan.keys.v, plan.keys.v_scale, nullptr, per_block, problem.head_dim};
  return {plan.keys.k, plan.keys.k_scale, plan.keys.k_mean, per_block, problem.head_dim};
}

Packed queue_query_operand(const Launch& launch, const Problem& problem, const dmattn_quantise_args& args,
                           ForwardPlan& plan) {
  const TensorView q = tensor_view(problem, args.x, true, "x");
  const TensorView k = tensor_view(problem, args.k, false, "k");
  plan.queries.mean_dot = nullptr;
  queue_tables(launch, problem, plan.shape, plan.tables);
  queue_keys(launch, problem, plan.shape, k, k, plan.keys);  // v only has to be there
  queue_queries(launch, plan.shape, q, k, plan.keys, plan.queries);
  const bool centred = plan.shape.mean_blocks_max > 0;
  return {plan.queries.q, plan.queries.q_scale, centred ? plan.queries.mean : nullptr,
          kBlockRows / numerics::kQueryScaleRows, mean_blocks(problem) * problem.head_dim};
}

}  // namespace

void quantise(const Problem& problem, const dmattn_quantise_args& args) {
  const bool is_query = args.operand == DMATTN_OPERAND_Q_SCORES;
  const int64_t heads = is_query ? problem.q_heads : problem.kv_heads;
  if (problem.batch == 0) return;
  const Launch launch = launch_on(problem);
  const CurrentDevice current(problem.device_index);
  ForwardPlan plan = plan_forward(problem, args.workspace);
  check_workspace(problem, args.workspace, args.workspace_bytes, plan.bytes);
  check_device_pointer(problem, args.codes, "codes", sizeof(uint8_t));
  check_device_pointer(problem, args.scale, "scale");
  check_device_pointer(problem, args.mean, "mean");
  const Packed packed =
      is_query ? queue_query_operand(launch, problem, args, plan) : queue_key_operand(launch, problem, args, plan);
  const int64_t longest = is_query ? problem.max_q_len : problem.max_k_len;
  const int64_t rows = kBlockRows / packed.scales_of_block;
  check_cuda(launch_unpack_codes(launch, plan.shape, is_query, packed.images, args.codes),
             "launch of the unpack kernel");
  check_cuda(launch_unpack_scales(launch, plan.shape, is_query, packed.scales_of_block, (longest + rows - 1) / rows,
                                  packed.scale, args.scale),
             "launch of the unpack kernel");
  if (args.mean)
    check_cuda(launch_unpack_means(launch, problem.batch, heads, packed.mean_width, packed.mean, args.mean),
               "launch of the unpack kernel");
}

}  // namespace dmattn::cuda
