// One line on stderr that says how far the work is; silent unless stderr is a terminal.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace dmattn::cli {

class Progress {
 public:
  Progress();
  ~Progress();  // wipes the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // What RunOptions::progress wants; empty where nobody watches. Valid while this object lives.
  std::function<void(double, const std::string&)> callback();

 private:
  void show(double fraction, const std::string& what);

  bool terminal_;
  bool shown_ = false;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace dmattn::cli
