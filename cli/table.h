// Plain-text tables: the first column to the left, numbers to the right.
#pragma once

#include <string>
#include <vector>

namespace dmattn::cli {

class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add(std::vector<std::string> row);
  std::string text() const;  // ends with a line break

 private:
  std::vector<std::vector<std::string>> rows_;  // the first is the header
};

// Numbers for people; "-" where nothing could be measured.
std::string scientific(double value);  // 1.14e-02
std::string percent(double fraction);  // three significant digits: 8.16 %, 1230 %
std::string fixed(double value);       // signed, four decimals

}  // namespace dmattn::cli
