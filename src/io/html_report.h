// The measurements as one self-contained page for people: plots, tables and what they mean. No network, light and
// dark. Foreign text (file names) is data in the page, never markup.
#pragma once

#include <string>
#include <vector>

#include "analysis/analysis.h"

namespace dmattn {

struct ReportContext {
  RunOptions options;
  std::string device;
};

// The worked example that explains the method on the page, and how it was run.
struct WorkedRow {
  RowResult result;
  RunOptions options;
};

std::string probe_html(const ProbeResult& result, const Layer& layer, const std::string& file, const WorkedRow& row,
                       const ReportContext& context);
std::string sweep_html(const std::vector<SweepRow>& rows, const WorkedRow& row, const ReportContext& context);
std::string row_html(const RowResult& row, const ReportContext& context);

}  // namespace dmattn
