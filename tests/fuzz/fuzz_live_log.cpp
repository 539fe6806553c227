// libFuzzer: any bytes as a live probe's log, read, summed up and printed as document and page. InvalidValue is the
// only way out besides success, its message is one line without control characters, and what comes out is complete.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "core/error.h"
#include "io/live_report.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const dmattn::LiveReport& report) {
  require(!report.steps.empty());
  for (const dmattn::LiveLayerSeries& layer : report.layers) {
    require(layer.entropy.size() == report.steps.size() && layer.gain_share.size() == report.steps.size());
    for (const auto& [mode, series] : layer.modes) require(series.error_dv.size() == report.steps.size());
  }
  for (const dmattn::LiveChannel& one : report.channels)
    require(one.consistency >= 0 && one.consistency <= 1 + 1e-12 && one.steps >= 1);
  require(nlohmann::json::accept(dmattn::live_report_json(report, "fuzz")));
  require(dmattn::live_report_html(report, "fuzz").find("</html>") != std::string::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::istringstream in(std::string(reinterpret_cast<const char*>(data), size));
  try {
    check(dmattn::live_report(dmattn::parse_live_log(in, "fuzz")));
  } catch (const dmattn::InvalidValue& error) {
    const std::string line = error.what();
    require(!line.empty());
    for (const char c : line) require(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
  }
  return 0;
}
