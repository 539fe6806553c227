#include "cuda/launch/operands.h"

#include <fmt/format.h>

#include "cuda/launch/device.h"

namespace dmattn::cuda {
namespace {

constexpr int64_t kVectorElements = 8;  // 16 bytes of BF16

bool rows_are_aligned(const Problem& problem, const dmattn_tensor& tensor, int64_t rows, int64_t heads) {
  const bool entries = !problem.variable_length && problem.batch > 1;
  return reinterpret_cast<uintptr_t>(tensor.data) % (kVectorElements * sizeof(uint16_t)) == 0 &&
         (!entries || tensor.batch_stride % kVectorElements == 0) &&
         (rows <= 1 || tensor.seq_stride % kVectorElements == 0) &&
         (heads <= 1 || tensor.head_stride % kVectorElements == 0);
}

}  // namespace

TensorView tensor_view(const Problem& problem, const dmattn_tensor& tensor, bool is_query, const char* name) {
  const int64_t rows = is_query ? problem.q_len : problem.k_len;
  if (tensor.data == nullptr || rows == 0 || problem.batch == 0) return {};
  check_device_pointer(problem, tensor.data, fmt::format("{}.data", name).c_str(), sizeof(uint16_t));
  const int64_t heads = is_query ? problem.q_heads : problem.kv_heads;
  return {static_cast<uint16_t*>(tensor.data), tensor.batch_stride, tensor.seq_stride, tensor.head_stride,
          rows_are_aligned(problem, tensor, rows, heads)};
}

void queue_tables(const Launch& launch, const Problem& problem, const Shape& shape, const Tables& tables) {
  if (!problem.variable_length) return;
  check_device_pointer(problem, problem.cu_seqlens_q, "cu_seqlens_q");
  check_device_pointer(problem, problem.cu_seqlens_k, "cu_seqlens_k");
  const SequenceTables out{tables.q_start,       tables.k_start,          tables.q_block_first,
                           tables.k_block_first, tables.q_block_sequence, tables.k_block_sequence};
  const Sequences& s = shape.sequences;
  check_cuda(launch_tables(launch, s.batch, s.q_len, s.k_len, s.q_blocks, s.k_blocks, problem.cu_seqlens_q,
                           problem.cu_seqlens_k, out),
             "launch of the sequence tables");
}

void queue_keys(const Launch& launch, const Problem& problem, const Shape& shape, const TensorView& k,
                const TensorView& v, const KeyCodes& keys) {
  check_cuda(launch_key_pack(launch, shape, k, v, problem.centre != Centre::none, keys), "launch of the K and V pack");
}

void queue_queries(const Launch& launch, const Shape& shape, const TensorView& q, const TensorView& k,
                   const KeyCodes& keys, const QueryCodes& queries) {
  check_cuda(launch_query_pack(launch, shape, q, k, keys, queries), "launch of the Q pack");
}

}  // namespace dmattn::cuda
