// Forward: [tables] -> K, V pack -> Q pack -> forward. With saved.codes the packs also write what the backward reads of
// them, and write it there.
#include "cuda/backend.h"
#include "cuda/launch/device.h"
#include "cuda/launch/operands.h"

namespace dmattn::cuda {

void forward(const Problem& problem, const dmattn_forward_args& args) {
  const bool keeps = keeps_codes(problem, args.saved), has_rows = problem.row_vector_length() > 0;
  if (problem.batch == 0 || (!has_rows && !keeps)) return;  // no rows of O; a backward would still read K's codes
  const Launch launch = launch_on(problem);
  const CurrentDevice current(problem.device_index);
  ForwardPlan plan = plan_forward(problem, args.workspace, keeps ? args.saved.codes : nullptr);
  check_workspace(problem, args.workspace, args.workspace_bytes, plan.bytes);
  if (keeps) check_codes(problem, args.saved, plan.codes_bytes);
  const TensorView q = tensor_view(problem, args.q, true, "q");
  const TensorView k = tensor_view(problem, args.k, false, "k");
  const TensorView v = tensor_view(problem, args.v, false, "v");
  ForwardOutput output{};
  output.o = tensor_view(problem, args.o, true, "o");
  output.o_low = tensor_view(problem, args.saved.o_low, true, "saved.o_low");
  output.lse = args.lse;
  output.reference = args.saved.reference;
  output.sum = args.saved.sum;
  output.row_vector_length = problem.row_vector_length();
  output.unrounded = needs_unrounded_sum(problem, args);
  check_device_pointer(problem, args.lse, "lse");
  check_device_pointer(problem, args.saved.reference, "saved.reference");
  check_device_pointer(problem, args.saved.sum, "saved.sum");
  if (args.lse == nullptr) plan.queries.mean_dot = nullptr;

  queue_tables(launch, problem, plan.shape, plan.tables);
  queue_keys(launch, problem, plan.shape, k, v, plan.keys);
  queue_queries(launch, plan.shape, q, k, plan.keys, plan.queries);
  if (!has_rows) return;
  check_cuda(launch_forward(launch, plan.shape, plan.keys, plan.queries, output), "launch of the forward kernel");
}

}  // namespace dmattn::cuda
