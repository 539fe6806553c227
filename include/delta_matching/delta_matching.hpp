// A thin C++17 layer over the C ABI: enum classes, a problem with defaults, an exception in place of a status, and
// nothing to free. Header-only; link against delta_matching as for C. The meaning of every field, its shape and its
// units: delta_matching.h.
//
//   using namespace delta_matching;
//   Problem problem(1, 8, 2, 512, 512, 128);              // batch, query heads, key-value heads, lengths, head_dim
//   ForwardArgs args;
//   args.q = contiguous(q.data(), 512, 8, 128);           // [1, 512, 8, 128]; likewise k, v, o
//   ...
//   forward(problem.mode(Mode::onepass), args);           // throws Error
#ifndef DELTA_MATCHING_HPP
#define DELTA_MATCHING_HPP

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "delta_matching/delta_matching.h"

namespace delta_matching {

enum class Status : int {
  ok = DMATTN_OK,
  invalid_value = DMATTN_INVALID_VALUE,
  unsupported = DMATTN_UNSUPPORTED,
  out_of_memory = DMATTN_OUT_OF_MEMORY,
  internal = DMATTN_INTERNAL,
  device_error = DMATTN_DEVICE_ERROR
};
enum class Mode : int32_t {
  matched = DMATTN_MATCHED,
  onepass = DMATTN_ONEPASS,
  consistent = DMATTN_CONSISTENT,
  stale = DMATTN_STALE
};
enum class Numerics : int32_t { hopper = DMATTN_HOPPER, paper = DMATTN_PAPER };
enum class Centre : int32_t {
  by_default = DMATTN_CENTRE_DEFAULT,
  none = DMATTN_CENTRE_NONE,
  k = DMATTN_CENTRE_K,
  qk = DMATTN_CENTRE_QK
};
enum class Accumulator : int32_t { tensor_core = DMATTN_ACCUMULATOR_TENSOR_CORE, fp32 = DMATTN_ACCUMULATOR_FP32 };
enum class Device : int32_t { cpu = DMATTN_CPU, cuda = DMATTN_CUDA };
enum class Operand : int32_t {
  q = DMATTN_OPERAND_Q,
  k = DMATTN_OPERAND_K,
  v = DMATTN_OPERAND_V,
  d_o = DMATTN_OPERAND_D_O,
  q_scores = DMATTN_OPERAND_Q_SCORES
};

// What a call that did not succeed throws: the library's one line, and its status.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

inline void check(dmattn_status status) {
  if (status != DMATTN_OK) throw Error(static_cast<Status>(status), dmattn_last_error());
}

inline std::string version() { return dmattn_version(); }
inline int numerics_version() { return dmattn_numerics_version(); }
inline bool available(Device device) { return dmattn_device_available(static_cast<int32_t>(device)) != 0; }

// A contiguous [batch, length, heads, head_dim] tensor ([total, heads, head_dim] with cu_seqlens: length = total).
inline dmattn_tensor contiguous(uint16_t* data, int64_t length, int64_t heads, int64_t head_dim) {
  return {data, length * heads * head_dim, heads * head_dim, head_dim};
}

// Inputs are only read; the C struct has one pointer for both.
inline dmattn_tensor contiguous(const uint16_t* data, int64_t length, int64_t heads, int64_t head_dim) {
  return contiguous(const_cast<uint16_t*>(data), length, heads, head_dim);
}

// Shapes and settings. Defaults: scale 1/sqrt(head_dim), causal, matched, hopper numerics and its centring, the
// tensor core's accumulator, CPU, all threads. Nothing is checked before the call that uses it.
class Problem {
 public:
  Problem(int64_t batch, int64_t q_heads, int64_t kv_heads, int64_t q_len, int64_t k_len, int64_t head_dim) : raw_{} {
    raw_.struct_size = sizeof raw_;
    raw_.batch = batch;
    raw_.q_heads = q_heads;
    raw_.kv_heads = kv_heads;
    raw_.q_len = q_len;
    raw_.k_len = k_len;
    raw_.head_dim = head_dim;
    raw_.softmax_scale = head_dim > 0 ? static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim))) : 1.0f;
    raw_.causal = 1;
  }

  Problem& softmax_scale(float scale) { return set(raw_.softmax_scale, scale); }
  Problem& causal(bool on) { return set(raw_.causal, int32_t{on}); }
  Problem& mode(Mode mode) { return set(raw_.mode, static_cast<int32_t>(mode)); }
  Problem& numerics(Numerics numerics) { return set(raw_.numerics, static_cast<int32_t>(numerics)); }
  Problem& centre(Centre centre) { return set(raw_.centre, static_cast<int32_t>(centre)); }
  Problem& accumulator(Accumulator accumulator) { return set(raw_.accumulator, static_cast<int32_t>(accumulator)); }
  Problem& threads(int32_t count) { return set(raw_.threads, count); }
  // `stream` is a cudaStream_t; NULL is the default stream.
  Problem& cuda(int32_t index, void* stream) {
    raw_.device_index = index;
    raw_.stream = stream;
    return set(raw_.device, static_cast<int32_t>(Device::cuda));
  }
  // batch + 1 offsets each; the caller keeps them alive. q_len and k_len then count the rows of all sequences.
  Problem& variable_lengths(const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k) {
    raw_.cu_seqlens_q = cu_seqlens_q;
    return set(raw_.cu_seqlens_k, cu_seqlens_k);
  }
  // Bounds of the sequences' lengths, for variable lengths on CUDA; 0 = the totals.
  Problem& max_lengths(int64_t max_q_len, int64_t max_k_len) {
    raw_.max_q_len = max_q_len;
    return set(raw_.max_k_len, max_k_len);
  }
  Problem& workspace_cap(size_t bytes) { return set(raw_.workspace_cap, bytes); }

  const dmattn_problem& raw() const noexcept { return raw_; }
  dmattn_problem& raw() noexcept { return raw_; }

  // Entries of a row vector (lse, delta, saved statistics).
  size_t rows() const noexcept {
    const int64_t sequences = raw_.cu_seqlens_q != nullptr ? 1 : raw_.batch;
    return static_cast<size_t>(sequences * raw_.q_heads * raw_.q_len);
  }

 private:
  template <typename T>
  Problem& set(T& field, T value) {
    field = value;
    return *this;
  }

  dmattn_problem raw_;
};

// The C argument structs, zeroed and with their size filled in.
template <typename Raw>
struct Args : Raw {
  Args() : Raw{} { this->struct_size = sizeof(Raw); }
};
using ForwardArgs = Args<dmattn_forward_args>;
using BackwardArgs = Args<dmattn_backward_args>;
using QuantiseArgs = Args<dmattn_quantise_args>;
using ReferenceArgs = Args<dmattn_reference_args>;
using ProbeArgs = Args<dmattn_probe_args>;

// Host memory for what a forward leaves for the backward. raw() goes into both calls; keep this alive in between. On
// CUDA the caller brings device memory; saved_codes_size tells the bytes of the codes.
class Saved {
 public:
  explicit Saved(const Problem& problem) : reference_(problem.rows()), sum_(2 * problem.rows()) {
    const dmattn_problem& p = problem.raw();
    if (p.mode == DMATTN_ONEPASS) o_low_.resize(problem.rows() * static_cast<size_t>(p.head_dim));
    raw_.reference = reference_.data();
    raw_.sum = sum_.data();
    if (!o_low_.empty()) raw_.o_low = contiguous(o_low_.data(), p.q_len, p.q_heads, p.head_dim);
  }
  Saved(Saved&&) noexcept = default;  // a vector's memory stays where it is
  Saved& operator=(Saved&&) noexcept = default;

  const dmattn_saved& raw() const noexcept { return raw_; }

 private:
  std::vector<float> reference_, sum_;
  std::vector<uint16_t> o_low_;
  dmattn_saved raw_{};
};

// Device bytes that forward and backward need; 0 on the CPU.
inline std::pair<size_t, size_t> workspace_size(const Problem& problem) {
  std::pair<size_t, size_t> bytes{0, 0};
  check(dmattn_workspace_size(&problem.raw(), &bytes.first, &bytes.second));
  return bytes;
}

// Device bytes of dmattn_saved's codes; 0 on the CPU.
inline size_t saved_codes_size(const Problem& problem) {
  size_t bytes = 0;
  check(dmattn_saved_codes_size(&problem.raw(), &bytes));
  return bytes;
}

inline void forward(const Problem& problem, const ForwardArgs& args) { check(dmattn_forward(&problem.raw(), &args)); }
inline void backward(const Problem& problem, const BackwardArgs& args) {
  check(dmattn_backward(&problem.raw(), &args));
}
inline void delta(const Problem& problem, const BackwardArgs& args) { check(dmattn_delta(&problem.raw(), &args)); }
inline void quantise(const Problem& problem, const QuantiseArgs& args) {
  check(dmattn_quantise(&problem.raw(), &args));
}
inline void reference(const Problem& problem, const ReferenceArgs& args) {
  check(dmattn_reference(&problem.raw(), &args));
}

// A dmattn.probe/1 document (docs/schemas.md).
inline std::string probe(const Problem& problem, const ProbeArgs& args) {
  char* json = nullptr;
  check(dmattn_probe(&problem.raw(), &args, &json));
  const std::unique_ptr<char, void (*)(void*)> owner(json, dmattn_free);
  return json;
}

}  // namespace delta_matching
#endif  // DELTA_MATCHING_HPP
