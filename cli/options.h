// The options that row, sweep and probe share, and the checks that option values go through.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/html_report.h"

namespace dmattn::cli {

// Validators whose message says what was expected and what came.
CLI::Validator whole_number(uint64_t least, uint64_t most);
CLI::Validator positive_number(double most);

// The row that a page explains the method with: the four modes in paper numerics, whatever the page measures.
WorkedRow worked_example(RunOptions run, uint64_t seed);

class CommonOptions {
 public:
  // `offers_gpu`: --device may be cuda.
  CommonOptions(CLI::App& app, Numerics default_numerics, bool offers_gpu = false);

  // Throws InvalidValue or Unsupported. `threads` also bounds OpenMP's own loops.
  RunOptions run() const;

  bool json() const { return json_; }
  const std::string& html() const { return html_; }
  uint64_t seed(uint64_t fallback) const { return seed_.value_or(fallback); }
  std::string device() const { return on_gpu() ? "cuda" : "cpu"; }
  bool on_gpu() const { return device_ == "cuda"; }
  int device_index() const { return device_index_; }

 private:
  void check_device() const;

  std::string numerics_, centre_, device_, html_;
  std::vector<std::string> modes_, ablations_;
  std::optional<uint64_t> seed_;
  int threads_ = 0, device_index_ = 0;
  bool json_ = false, offers_gpu_ = false;
};

// An option that may be given several times, one value or a comma-separated list each time. CLI11's own reading of a
// list would swallow the file name that follows.
template <class T>
CLI::Option* add_list(CLI::App& app, const std::string& name, std::vector<T>& values, const std::string& help) {
  return app.add_option(name, values, help)->type_size(1)->allow_extra_args(false)->delimiter(',');
}

}  // namespace dmattn::cli
