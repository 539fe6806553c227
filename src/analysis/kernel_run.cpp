#include "analysis/kernel_run.h"

#include <algorithm>
#include <cmath>

namespace dmattn {

KernelRun::KernelRun(const Layer& layer, const std::vector<Mode>& modes, LayerKernels& kernels) : layer_(layer) {
  const int64_t heads = layer.batch * layer.q_heads;
  left_out_.assign(static_cast<size_t>(heads), false);
  Layer blanked = layer;
  for (int64_t head = 0; head < heads; ++head)
    if (!head_inputs(layer, head / layer.q_heads, head % layer.q_heads).finite) leave_out(head, blanked);
  for (bool again = true; again;) {
    for (const Mode mode : modes) outputs_[mode] = kernels.run(blanked, mode);
    again = false;
    for (int64_t head = 0; head < heads; ++head) {
      if (left_out_[static_cast<size_t>(head)] || in_domain(head)) continue;
      leave_out(head, blanked);
      again = true;
    }
  }
}

bool KernelRun::in_domain(int64_t head) const {
  return std::all_of(outputs_.begin(), outputs_.end(), [&](const auto& of_mode) {
    const float* sum = of_mode.second.sum.data() + head * layer_.q_tokens;
    return std::none_of(sum, sum + layer_.q_tokens, [](float value) { return std::isnan(value); });
  });
}

// Kernels take whole layers, so the head stays in its group's sums of dK and dV: with q and dO zero it adds zero there.
void KernelRun::leave_out(int64_t head, Layer& layer) {
  left_out_[static_cast<size_t>(head)] = true;
  const int64_t batch = head / layer.q_heads, q_head = head % layer.q_heads, dim = layer.head_dim;
  for (int64_t i = 0; i < layer.q_tokens; ++i)
    for (auto* x : {&layer.q, &layer.d_o})
      std::fill_n(x->data() + ((batch * layer.q_tokens + i) * layer.q_heads + q_head) * dim, dim, 0.0f);
}

bool KernelRun::left_out(int64_t batch, int64_t q_head) const {
  return left_out_[static_cast<size_t>(batch * layer_.q_heads + q_head)];
}

std::vector<float> KernelRun::rows_of_head(const std::vector<float>& x, int64_t batch, int64_t q_head) const {
  const float* first = x.data() + (batch * layer_.q_heads + q_head) * layer_.q_tokens;
  return {first, first + layer_.q_tokens};
}

HeadOutputs KernelRun::head(Mode mode, int64_t batch, int64_t q_head) const {
  const LayerOutputs& of_layer = outputs_.at(mode);
  const auto tensor = [&](const std::vector<uint16_t>& x, int64_t tokens) {
    return head_of(x, tokens, layer_.q_heads, layer_.head_dim, batch, q_head);
  };
  HeadOutputs out;
  out.o = tensor(of_layer.o, layer_.q_tokens);
  out.dq = tensor(of_layer.dq, layer_.q_tokens);
  out.dk = tensor(of_layer.head_dk, layer_.k_tokens);
  out.dv = tensor(of_layer.head_dv, layer_.k_tokens);
  out.reference = rows_of_head(of_layer.reference, batch, q_head);
  out.sum = rows_of_head(of_layer.sum, batch, q_head);
  out.sum_rounded = rows_of_head(of_layer.sum_rounded, batch, q_head);
  out.delta = rows_of_head(of_layer.delta, batch, q_head);
  return out;
}

std::vector<float> KernelRun::group_dk(Mode mode, int64_t batch, int64_t kv_head) const {
  return head_of(outputs_.at(mode).dk, layer_.k_tokens, layer_.kv_heads, layer_.head_dim, batch, kv_head);
}

std::vector<float> KernelRun::group_dv(Mode mode, int64_t batch, int64_t kv_head) const {
  return head_of(outputs_.at(mode).dv, layer_.k_tokens, layer_.kv_heads, layer_.head_dim, batch, kv_head);
}

}  // namespace dmattn
