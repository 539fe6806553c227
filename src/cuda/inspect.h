// What the packing kernels made of a call's operands, brought back to the host in plain order, for `dmattn certify` and
// for whoever looks for the first stage that differs from the twin. Sequences of one length only. Waits for the stream.
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.h"

namespace dmattn::cuda {

// Codes [heads][batch][rows][head_dim], rows padded to blocks of 128; one scale for every `rows_of_scale` of them.
struct InspectedCodes {
  int64_t heads, rows, rows_of_scale;
  std::vector<uint8_t> codes;
  std::vector<float> scales;  // [heads][batch][rows / rows_of_scale]
};

// Made from q and k for S, and what goes with them.
struct InspectedScores {
  InspectedCodes q, k;
  int64_t mean_blocks;        // of a sequence; 0: Q is not centred
  std::vector<float> k_mean;  // [kv_heads][batch][head_dim]
  std::vector<float> q_mean;  // [q_heads][batch][mean_blocks][head_dim]
  std::vector<float> bias;  // [q_heads][mean_blocks][batch][padded keys]: mu . (k - mean), before its split into codes
  std::vector<float> mean_dot;  // [q_heads][batch][padded queries], forward only: <q, k mean>
};

struct InspectedForward {
  InspectedScores scores;
  InspectedCodes v;  // of the images that O takes
};

struct InspectedBackward {
  InspectedScores scores;
  InspectedCodes k_for_dq, v;
  InspectedCodes d_o, d_o_for_dv, q_for_dk;
  std::vector<float> shift, delta, weight;  // [q_heads][batch][padded queries]: 8 - c, delta', w
};

// Device pointers and workspaces as for the call itself; nothing else is computed, and no output of args is written but
// args.delta_out.
InspectedForward inspect_forward(const Problem& problem, const dmattn_forward_args& args);
InspectedBackward inspect_backward(const Problem& problem, const dmattn_backward_args& args);

}  // namespace dmattn::cuda
