// Attention in FP64: the truth for accuracy. One head at a time, blocked, linear in the number of rows.
#pragma once

#include <vector>

#include "cpu/codes.h"

namespace dmattn::cpu {

struct Reference {
  std::vector<double> o;           // [queries][dim_padded]
  std::vector<double> lse;         // [queries], natural log; -infinity for a row without keys
  std::vector<double> entropy;     // [queries]: -sum P ln P, in nats; 0 for a row without keys
  std::vector<double> dq, dk, dv;  // dq [queries], dk, dv [keys][dim_padded]; empty without d_o
};

// q, k, v, d_o as in HeadShape; d_o may be null. No centring, no rounding but FP64's own: relative error about
// 1e-14 on well-scaled inputs.
Reference reference_attention(const HeadShape& shape, const float* q, const float* k, const float* v, const float* d_o,
                              int threads);

}  // namespace dmattn::cpu
