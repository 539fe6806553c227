// What fuzz_abi hands to the C ABI: exactly sized memory, tensors in odd layouts, and a small valid problem with every
// call's arguments.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "delta_matching/delta_matching.h"

namespace fuzz_abi {

constexpr uint16_t kCanary = 0x5a5a;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "fuzz_abi: %s (last error: \"%s\")\n", what, dmattn_last_error());
  std::abort();
}

inline void require(bool condition, const char* what) {
  if (!condition) fail(what);
}

// Heap memory of exactly `count` elements: data() is a valid pointer even for none.
template <typename T>
class Exact {
 public:
  Exact() : Exact(0) {}
  explicit Exact(int64_t count) : count_(static_cast<size_t>(count)), data_(new T[count_]) { reset(); }
  T* data() { return data_.get(); }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return data_[i]; }
  void reset() { std::memset(static_cast<void*>(data_.get()), 0x5a, count_ * sizeof(T)); }
  std::vector<T> copy() const { return {data_.get(), data_.get() + count_}; }
  bool untouched() const {
    const auto* bytes = reinterpret_cast<const unsigned char*>(data_.get());
    for (size_t i = 0; i < count_ * sizeof(T); ++i) {
      if (bytes[i] != 0x5a) return false;
    }
    return true;
  }

 private:
  size_t count_;
  std::unique_ptr<T[]> data_;
};

// A tensor in one of several layouts, ending with its last element.
struct Tensor {
  int64_t batch = 0, length = 0, heads = 0, dim = 0;
  dmattn_tensor view{};
  Exact<uint16_t> memory;

  Tensor() = default;
  Tensor(FuzzedDataProvider& fuzz, int64_t batch_, int64_t length_, int64_t heads_, int64_t dim_)
      : batch(batch_), length(length_), heads(heads_), dim(dim_) {
    const int64_t pad = fuzz.ConsumeIntegralInRange<int64_t>(0, 3) * 8;
    if (fuzz.ConsumeBool()) {  // [batch, length, heads, dim]
      view.head_stride = dim + (fuzz.ConsumeBool() ? pad : 0);
      view.seq_stride = heads * view.head_stride + pad;
      view.batch_stride = length * view.seq_stride;
    } else {  // [batch, heads, length, dim]
      view.seq_stride = dim + pad;
      view.head_stride = length * view.seq_stride;
      view.batch_stride = heads * view.head_stride;
    }
    const bool empty = batch == 0 || length == 0 || heads == 0;
    memory = Exact<uint16_t>(empty ? 0
                                   : (batch - 1) * view.batch_stride + (length - 1) * view.seq_stride +
                                         (heads - 1) * view.head_stride + dim);
    view.data = memory.data();
  }

  void fill(FuzzedDataProvider& fuzz) {
    const int style = fuzz.ConsumeIntegralInRange(0, 3);
    uint64_t state = fuzz.ConsumeIntegral<uint64_t>() | 1;
    for (size_t i = 0; i < memory.size(); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const uint16_t bits = static_cast<uint16_t>(state >> 48);
      const uint16_t ordinary = static_cast<uint16_t>((bits & 0x80ffu) | 0x3f00u);  // magnitude in [0.5, 2)
      const bool rare = ((state >> 32) & 0xffu) == 0;
      memory[i] = style == 0 ? bits : style == 1 ? ordinary : style == 2 ? (rare ? bits : ordinary) : uint16_t{0};
    }
    for (int n = fuzz.ConsumeIntegralInRange(0, 4); n > 0 && memory.size() > 0; --n) {
      memory[fuzz.ConsumeIntegralInRange<size_t>(0, memory.size() - 1)] = fuzz.ConsumeIntegral<uint16_t>();
    }
  }

  // Elements that the view does not name still hold the canary.
  bool gaps_untouched() {
    std::vector<uint16_t> rest = memory.copy();
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t n = 0; n < length; ++n) {
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t row = b * view.batch_stride + n * view.seq_stride + h * view.head_stride;
          std::fill_n(rest.begin() + row, dim, kCanary);
        }
      }
    }
    for (const uint16_t x : rest) {
      if (x != kCanary) return false;
    }
    return true;
  }
};

inline Exact<int32_t> offsets(FuzzedDataProvider& fuzz, int64_t batch, int64_t total) {
  Exact<int32_t> result(batch + 1);
  int32_t last = 0;
  result[0] = 0;
  for (size_t i = 1; i < result.size(); ++i) {
    last = fuzz.ConsumeIntegralInRange<int32_t>(last, static_cast<int32_t>(total));
    result[i] = last;
  }
  return result;
}

struct Case {
  dmattn_problem problem{};
  bool variable = false;
  Exact<int32_t> cu_q, cu_k;
  Tensor q, k, v, o, d_o, dq, dk, dv, o_low;
  Exact<float> lse, reference, sum, delta, delta_out;
  Exact<uint8_t> codes;
  Exact<float> scale, mean;
  Exact<double> ref_o, ref_lse, ref_dq, ref_dk, ref_dv;
  dmattn_forward_args forward{};
  dmattn_backward_args backward{};
  dmattn_quantise_args quantise{};
  dmattn_reference_args exact{};
  dmattn_probe_args probe{};

  explicit Case(FuzzedDataProvider& fuzz);

  // All that a call may write.
  bool outputs_untouched() const {
    return o.memory.untouched() && lse.untouched() && reference.untouched() && sum.untouched() &&
           o_low.memory.untouched() && delta_out.untouched() && dq.memory.untouched() && dk.memory.untouched() &&
           dv.memory.untouched() && codes.untouched() && scale.untouched() && mean.untouched() && ref_o.untouched() &&
           ref_lse.untouched() && ref_dq.untouched() && ref_dk.untouched() && ref_dv.untouched();
  }
};

inline Case::Case(FuzzedDataProvider& fuzz) {
  dmattn_problem& p = problem;
  p.struct_size = sizeof p;
  p.numerics = fuzz.ConsumeBool() ? DMATTN_PAPER : DMATTN_HOPPER;
  p.batch = fuzz.ConsumeIntegralInRange<int64_t>(0, 2);
  p.kv_heads = fuzz.ConsumeIntegralInRange<int64_t>(1, 2);
  p.q_heads = p.kv_heads * fuzz.ConsumeIntegralInRange<int64_t>(1, 2);
  p.q_len = fuzz.ConsumeIntegralInRange<int64_t>(0, 140);
  p.k_len = fuzz.ConsumeIntegralInRange<int64_t>(0, 140);
  p.head_dim = p.numerics == DMATTN_PAPER ? fuzz.ConsumeIntegralInRange<int64_t>(1, 20) : 64;
  p.softmax_scale = fuzz.ConsumeBool() ? 0.125f : std::fabs(fuzz.ConsumeFloatingPoint<float>());
  if (!(std::isfinite(p.softmax_scale) && p.softmax_scale > 0)) p.softmax_scale = 1.0f;
  p.causal = fuzz.ConsumeIntegralInRange(0, 1);
  p.mode = fuzz.ConsumeIntegralInRange(0, 3);
  p.centre = fuzz.ConsumeIntegralInRange(0, p.numerics == DMATTN_PAPER ? 2 : 3);
  p.accumulator = fuzz.ConsumeIntegralInRange(0, 1);
  p.threads = 1;
  variable = fuzz.ConsumeIntegralInRange(0, 3) == 0;
  if (variable) {
    cu_q = offsets(fuzz, p.batch, p.q_len);
    cu_k = offsets(fuzz, p.batch, p.k_len);
    p.cu_seqlens_q = cu_q.data();
    p.cu_seqlens_k = cu_k.data();
  }

  const int64_t batch = variable ? 1 : p.batch;
  q = Tensor(fuzz, batch, p.q_len, p.q_heads, p.head_dim);
  k = Tensor(fuzz, batch, p.k_len, p.kv_heads, p.head_dim);
  v = Tensor(fuzz, batch, p.k_len, p.kv_heads, p.head_dim);
  d_o = Tensor(fuzz, batch, p.q_len, p.q_heads, p.head_dim);
  for (Tensor* input : {&q, &k, &v, &d_o}) input->fill(fuzz);
  for (Tensor* output : {&o, &dq, &o_low}) *output = Tensor(fuzz, batch, p.q_len, p.q_heads, p.head_dim);
  for (Tensor* output : {&dk, &dv}) *output = Tensor(fuzz, batch, p.k_len, p.kv_heads, p.head_dim);
  const int64_t rows = batch * p.q_heads * p.q_len;
  for (Exact<float>* vector : {&lse, &reference, &sum, &delta, &delta_out}) *vector = Exact<float>(rows);
  sum = Exact<float>(2 * rows);
  for (size_t i = 0; i < delta.size(); ++i) delta[i] = 0.25f;

  forward.struct_size = sizeof forward;
  forward.q = q.view;
  forward.k = k.view;
  forward.v = v.view;
  forward.o = o.view;
  if (fuzz.ConsumeBool()) forward.lse = lse.data();
  forward.saved = {reference.data(), sum.data(), {}, nullptr, 0};
  if (p.mode == DMATTN_ONEPASS) forward.saved.o_low = o_low.view;

  backward.struct_size = sizeof backward;
  backward.q = q.view;
  backward.k = k.view;
  backward.v = v.view;
  backward.o = o.view;
  backward.d_o = d_o.view;
  backward.saved = forward.saved;
  if (forward.lse != nullptr && fuzz.ConsumeBool()) {  // from the public lse alone
    backward.saved = {};
    backward.lse = lse.data();
  }
  if (fuzz.ConsumeIntegralInRange(0, 3) == 0) backward.delta = delta.data();
  if (fuzz.ConsumeBool()) backward.delta_out = delta_out.data();
  if (fuzz.ConsumeIntegralInRange(0, 3) != 0) backward.dq = dq.view;
  if (fuzz.ConsumeIntegralInRange(0, 3) != 0) backward.dk = dk.view;
  if (fuzz.ConsumeIntegralInRange(0, 3) != 0) backward.dv = dv.view;

  quantise.struct_size = sizeof quantise;
  quantise.operand = fuzz.ConsumeIntegralInRange(0, 3);
  const bool of_keys = quantise.operand == DMATTN_OPERAND_K || quantise.operand == DMATTN_OPERAND_V;
  const Tensor* operands[] = {&q, &k, &v, &d_o};
  const Tensor& operand = *operands[quantise.operand];
  int64_t longest = of_keys ? p.k_len : p.q_len;
  if (variable) {
    Exact<int32_t>& cu = of_keys ? cu_k : cu_q;
    longest = 0;
    for (size_t i = 1; i < cu.size(); ++i) longest = std::max<int64_t>(longest, cu[i] - cu[i - 1]);
  }
  const int64_t block = of_keys ? 64 : p.numerics == DMATTN_HOPPER ? 512 : 128;
  codes = Exact<uint8_t>(operand.batch * operand.length * operand.heads * operand.dim);
  scale = Exact<float>(p.batch * operand.heads * ((longest + block - 1) / block));
  mean = Exact<float>(p.batch * operand.heads * operand.dim);
  quantise.x = operand.view;
  quantise.codes = codes.data();
  quantise.scale = scale.data();
  if (fuzz.ConsumeBool()) quantise.mean = mean.data();

  exact.struct_size = sizeof exact;
  exact.q = q.view;
  exact.k = k.view;
  exact.v = v.view;
  exact.d_o = d_o.view;
  ref_o = Exact<double>(rows * p.head_dim);
  ref_dq = Exact<double>(rows * p.head_dim);
  ref_lse = Exact<double>(rows);
  ref_dk = Exact<double>(batch * p.k_len * p.kv_heads * p.head_dim);
  ref_dv = Exact<double>(batch * p.k_len * p.kv_heads * p.head_dim);
  exact.o = ref_o.data();
  exact.lse = ref_lse.data();
  exact.dq = ref_dq.data();
  exact.dk = ref_dk.data();
  exact.dv = ref_dv.data();

  probe.struct_size = sizeof probe;
  probe.q = q.view;
  probe.k = k.view;
  probe.v = v.view;
  probe.d_o = d_o.view;
  probe.modes = fuzz.ConsumeIntegralInRange<uint32_t>(0, 15);
}

}  // namespace fuzz_abi
