// One query head through the twin in several modes, beside FP64: the work that probe and sweep share.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "analysis/analysis.h"
#include "cpu/reference.h"
#include "cpu/twin.h"

namespace dmattn {

struct HeadInputs {
  cpu::HeadShape shape;
  std::vector<float> q, k, v, d_o;  // [rows][dim_padded]
  bool finite = true;
};

// One head of a tensor [batch][tokens][heads][dim], of floats or BF16 bits, as [tokens][dim_padded].
std::vector<float> head_of(const std::vector<float>& x, int64_t tokens, int64_t heads, int64_t dim, int64_t batch,
                           int64_t head);
std::vector<float> head_of(const std::vector<uint16_t>& x, int64_t tokens, int64_t heads, int64_t dim, int64_t batch,
                           int64_t head);

HeadInputs head_inputs(const Layer& layer, int64_t batch, int64_t q_head);

// What a head of the layer gives in one mode. o and dq are rounded to BF16 as an operator returns them; dk and dv
// are the head's own share in FP32, before the sum over its group.
struct HeadMode {
  std::vector<float> o, dq, dk, dv;
  cpu::Diagnostics diagnostics;
};

// What other kernels gave for a head, as the twin takes it: tensors [rows][dim_padded], dk and dv the head's own.
struct HeadOutputs {
  std::vector<float> o, dq, dk, dv;
  std::vector<float> reference, sum, sum_rounded, delta;
};

// Amax of whole tensors, for the per-tensor ablation. Empty (negative) unless that is asked for.
struct TensorAmax {
  cpu::PerTensorAmax operands;
  float o = -1, d_s = -1;
};

TensorAmax tensor_amax(const Layer& layer, const RunOptions& options);

// Runs modes of one head, sharing operands and forwards between modes that have the same.
class HeadRunner {
 public:
  HeadRunner(const HeadInputs& inputs, const RunOptions& options, const TensorAmax& amax);
  HeadMode run(Mode mode, cpu::KeySums* group = nullptr);  // dK and dV go to the group's sums as well
  HeadMode measure(Mode mode, HeadOutputs outputs);        // the same of a head that other kernels computed
  bool in_domain();  // no row's logits exceed what its numerics can subtract (docs/numerics.md, section 3)
  // Lends the mode's tiles, and O as the backward reads it.
  void with_tiles(Mode mode, const std::function<void(const cpu::TileSource&, const std::vector<float>&)>& work);
  float forward_o_amax();        // per-tensor ablation: largest |O|
  float d_s_amax(float o_amax);  // per-tensor ablation: largest |dS|

 private:
  struct Operands {
    cpu::TwinConfig config;
    cpu::KvHead kv;
    cpu::QueryHead query;
  };
  const Operands& operands(Mode mode);
  const cpu::Forward& forward(Mode mode);
  struct Output {
    std::vector<float> full, stored;  // O in FP32 (onepass), O as the backward reads it
  };
  Output output(Mode mode);
  cpu::BackwardInput backward_input(Mode mode, const Output& o);

  const HeadInputs& inputs_;
  const RunOptions& options_;
  TensorAmax amax_;
  std::map<bool, Operands> operands_;      // by "per tensor"
  std::map<Mode, cpu::Forward> forwards_;  // by the first mode that has this encoding of P
};

}  // namespace dmattn
