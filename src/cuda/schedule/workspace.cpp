#include "cuda/schedule/workspace.h"

#include <algorithm>

#include "core/error.h"
#include "cuda/tile/image.h"
#include "numerics/constants.h"

namespace dmattn::cuda {
namespace {

constexpr int64_t kHalves = kBlockRows / kImageRows;
constexpr int64_t kMostMeanBlocks = 64;  // of one sequence (numerics::query_mean_rows)

int64_t blocks_of(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// Padded blocks of all sequences; with variable lengths the most that any offsets can ask for.
int64_t all_blocks(const Problem& problem, int64_t total, int64_t longest) {
  const int64_t even = problem.batch * blocks_of(longest);
  if (!problem.variable_length) return even;
  const int64_t ragged = (total + (kBlockRows - 1) * std::min(problem.batch, total)) / kBlockRows;
  return std::min(even, ragged);
}

Tables take_tables(Layout& layout, const Problem& problem, const Shape& shape) {
  if (!problem.variable_length) return {};
  Tables tables{};
  for (int32_t** starts : {&tables.q_start, &tables.k_start, &tables.q_block_first, &tables.k_block_first})
    *starts = layout.take<int32_t>({problem.batch + 1});
  tables.q_block_sequence = layout.take<int32_t>({shape.sequences.q_blocks});
  tables.k_block_sequence = layout.take<int32_t>({shape.sequences.k_blocks});
  return tables;
}

// Images, [heads][blocks][2][64 D].
uint8_t* take_images(Layout& layout, int64_t heads, int64_t blocks, int64_t dim) {
  return layout.take<uint8_t>({heads, blocks, kBlockRows, dim});
}

// What the packs leave for the kernels after them, all that a backward reads of K, V and Q among it: the one order of
// saved.codes, and of those pieces in a workspace.
void take_codes(Layout& layout, const Problem& problem, const Shape& shape, bool backward, KeyCodes& keys,
                QueryCodes& queries) {
  const int64_t k_blocks = shape.sequences.k_blocks, q_blocks = shape.sequences.q_blocks, dim = problem.head_dim;
  keys.k = take_images(layout, problem.kv_heads, k_blocks, dim);
  if (backward) {
    keys.k_t = take_images(layout, problem.kv_heads, k_blocks, dim);
    keys.v = take_images(layout, problem.kv_heads, k_blocks, dim);
  }
  keys.k_scale = layout.take<float>({problem.kv_heads, k_blocks, kHalves});
  keys.v_scale = layout.take<float>({problem.kv_heads, k_blocks, kHalves});
  keys.k_mean = layout.take<float>({problem.kv_heads, problem.batch, dim});
  queries.q = take_images(layout, problem.q_heads, q_blocks, dim);
  queries.q_scale = layout.take<float>({problem.q_heads, q_blocks});
  queries.bias = layout.take<float>({problem.q_heads, shape.mean_blocks_max, k_blocks, kBlockRows});
}

// What the packs leave for one another alone.
void take_scratch(Layout& layout, const Problem& problem, const Shape& shape, KeyCodes& keys, QueryCodes& queries) {
  const int64_t k_blocks = shape.sequences.k_blocks, means = shape.mean_blocks_max;
  keys.k_partial = layout.take<float>({problem.kv_heads, k_blocks, kHalves, problem.head_dim});
  queries.mean = layout.take<float>({problem.q_heads, problem.batch, means, problem.head_dim});
  queries.bias_amax = layout.take<float>({problem.q_heads, means, k_blocks, kHalves});
}

GradientCodes take_gradients(Layout& layout, const Problem& problem, const Shape& shape) {
  const int64_t heads = problem.q_heads, blocks = shape.sequences.q_blocks;
  GradientCodes gradients{};
  for (uint8_t** images : {&gradients.d_o, &gradients.d_o_t, &gradients.q_t})
    *images = take_images(layout, heads, blocks, problem.head_dim);
  for (float** scales : {&gradients.d_scale, &gradients.dv_scale, &gradients.q_scale})
    *scales = layout.take<float>({heads, blocks});
  for (float** rows : {&gradients.shift, &gradients.delta, &gradients.weight})
    *rows = layout.take<float>({heads, blocks, kBlockRows});
  return gradients;
}

}  // namespace

void* Layout::take_bytes(size_t element, std::initializer_list<int64_t> extents) {
  size_t bytes = element, end = 0;
  bool fits = true;
  for (const int64_t extent : extents)
    fits = !__builtin_mul_overflow(bytes, static_cast<size_t>(extent), &bytes) && fits;
  fits = fits && !__builtin_add_overflow(bytes_, bytes, &end) && end <= SIZE_MAX / 2;
  if (!fits) throw InvalidValue("problem: expected a workspace of at most 2^63 bytes, got more");
  void* piece = base_ ? base_ + bytes_ : nullptr;
  bytes_ = (end + kAlignment - 1) / kAlignment * kAlignment;
  return piece;
}

int64_t mean_blocks(const Problem& problem) {
  if (problem.variable_length) return std::min(kMostMeanBlocks, blocks_of(problem.max_q_len));
  const int64_t rows = numerics::query_mean_rows(problem.q_len);
  return (problem.q_len + rows - 1) / rows;
}

Shape kernel_shape(const Problem& problem, const Tables& tables) {
  const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };  // core/problem.cpp has the limits
  Shape shape{};
  Sequences& s = shape.sequences;
  s.batch = narrow(problem.batch);
  s.variable = problem.variable_length;
  s.q_len = problem.q_len;
  s.k_len = problem.k_len;
  s.q_blocks = narrow(all_blocks(problem, problem.q_len, problem.max_q_len));
  s.k_blocks = narrow(all_blocks(problem, problem.k_len, problem.max_k_len));
  s.q_blocks_max = narrow(blocks_of(problem.max_q_len));
  s.k_blocks_max = narrow(blocks_of(problem.max_k_len));
  s.q_start = tables.q_start;
  s.k_start = tables.k_start;
  s.q_block_first = tables.q_block_first;
  s.k_block_first = tables.k_block_first;
  s.q_block_sequence = tables.q_block_sequence;
  s.k_block_sequence = tables.k_block_sequence;
  shape.q_heads = narrow(problem.q_heads);
  shape.kv_heads = narrow(problem.kv_heads);
  shape.by_row_heads = divisor(problem.batch * problem.q_heads);
  shape.by_q_heads = divisor(problem.q_heads);
  shape.by_group = divisor(problem.group());
  shape.causal = problem.causal;
  shape.softmax_scale = problem.softmax_scale;
  shape.score_scale = problem.softmax_scale * numerics::kLog2e;
  shape.mean_blocks_max = problem.centre == Centre::qk ? narrow(mean_blocks(problem)) : 0;
  return shape;
}

DsShape ds_shape(const Problem& problem, const Shape& shape, int64_t multiprocessors) {
  return {problem.variable_length,
          problem.causal,
          problem.batch,
          problem.q_len,
          problem.k_len,
          shape.sequences.q_blocks,
          kHalves * shape.sequences.k_blocks_max,
          problem.kv_heads,
          problem.group(),
          problem.head_dim,
          multiprocessors};
}

ForwardPlan plan_forward(const Problem& problem, void* workspace, void* codes) {
  Layout layout(workspace), kept(codes);
  ForwardPlan plan{};
  plan.tables = take_tables(layout, problem, kernel_shape(problem, {}));
  plan.shape = kernel_shape(problem, plan.tables);
  const bool keeps = codes != nullptr;
  take_codes(keeps ? kept : layout, problem, plan.shape, keeps, plan.keys, plan.queries);
  plan.keys.v_t = take_images(layout, problem.kv_heads, plan.shape.sequences.k_blocks, problem.head_dim);
  take_scratch(layout, problem, plan.shape, plan.keys, plan.queries);
  plan.queries.mean_dot = layout.take<float>({problem.q_heads, plan.shape.sequences.q_blocks, kBlockRows});
  plan.bytes = layout.bytes();
  plan.codes_bytes = kept.bytes();
  return plan;
}

size_t saved_codes_bytes(const Problem& problem) {
  Layout layout(nullptr);
  KeyCodes keys{};
  QueryCodes queries{};
  take_codes(layout, problem, kernel_shape(problem, {}), true, keys, queries);
  return layout.bytes();
}

BackwardPlan plan_backward(const Problem& problem, int64_t multiprocessors, void* workspace, void* codes) {
  Layout layout(workspace), kept(codes);
  BackwardPlan plan{};
  plan.tables = take_tables(layout, problem, kernel_shape(problem, {}));
  plan.shape = kernel_shape(problem, plan.tables);
  take_codes(codes ? kept : layout, problem, plan.shape, true, plan.keys, plan.queries);
  if (!codes) take_scratch(layout, problem, plan.shape, plan.keys, plan.queries);
  plan.gradients = take_gradients(layout, problem, plan.shape);
  plan.chunks = plan_chunks(ds_shape(problem, plan.shape, multiprocessors), problem.workspace_cap);
  plan.ds_codes = layout.take<uint8_t>({static_cast<int64_t>(plan.chunks.code_bytes())});
  plan.ds_scale = layout.take<float>({plan.chunks.most_tiles});
  // Without dQ there is one chunk, whose sums belong to CTAs.
  const int64_t by_item =
      plan.chunks.splits_groups() ? plan.chunks.most_kv_heads() * problem.batch * plan.chunks.most_blocks() : 0;
  const int64_t sums = std::max(by_item, multiprocessors);
  plan.key_partial = layout.take<float>({sums, kHalves, kBlockRows, problem.head_dim});  // dV and dK
  if (plan.chunks.splits_keys())
    plan.query_partial = layout.take<float>(
        {plan.chunks.most_kv_heads() * problem.group(), plan.shape.sequences.q_blocks, kBlockRows, problem.head_dim});
  plan.bytes = layout.bytes();
  plan.codes_bytes = kept.bytes();
  return plan;
}

}  // namespace dmattn::cuda
