// From the ABI's tensors to the plain data that probe takes.
#pragma once

#include "analysis/analysis.h"
#include "core/problem.h"

namespace dmattn {

Layer probe_layer(const Problem& problem, const dmattn_probe_args& args);
RunOptions probe_options(const Problem& problem, uint32_t modes);  // modes: 1 << dmattn_mode, 0 = all

}  // namespace dmattn
