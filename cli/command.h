// A subcommand: adds its options to the parser and hands back what to run. One file per command.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace dmattn::cli {

inline constexpr int kDone = 0;
inline constexpr int kCheckFailed = 1;
inline constexpr int kBadInput = 2;

struct Command {
  CLI::App* app;
  std::function<int()> run;  // returns the exit code; throws InvalidValue or Unsupported on bad input
};

Command add_row(CLI::App& parent);
Command add_sweep(CLI::App& parent);
Command add_probe(CLI::App& parent);
Command add_report(CLI::App& parent);
Command add_certify(CLI::App& parent);
Command add_info(CLI::App& parent);

}  // namespace dmattn::cli
