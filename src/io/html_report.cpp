// Puts the page together: pieces of src/io/report, and the measurement as JSON that the page's script draws.
#include "io/html_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string_view>

#include "io/json_build.h"
#include "io/report_assets.h"

namespace dmattn {
namespace {

constexpr std::size_t kMostKeysDrawn = 96;  // bars still wider than a hair

std::string_view asset(std::string_view name) {
  const std::string_view text = report_asset(name);
  if (text.empty()) throw std::logic_error(fmt::format("report piece {} is missing", name));
  return text;
}

std::string joined(const std::vector<std::string_view>& names) {
  std::string text;
  for (const std::string_view name : names) text += asset(name);
  return text;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

// JSON that cannot end the script element it stands in: no '<' is left, in whatever string it came.
std::string script_safe(const ordered_json& data) {
  std::string out;
  for (const char c : dumped(data, -1)) {
    if (c == '<') {
      out += "\\u003c";
    } else {
      out += c;
    }
  }
  return out;
}

// One pass, so that text that was filled in is never searched for names again.
std::string filled(std::string_view page, const std::map<std::string_view, std::string>& values) {
  std::string out;
  while (!page.empty()) {
    const std::size_t open = page.find("{{"), close = page.find("}}", open);
    if (open == std::string_view::npos || close == std::string_view::npos) break;
    out += page.substr(0, open);
    out += values.at(page.substr(open + 2, close - open - 2));
    page.remove_prefix(close + 2);
  }
  return out.append(page);
}

// The keys to draw: all of a short row, else those with the largest |dS| of the first mode, in order.
std::vector<std::size_t> keys_drawn(const RowResult& row) {
  if (row.modes.empty()) return {};
  const std::vector<double>& d_s = row.modes.begin()->second.d_s;
  std::vector<std::size_t> keys(d_s.size());
  std::iota(keys.begin(), keys.end(), std::size_t{0});
  if (keys.size() <= kMostKeysDrawn) return keys;
  std::partial_sort(keys.begin(), keys.begin() + kMostKeysDrawn, keys.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(-std::abs(d_s[a]), a) < std::pair(-std::abs(d_s[b]), b);
  });
  keys.resize(kMostKeysDrawn);
  std::sort(keys.begin(), keys.end());
  return keys;
}

ordered_json row_data(const RowResult& row, const RunOptions& options, const std::string& device) {
  ordered_json data = row_document(row, options, device);
  const std::vector<std::size_t> keys = keys_drawn(row);
  data["seed"] = row.row.seed;
  data["keys"] = keys;
  for (const auto& [mode, one] : row.modes) {
    ordered_json d_s = ordered_json::array();
    for (const std::size_t key : keys) d_s.push_back(number(one.d_s.at(key)));
    data["modes"][std::string(name(mode))]["d_s"] = d_s;
  }
  return data;
}

}  // namespace

std::string report_page(const std::string& kind, const std::string& title,
                        const std::vector<std::string_view>& sections, const ordered_json& document,
                        const ordered_json& row) {
  const ordered_json data{{"kind", kind}, {"document", document}, {"row", row}};
  return filled(
      asset("page.html"),
      {{"version", DMATTN_VERSION_STRING},
       {"title", escaped(title)},
       {"kind", kind},
       {"style", std::string(asset("style.css"))},
       {"sections", joined(sections)},
       {"data", script_safe(data)},
       {"script", joined({"util.js", "residual.js", "heads.js", "row.js", "sweep.js", "live.js", "main.js"})}});
}

std::string probe_html(const ProbeResult& result, const Layer& layer, const std::string& file, const WorkedRow& row,
                       const ReportContext& context) {
  const ordered_json document = probe_document(result, layer, context.options, file, context.device);
  return report_page("probe", "dmattn probe: " + file,
                     {"head_probe.html", "delta.html", "row.html", "residual.html", "heads.html", "errors.html",
                      "passes.html", "foot.html"},
                     document, row_data(row.result, row.options, "cpu"));  // the worked row is the twin's
}

std::string sweep_html(const std::vector<SweepRow>& rows, const WorkedRow& row, const ReportContext& context) {
  return report_page(
      "sweep", "dmattn sweep", {"head_sweep.html", "delta.html", "row.html", "sweep.html", "passes.html", "foot.html"},
      sweep_document(rows, context.options, context.device), row_data(row.result, row.options, context.device));
}

std::string row_html(const RowResult& row, const ReportContext& context) {
  return report_page("row", "dmattn row", {"head_row.html", "delta.html", "row.html", "passes.html", "foot.html"},
                     row_document(row, context.options, context.device),
                     row_data(row, context.options, context.device));
}

}  // namespace dmattn
