// Where everything lies in the caller's workspace, and in the codes that a forward leaves for its backward. The same
// walk counts the bytes (null base) and hands out the pieces. Plain C++: it sees addresses, never memory.
#pragma once

#include <initializer_list>

#include "core/problem.h"
#include "cuda/params.h"
#include "cuda/schedule/chunks.h"

namespace dmattn::cuda {

// Pieces of 256 bytes' alignment, one after the other.
class Layout {
 public:
  static constexpr size_t kAlignment = 256;
  explicit Layout(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(std::initializer_list<int64_t> extents) {
    return static_cast<T*>(take_bytes(sizeof(T), extents));
  }
  size_t bytes() const { return bytes_; }

 private:
  void* take_bytes(size_t element, std::initializer_list<int64_t> extents);
  char* base_;
  size_t bytes_ = 0;
};

// Variable lengths: what the table kernel writes.
struct Tables {
  int32_t *q_start, *k_start, *q_block_first, *k_block_first, *q_block_sequence, *k_block_sequence;
};

struct ForwardPlan {
  Shape shape;
  Tables tables;
  KeyCodes keys;
  QueryCodes queries;
  size_t bytes, codes_bytes;  // of the workspace; of the caller's codes, 0 without them
};

struct BackwardPlan {
  Shape shape;
  Tables tables;
  KeyCodes keys;
  QueryCodes queries;
  GradientCodes gradients;
  ChunkPlan chunks;
  uint8_t* ds_codes;
  float* ds_scale;
  float* key_partial;
  float* query_partial;       // of the groups of one chunk's KV heads; null where no chunk splits the keys
  size_t bytes, codes_bytes;  // as above
};

// The problem as the kernels see it; `tables` may be all null.
Shape kernel_shape(const Problem& problem, const Tables& tables);
int64_t mean_blocks(const Problem& problem);  // of one sequence, if Q were centred
DsShape ds_shape(const Problem& problem, const Shape& shape, int64_t multiprocessors);

// codes: the caller's saved.codes. Where it is null, what the packs write lies in the workspace.
ForwardPlan plan_forward(const Problem& problem, void* workspace, void* codes = nullptr);
// multiprocessors: of the GPU.
BackwardPlan plan_backward(const Problem& problem, int64_t multiprocessors, void* workspace, void* codes = nullptr);
size_t saved_codes_bytes(const Problem& problem);

}  // namespace dmattn::cuda
