// A validated problem: the ABI's plain structs, checked once, as the rest of the library sees them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/modes.h"
#include "delta_matching/delta_matching.h"

namespace dmattn {

struct Sequence {
  int64_t q_first, q_rows, k_first, k_rows;  // rows of the tensors (dense: within the batch entry, firsts are 0)
};

struct Problem {
  int64_t batch, q_heads, kv_heads, q_len, k_len, head_dim;
  float softmax_scale;
  bool causal, variable_length;
  Mode mode;
  Numerics numerics;
  Centre centre;
  Accumulator accumulator;
  int threads;
  std::vector<Sequence> sequences;  // CPU: one per batch entry; CUDA: none, the offsets are in device memory
  bool cuda = false;
  int device_index = 0;
  void* stream = nullptr;                                          // cudaStream_t
  const int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  // of the caller; CUDA: device memory
  int64_t max_q_len = 0, max_k_len = 0;                            // no sequence is longer
  size_t workspace_cap = 0;                                        // bytes of dS held at a time

  int64_t group() const { return q_heads / kv_heads; }
  // Position of a sequence's first entry in a row vector (lse, delta, saved statistics).
  int64_t row_vector(int64_t sequence, int64_t q_head) const {
    return variable_length ? q_head * q_len + sequences[static_cast<size_t>(sequence)].q_first
                           : (sequence * q_heads + q_head) * q_len;
  }
  int64_t row_vector_length() const { return (variable_length ? 1 : batch) * q_heads * q_len; }
};

// Throws InvalidValue or Unsupported with one line that names the argument, what was expected and what came.
Problem check_problem(const dmattn_problem* problem);

// Checks that `tensor` can be read or written: [batch] x rows x heads x head_dim. Outputs must not overlap themselves.
enum class Access { input, output };
void check_tensor(const Problem& problem, const dmattn_tensor& tensor, bool is_query, const std::string& name,
                  Access access);
void check_pointer(const void* pointer, const std::string& name);
// Whether the forward sums P before it is rounded as well: lse wants that, and every backward but that of onepass in
// hopper numerics. Where it does not, the first vector of saved.sum is NaN.
bool needs_unrounded_sum(const Problem& problem, const dmattn_forward_args& args);
// Whether what the forward leaves holds codes for the backward: only a GPU has some to keep.
bool keeps_codes(const Problem& problem, const dmattn_saved& saved);
void check_struct_size(size_t got, size_t expected, const std::string& name);

}  // namespace dmattn
