// Between the caller's strided BF16 tensors and the twin's padded FP32 rows.
#pragma once

#include <vector>

#include "core/problem.h"
#include "cpu/codes.h"
#include "cpu/tile_kernels.h"
#include "numerics/bf16.h"

namespace dmattn::cpu {

// One head of one sequence inside a tensor.
struct HeadView {
  uint16_t* data;
  int64_t stride, rows, dim;
};

inline HeadView head_view(const Problem& problem, const dmattn_tensor& tensor, int64_t sequence, int64_t head,
                          bool is_query) {
  const Sequence& at = problem.sequences[static_cast<size_t>(sequence)];
  const int64_t first = is_query ? at.q_first : at.k_first, rows = is_query ? at.q_rows : at.k_rows;
  if (rows == 0) return {nullptr, 0, 0, problem.head_dim};  // a null pointer may not even be stepped
  const int64_t batch = problem.variable_length ? 0 : sequence;
  return {static_cast<uint16_t*>(tensor.data) + batch * tensor.batch_stride + first * tensor.seq_stride +
              head * tensor.head_stride,
          tensor.seq_stride, rows, problem.head_dim};
}

inline std::vector<float> load(const HeadView& view) {
  const int64_t dim_padded = round_up(view.dim, kLanes);
  std::vector<float> out(static_cast<size_t>(view.rows * dim_padded), 0.0f);
  for (int64_t i = 0; i < view.rows; ++i)
    for (int64_t c = 0; c < view.dim; ++c)
      out[static_cast<size_t>(i * dim_padded + c)] = numerics::bf16_decode(view.data[i * view.stride + c]);
  return out;
}

inline void store(const std::vector<float>& x, const HeadView& view) {
  const int64_t dim_padded = round_up(view.dim, kLanes);
  for (int64_t i = 0; i < view.rows; ++i)
    for (int64_t c = 0; c < view.dim; ++c)
      view.data[i * view.stride + c] = numerics::bf16_encode(x[static_cast<size_t>(i * dim_padded + c)]);
}

inline HeadShape head_shape(const Problem& problem, int64_t sequence) {
  const Sequence& at = problem.sequences[static_cast<size_t>(sequence)];
  return {at.q_rows,     at.k_rows, problem.head_dim, round_up(problem.head_dim, kLanes), problem.softmax_scale,
          problem.causal};
}

}  // namespace dmattn::cpu
