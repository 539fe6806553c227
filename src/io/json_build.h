// The pieces that JSON documents and the report page's data share.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/analysis.h"

namespace dmattn {

using ordered_json = nlohmann::ordered_json;  // documents keep the order in which a reader wants them

// JSON has no NaN and no infinity.
inline ordered_json number(double value) { return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr); }

// A float as the shortest decimal that reads back to it, not with the digits of its double.
inline ordered_json number(float value) { return number(std::strtod(fmt::format("{}", value).c_str(), nullptr)); }

inline ordered_json json_of(const Statistic& statistic) {
  return {{"median", number(statistic.median)}, {"p95", number(statistic.p95)}, {"max", number(statistic.max)}};
}

inline ordered_json json_of(const Errors& error) {
  return {{"o", number(error.o)}, {"dq", number(error.dq)}, {"dk", number(error.dk)}, {"dv", number(error.dv)}};
}

// A page of these sections (pieces of src/io/report) whose script draws `document`; `row` is the worked row, or null.
std::string report_page(const std::string& kind, const std::string& title,
                        const std::vector<std::string_view>& sections, const ordered_json& document,
                        const ordered_json& row);

// The documents of json_report.h before they become text.
ordered_json probe_document(const ProbeResult& result, const Layer& layer, const RunOptions& options,
                            const std::string& file, const std::string& device);
ordered_json sweep_document(const std::vector<SweepRow>& rows, const RunOptions& options, const std::string& device);
ordered_json row_document(const RowResult& result, const RunOptions& options, const std::string& device);

// Names from files may hold any bytes; the document must still be UTF-8.
inline std::string dumped(const ordered_json& document, int indent) {
  return document.dump(indent, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace dmattn
