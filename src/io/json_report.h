// The measurements as JSON documents (docs/schemas.md). The command line and the C ABI both print these, so the same
// measurement reads the same everywhere. Numbers that could not be measured are null.
#pragma once

#include <string>
#include <vector>

#include "analysis/analysis.h"

namespace dmattn {

// dmattn.probe/1. `file` is what the document names as its input, "" where there is none.
std::string probe_json(const ProbeResult& result, const Layer& layer, const RunOptions& options,
                       const std::string& file, const std::string& device);

// dmattn.sweep/1
std::string sweep_json(const std::vector<SweepRow>& rows, const RunOptions& options, const std::string& device);

// dmattn.row/1
std::string row_json(const RowResult& result, const RunOptions& options, const std::string& device);

}  // namespace dmattn
