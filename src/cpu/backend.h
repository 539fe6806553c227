// The CPU backend: whole problems through the twin, one KV head of one sequence at a time.
#pragma once

#include "core/problem.h"

namespace dmattn::cpu {

void forward(const Problem& problem, const dmattn_forward_args& args);
void backward(const Problem& problem, const dmattn_backward_args& args);
void delta(const Problem& problem, const dmattn_backward_args& args);
void quantise(const Problem& problem, const dmattn_quantise_args& args);
void reference(const Problem& problem, const dmattn_reference_args& args);

}  // namespace dmattn::cpu
