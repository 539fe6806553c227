// What a device offers: one row of the table that the C ABI picks from.
#pragma once

#include "core/problem.h"

namespace dmattn {

struct WorkspaceSizes {
  size_t forward, backward;  // device bytes
};

// Each entry takes checked problems and tensors; what only the backend can see (whose memory a pointer is, workspace,
// saved codes) it checks itself, before anything is written.
struct Backend {
  bool (*available)();
  WorkspaceSizes (*workspace_size)(const Problem& problem);
  size_t (*saved_codes_size)(const Problem& problem);
  void (*forward)(const Problem& problem, const dmattn_forward_args& args);
  void (*backward)(const Problem& problem, const dmattn_backward_args& args);
  void (*delta)(const Problem& problem, const dmattn_backward_args& args);
  void (*quantise)(const Problem& problem, const dmattn_quantise_args& args);
};

}  // namespace dmattn
