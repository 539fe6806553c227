// The CUDA backend: checks what only it can see, then queues the kernels of a call on the caller's stream.
#pragma once

#include "core/backend.h"

namespace dmattn::cuda {

bool available();
WorkspaceSizes workspace_size(const Problem& problem);
size_t saved_codes_size(const Problem& problem);
void forward(const Problem& problem, const dmattn_forward_args& args);
void backward(const Problem& problem, const dmattn_backward_args& args);
void delta(const Problem& problem, const dmattn_backward_args& args);
void quantise(const Problem& problem, const dmattn_quantise_args& args);

}  // namespace dmattn::cuda
