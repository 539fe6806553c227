// The part of the backward that makes its operands, for those who look at them.
#pragma once

#include "core/problem.h"
#include "cuda/kernels/kernels.h"
#include "cuda/schedule/workspace.h"

namespace dmattn::cuda {

// All operands, and delta' of the mode: what dmattn_delta stops after.
void queue_backward_operands(const Launch& launch, const Problem& problem, const dmattn_backward_args& args,
                             const BackwardPlan& plan);

}  // namespace dmattn::cuda
