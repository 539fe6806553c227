// Backward: [tables] -> [K, V pack -> Q pack, unless the forward left their codes] -> dO, q pack -> [delta, matched] ->
// for each range of KV heads, of keys, of their groups' query heads, ascending: dK, dV and dS -> dQ. delta: the same up
// to its kernel.
#include <utility>

#include "cuda/backend.h"
#include "cuda/launch/device.h"
#include "cuda/launch/operands.h"

namespace dmattn::cuda {
namespace {

struct Call {
  const Problem& problem;
  const dmattn_backward_args& args;
  Launch launch;
  BackwardPlan plan;
  KeyGradients key_output{};
  TensorView dq{};
};

DeltaRule rule_of(Mode mode) {
  switch (mode) {
    case Mode::onepass: return DeltaRule::onepass;
    case Mode::consistent: return DeltaRule::consistent;
    case Mode::stale: return DeltaRule::stale;
    default: return DeltaRule::matched;
  }
}

GradientInput gradient_input(const Problem& problem, const dmattn_backward_args& args) {
  GradientInput input{};
  input.q = tensor_view(problem, args.q, true, "q");
  input.o = tensor_view(problem, args.o, true, "o");
  input.d_o = tensor_view(problem, args.d_o, true, "d_o");
  if (problem.mode == Mode::onepass) input.o_low = tensor_view(problem, args.saved.o_low, true, "saved.o_low");
  input.reference = args.saved.reference;
  input.sum = args.saved.sum;
  input.lse = args.lse;
  input.delta = args.delta;
  input.delta_out = args.delta_out;
  input.row_vector_length = problem.row_vector_length();
  input.rule = rule_of(problem.mode);
  check_device_pointer(problem, args.saved.reference, "saved.reference");
  check_device_pointer(problem, args.saved.sum, "saved.sum");
  check_device_pointer(problem, args.lse, "lse");
  check_device_pointer(problem, args.delta, "delta");
  check_device_pointer(problem, args.delta_out, "delta_out");
  return input;
}

void queue_chunk(const Call& call, const HeadRange& kv_heads, const HeadRange& group, const TileRange& tiles,
                 bool first, bool last) {
  const BackwardPlan& plan = call.plan;
  const bool wants_dq = call.dq.data != nullptr;
  DsChunk chunk{};
  chunk.codes = wants_dq ? plan.ds_codes : nullptr;
  chunk.scale = wants_dq ? plan.ds_scale : nullptr;
  chunk.kv_first = static_cast<int32_t>(kv_heads.first);
  chunk.kv_heads = static_cast<int32_t>(kv_heads.count);
  chunk.group_first = static_cast<int32_t>(group.first);
  chunk.group_heads = static_cast<int32_t>(group.count);
  chunk.tile_first = static_cast<int32_t>(tiles.first);
  chunk.tile_end = static_cast<int32_t>(tiles.end);
  chunk.tiles_per_head = tiles.tiles_per_head;
  if (plan.shape.sequences.k_blocks > 0)
    check_cuda(launch_key_gradients(call.launch, plan.shape, call.problem.mode == Mode::onepass, plan.keys,
                                    plan.queries, plan.gradients, chunk, call.key_output),
               "launch of the key gradients kernel");
  if (!wants_dq) return;
  QueryGradients output{};
  output.dq = call.dq;
  output.first = first;
  output.last = last;
  if (plan.query_partial != nullptr) {
    // The kernel counts heads from the first of all; the sums of one chunk's heads are all that is kept.
    const int64_t skipped =
        kv_heads.first * call.problem.group() * plan.shape.sequences.q_blocks * kBlockRows * call.problem.head_dim;
    output.partial = reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(plan.query_partial) -
                                              static_cast<uintptr_t>(skipped) * sizeof(float));
  }
  check_cuda(launch_query_gradients(call.launch, plan.shape, plan.keys, chunk, output),
             "launch of the query gradients kernel");
}

Call make_call(const Problem& problem, const dmattn_backward_args& args) {
  const Launch launch = launch_on(problem);
  const bool kept = keeps_codes(problem, args.saved);
  BackwardPlan plan = plan_backward(problem, launch.multiprocessors, args.workspace, kept ? args.saved.codes : nullptr);
  check_workspace(problem, args.workspace, args.workspace_bytes, plan.bytes);
  if (kept) check_codes(problem, args.saved, plan.codes_bytes);
  return {problem, args, launch, std::move(plan)};
}

bool has_no_rows(const Problem& problem) { return problem.batch == 0 || (problem.q_len == 0 && problem.k_len == 0); }

// All operands, and delta' of the mode: what dmattn_delta stops after.
void queue_backward_operands(const Launch& launch, const Problem& problem, const dmattn_backward_args& args,
                             const BackwardPlan& plan) {
  const bool kept = keeps_codes(problem, args.saved);
  const TensorView k = kept ? TensorView{} : tensor_view(problem, args.k, false, "k");
  const TensorView v = kept ? TensorView{} : tensor_view(problem, args.v, false, "v");
  GradientInput input = gradient_input(problem, args);
  const bool own_kernel = input.rule == DeltaRule::matched && input.delta == nullptr;
  if (own_kernel) input.delta_out = nullptr;  // the delta kernel writes it

  queue_tables(launch, problem, plan.shape, plan.tables);
  if (!kept) {
    queue_keys(launch, problem, plan.shape, k, v, plan.keys);
    queue_queries(launch, plan.shape, input.q, k, plan.keys, plan.queries);
  }
  check_cuda(launch_gradient_pack(launch, plan.shape, input, plan.keys, plan.gradients), "launch of the dO and q pack");
  if (own_kernel)
    check_cuda(launch_delta(launch, plan.shape, plan.keys, plan.queries, plan.gradients, args.delta_out),
               "launch of the delta kernel");
}

}  // namespace

void backward(const Problem& problem, const dmattn_backward_args& args) {
  if (has_no_rows(problem)) return;
  Call call = make_call(problem, args);
  const CurrentDevice current(problem.device_index);
  call.dq = tensor_view(problem, args.dq, true, "dq");
  call.key_output.dk = tensor_view(problem, args.dk, false, "dk");
  call.key_output.dv = tensor_view(problem, args.dv, false, "dv");
  call.key_output.partial = call.plan.key_partial;
  queue_backward_operands(call.launch, problem, args, call.plan);
  if (call.dq.data == nullptr && call.key_output.dk.data == nullptr && call.key_output.dv.data == nullptr) return;
  if (call.dq.data == nullptr)
    call.plan.chunks = single_chunk(ds_shape(problem, call.plan.shape, call.launch.multiprocessors));
  call.key_output.by_item = call.plan.chunks.splits_groups();
  const ChunkPlan& chunks = call.plan.chunks;
  for (const HeadRange& kv_heads : chunks.kv_heads)
    for (size_t i = 0; i < chunks.tiles.size(); ++i)
      for (const HeadRange& group : chunks.group)
        queue_chunk(call, kv_heads, group, chunks.tiles[i], i == 0, i + 1 == chunks.tiles.size());
}

void delta(const Problem& problem, const dmattn_backward_args& args) {
  if (problem.row_vector_length() == 0 || problem.batch == 0) return;
  const Call call = make_call(problem, args);
  const CurrentDevice current(problem.device_index);
  queue_backward_operands(call.launch, problem, args, call.plan);
}

}  // namespace dmattn::cuda
