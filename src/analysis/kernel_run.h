// A layer through kernels other than the twin, and each head's part of what they gave.
#pragma once

#include <map>
#include <vector>

#include "analysis/head_run.h"

namespace dmattn {

class KernelRun {
 public:
  // Runs the kernels, in every mode. A head whose inputs are not finite or whose logits leave the domain is left out.
  KernelRun(const Layer& layer, const std::vector<Mode>& modes, LayerKernels& kernels);

  bool left_out(int64_t batch, int64_t q_head) const;
  HeadOutputs head(Mode mode, int64_t batch, int64_t q_head) const;
  // Summed over the query heads of a KV head, without those that are left out: [k_tokens][dim_padded].
  std::vector<float> group_dk(Mode mode, int64_t batch, int64_t kv_head) const;
  std::vector<float> group_dv(Mode mode, int64_t batch, int64_t kv_head) const;

 private:
  bool in_domain(int64_t head) const;
  void leave_out(int64_t head, Layer& layer);
  std::vector<float> rows_of_head(const std::vector<float>& x, int64_t batch, int64_t q_head) const;

  const Layer& layer_;
  std::map<Mode, LayerOutputs> outputs_;
  std::vector<bool> left_out_;  // [batch][q_heads]
};

}  // namespace dmattn
