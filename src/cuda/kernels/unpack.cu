// Gathers that are off every hot path: a thread an element, coalesced on the side of the caller's memory.
#include <algorithm>

#include "cuda/kernels/unpack.h"
#include "cuda/tile/image.h"

namespace dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1 << 20;  // the rest by strides

int grid_of(int64_t elements) {
  return static_cast<int>(std::min<int64_t>((elements + kThreads - 1) / kThreads, kMostBlocks));
}

__device__ __forceinline__ int64_t first_element() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + static_cast<int64_t>(threadIdx.x);
}
__device__ __forceinline__ int64_t element_stride() { return static_cast<int64_t>(gridDim.x) * kThreads; }

__global__ __launch_bounds__(kThreads) void unpack_codes(Shape shape, bool is_query, int head_dim,
                                                         const uint8_t* images, uint8_t* codes) {
  const Sequences& s = shape.sequences;
  const int64_t blocks = is_query ? s.q_blocks : s.k_blocks, heads = is_query ? shape.q_heads : shape.kv_heads;
  const int64_t total = blocks * kBlockRows * heads * head_dim;
  for (int64_t i = first_element(); i < total; i += element_stride()) {
    const int channel = static_cast<int>(i % head_dim);
    const int64_t head = i / head_dim % heads, padded = i / (head_dim * heads);
    const int32_t block = static_cast<int32_t>(padded / kBlockRows);
    const int32_t b = is_query ? q_block_owner(s, block) : k_block_owner(s, block);
    if (b < 0) continue;
    const SequenceView view = sequence_view(s, b);
    const int64_t row = padded - static_cast<int64_t>(is_query ? view.q_block0 : view.k_block0) * kBlockRows;
    const int64_t rows = is_query ? view.q_rows : view.k_rows;
    if (row >= rows) continue;
    const int64_t first = s.variable ? (is_query ? view.q_first : view.k_first) : b * rows;
    const int64_t image = (head * blocks + block) * (kBlockRows / kImageRows) + row % kBlockRows / kImageRows;
    codes[((first + row) * heads + head) * head_dim + channel] =
        images[image * kImageRows * head_dim + image_offset(kImageRows, static_cast<int>(row % kImageRows), channel)];
  }
}

__global__ __launch_bounds__(kThreads) void unpack_scales(Shape shape, bool is_query, int32_t per_block,
                                                          int64_t per_sequence, const float* scales, float* out) {
  const Sequences& s = shape.sequences;
  const int64_t blocks = is_query ? s.q_blocks : s.k_blocks, heads = is_query ? shape.q_heads : shape.kv_heads;
  const int64_t total = s.batch * heads * per_sequence;
  for (int64_t i = first_element(); i < total; i += element_stride()) {
    const int64_t at = i % per_sequence, head = i / per_sequence % heads;
    const SequenceView view = sequence_view(s, static_cast<int32_t>(i / (per_sequence * heads)));
    const int64_t rows = is_query ? view.q_rows : view.k_rows, block0 = is_query ? view.q_block0 : view.k_block0;
    const bool used = at * (kBlockRows / per_block) < rows;
    out[i] = used ? scales[(head * blocks + block0) * per_block + at] : 0.0f;
  }
}

__global__ __launch_bounds__(kThreads) void unpack_means(int64_t batch, int64_t heads, int64_t width,
                                                         const float* means, float* out) {
  for (int64_t i = first_element(); i < batch * heads * width; i += element_stride()) {
    const int64_t head = i / width % heads, b = i / (width * heads);
    out[i] = means ? means[(head * batch + b) * width + i % width] : 0.0f;
  }
}

}  // namespace

cudaError_t launch_unpack_codes(const Launch& launch, const Shape& shape, bool is_query, const uint8_t* images,
                                uint8_t* codes) {
  const Sequences& s = shape.sequences;
  const int64_t rows = kBlockRows * static_cast<int64_t>(is_query ? s.q_blocks : s.k_blocks);
  const int64_t elements = rows * (is_query ? shape.q_heads : shape.kv_heads) * launch.head_dim;
  if (elements == 0) return cudaSuccess;
  unpack_codes<<<grid_of(elements), kThreads, 0, launch.stream>>>(shape, is_query, launch.head_dim, images, codes);
  return cudaGetLastError();
}

cudaError_t launch_unpack_scales(const Launch& launch, const Shape& shape, bool is_query, int32_t per_block,
                                 int64_t per_sequence, const float* scales, float* out) {
  const int64_t elements = shape.sequences.batch * (is_query ? shape.q_heads : shape.kv_heads) * per_sequence;
  if (elements == 0) return cudaSuccess;
  unpack_scales<<<grid_of(elements), kThreads, 0, launch.stream>>>(shape, is_query, per_block, per_sequence, scales,
                                                                   out);
  return cudaGetLastError();
}

cudaError_t launch_unpack_means(const Launch& launch, int64_t batch, int64_t heads, int64_t width, const float* means,
                                float* out) {
  const int64_t elements = batch * heads * width;
  if (elements == 0) return cudaSuccess;
  unpack_means<<<grid_of(elements), kThreads, 0, launch.stream>>>(batch, heads, width, means, out);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
