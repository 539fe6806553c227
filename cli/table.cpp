#include "table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace dmattn::cli {
namespace {

constexpr const char* kGap = "   ";

}  // namespace

Table::Table(std::vector<std::string> header) : rows_{std::move(header)} {}

void Table::add(std::vector<std::string> row) {
  row.resize(rows_.front().size());
  rows_.push_back(std::move(row));
}

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_.front().size());
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line = fmt::format("  {:<{}}", row[0], widths[0]);
    for (std::size_t i = 1; i < row.size(); ++i) line += fmt::format("{}{:>{}}", kGap, row[i], widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string scientific(double value) { return std::isfinite(value) ? fmt::format("{:.2e}", value) : "-"; }

std::string percent(double fraction) {
  if (!std::isfinite(fraction)) return "-";
  const double value = 100 * fraction;
  const double size = std::abs(value);
  if (size != 0 && size < 0.01) return fmt::format("{:.1e} %", value);
  return fmt::format("{:.{}f} %", value, size < 10 ? 2 : size < 100 ? 1 : 0);
}

std::string fixed(double value) { return std::isfinite(value) ? fmt::format("{:+.4f}", value) : "-"; }

}  // namespace dmattn::cli
