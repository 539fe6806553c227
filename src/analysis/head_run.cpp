#include "analysis/head_run.h"

#include <algorithm>
#include <cmath>

#include "cpu/tile_kernels.h"
#include "cpu/tiles.h"
#include "numerics/bf16.h"
#include "numerics/fp8.h"
#include "numerics/scale.h"

namespace dmattn {
namespace {

template <class T, class Decode>
std::vector<float> gather(const std::vector<T>& x, int64_t tokens, int64_t heads, int64_t dim, int64_t batch,
                          int64_t head, Decode decode) {
  const int64_t dim_padded = cpu::round_up(dim, cpu::kLanes);
  std::vector<float> out(static_cast<size_t>(tokens * dim_padded), 0.0f);
  for (int64_t i = 0; i < tokens; ++i) {
    const T* source = x.data() + ((batch * tokens + i) * heads + head) * dim;
    std::transform(source, source + dim, out.data() + i * dim_padded, decode);
  }
  return out;
}

bool all_finite(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float value) { return std::isfinite(value); });
}

void round_to_bf16(std::vector<float>& x) {
  for (float& value : x) value = numerics::bf16_round(value);
}

// Modes that encode P alike share a forward.
Mode encoding_of(Mode mode) { return mode == Mode::max_shift || mode == Mode::per_tensor ? mode : Mode::stale; }

}  // namespace

std::vector<float> head_of(const std::vector<float>& x, int64_t tokens, int64_t heads, int64_t dim, int64_t batch,
                           int64_t head) {
  return gather(x, tokens, heads, dim, batch, head, [](float value) { return value; });
}

std::vector<float> head_of(const std::vector<uint16_t>& x, int64_t tokens, int64_t heads, int64_t dim, int64_t batch,
                           int64_t head) {
  return gather(x, tokens, heads, dim, batch, head, [](uint16_t bits) { return numerics::bf16_decode(bits); });
}

HeadInputs head_inputs(const Layer& layer, int64_t batch, int64_t q_head) {
  HeadInputs in;
  in.shape = {layer.q_tokens,      layer.k_tokens, layer.head_dim, cpu::round_up(layer.head_dim, cpu::kLanes),
              layer.softmax_scale, layer.causal};
  const int64_t kv_head = q_head / (layer.q_heads / layer.kv_heads), dim = layer.head_dim;
  in.q = head_of(layer.q, layer.q_tokens, layer.q_heads, dim, batch, q_head);
  in.d_o = head_of(layer.d_o, layer.q_tokens, layer.q_heads, dim, batch, q_head);
  in.k = head_of(layer.k, layer.k_tokens, layer.kv_heads, dim, batch, kv_head);
  in.v = head_of(layer.v, layer.k_tokens, layer.kv_heads, dim, batch, kv_head);
  in.finite = all_finite(in.q) && all_finite(in.k) && all_finite(in.v) && all_finite(in.d_o);
  return in;
}

HeadRunner::HeadRunner(const HeadInputs& inputs, const RunOptions& options, const TensorAmax& amax)
    : inputs_(inputs), options_(options), amax_(amax) {}

const HeadRunner::Operands& HeadRunner::operands(Mode mode) {
  const bool per_tensor = mode == Mode::per_tensor;
  const auto found = operands_.find(per_tensor);
  if (found != operands_.end()) return found->second;
  Operands& made = operands_[per_tensor];
  made.config = {options_.numerics, per_tensor ? Centre::none : options_.centre, options_.accumulator,
                 options_.threads};
  const cpu::PerTensorAmax amax = per_tensor ? amax_.operands : cpu::PerTensorAmax{};
  const bool raw_v = std::count(options_.modes.begin(), options_.modes.end(), Mode::bf16_dp) > 0;
  made.kv = cpu::prepare_kv(inputs_.shape, made.config, inputs_.k.data(), inputs_.v.data(), raw_v, amax);
  made.query = cpu::prepare_query(inputs_.shape, made.config, made.kv, inputs_.q.data(), amax);
  return made;
}

const cpu::Forward& HeadRunner::forward(Mode mode) {
  const Mode encoding = encoding_of(mode);
  const auto found = forwards_.find(encoding);
  if (found != forwards_.end()) return found->second;
  const Operands& in = operands(mode);
  return forwards_[encoding] = cpu::forward(inputs_.shape, in.config, in.kv, in.query, inputs_.q.data(), encoding);
}

// O as the backward reads it: BF16, or FP8 with one scale in the per-tensor ablation; in onepass with its remainder.
HeadRunner::Output HeadRunner::output(Mode mode) {
  Output out;
  out.full = cpu::divide_o(inputs_.shape, operands(mode).config, forward(mode), mode);
  out.stored = out.full;
  if (mode == Mode::per_tensor) {
    const auto scale = numerics::block_scale(amax_.o);
    for (float& value : out.stored) value = numerics::e4m3_round(value * scale.inverse) * scale.scale;
    return out;
  }
  round_to_bf16(out.stored);
  if (options_.numerics == Numerics::hopper)  // the remainder is kept in BF16 as well
    for (size_t i = 0; i < out.full.size(); ++i)
      out.full[i] = out.stored[i] + numerics::bf16_round(out.full[i] - out.stored[i]);
  return out;
}

cpu::BackwardInput HeadRunner::backward_input(Mode mode, const Output& o) {
  const cpu::Forward& state = forward(mode);
  cpu::BackwardInput in;
  in.mode = mode;
  in.d_o = inputs_.d_o.data();
  in.o_stored = o.stored.data();
  in.o_full = o.full.data();
  in.reference = state.reference.data();
  in.sum = state.sum.data();
  in.sum_rounded = state.sum_rounded.data();
  if (mode == Mode::per_tensor) in.amax = amax_.operands;
  in.d_s_amax = mode == Mode::per_tensor ? amax_.d_s : -1;
  return in;
}

HeadMode HeadRunner::run(Mode mode, cpu::KeySums* group) {
  const Operands& in = operands(mode);
  Output o = output(mode);
  HeadMode out;
  cpu::Gradients gradients =
      cpu::backward(inputs_.shape, in.config, in.kv, in.query, backward_input(mode, o), {}, &out.diagnostics, group);
  round_to_bf16(gradients.dq);
  out.o = std::move(o.stored);
  out.dq = std::move(gradients.dq);
  out.dk = std::move(gradients.dk);
  out.dv = std::move(gradients.dv);
  return out;
}

HeadMode HeadRunner::measure(Mode mode, HeadOutputs outputs) {
  const Operands& operands_of_mode = operands(mode);
  cpu::BackwardInput in;
  in.mode = mode;
  in.d_o = inputs_.d_o.data();
  in.o_stored = in.o_full = outputs.o.data();
  in.reference = outputs.reference.data();
  in.sum = outputs.sum.data();
  in.sum_rounded = outputs.sum_rounded.data();
  in.delta = outputs.delta.data();
  HeadMode out;
  cpu::backward(inputs_.shape, operands_of_mode.config, operands_of_mode.kv, operands_of_mode.query, in,
                {false, false, false}, &out.diagnostics);
  out.o = std::move(outputs.o);
  out.dq = std::move(outputs.dq);
  out.dk = std::move(outputs.dk);
  out.dv = std::move(outputs.dv);
  return out;
}

void HeadRunner::with_tiles(Mode mode,
                            const std::function<void(const cpu::TileSource&, const std::vector<float>&)>& work) {
  const Operands& in = operands(mode);
  const Output o = output(mode);
  work(*cpu::make_tiles(inputs_.shape, in.config, in.kv, in.query, backward_input(mode, o)), o.stored);
}

bool HeadRunner::in_domain() {
  return std::all_of(options_.modes.begin(), options_.modes.end(), [&](Mode mode) {
    const std::vector<float>& sum = forward(mode).sum;
    return std::none_of(sum.begin(), sum.end(), [](float value) { return std::isnan(value); });
  });
}

float HeadRunner::forward_o_amax() {
  const Operands& in = operands(Mode::per_tensor);
  const auto o = cpu::divide_o(inputs_.shape, in.config, forward(Mode::per_tensor), Mode::per_tensor);
  return cpu::tile_kernels().amax(o.data(), static_cast<int64_t>(o.size()));
}

float HeadRunner::d_s_amax(float o_amax) {
  amax_.o = o_amax;
  const Operands& in = operands(Mode::per_tensor);
  const Output output_of_head = output(Mode::per_tensor);
  return cpu::d_s_amax(inputs_.shape, in.config, in.kv, in.query, backward_input(Mode::per_tensor, output_of_head));
}

TensorAmax tensor_amax(const Layer& layer, const RunOptions& options) {
  TensorAmax amax;
  if (std::count(options.modes.begin(), options.modes.end(), Mode::per_tensor) == 0) return amax;
  const auto largest = [](float& so_far, const std::vector<float>& x) {
    so_far = std::max(so_far, cpu::tile_kernels().amax(x.data(), static_cast<int64_t>(x.size())));
  };
  const auto each_finite_head = [&](auto work) {
    for (int64_t batch = 0; batch < layer.batch; ++batch)
      for (int64_t head = 0; head < layer.q_heads; ++head) {
        const HeadInputs inputs = head_inputs(layer, batch, head);
        if (inputs.finite) work(inputs);
      }
  };
  each_finite_head([&](const HeadInputs& inputs) {
    largest(amax.operands.q, inputs.q);
    largest(amax.operands.k, inputs.k);
    largest(amax.operands.v, inputs.v);
    largest(amax.operands.d_o, inputs.d_o);
  });
  float o = 0, d_s = 0;
  each_finite_head(
      [&](const HeadInputs& inputs) { o = std::max(o, HeadRunner(inputs, options, amax).forward_o_amax()); });
  each_finite_head(
      [&](const HeadInputs& inputs) { d_s = std::max(d_s, HeadRunner(inputs, options, amax).d_s_amax(o)); });
  amax.o = o;
  amax.d_s = d_s;
  return amax;
}

}  // namespace dmattn
