#include <fmt/format.h>

#include <memory>

#include "command.h"
#include "io/html_report.h"
#include "io/json_report.h"
#include "io/layer.h"
#include "options.h"
#include "output.h"
#include "table.h"

namespace dmattn::cli {
namespace {

constexpr uint64_t kMostTokens = 65536;
constexpr uint64_t kLargestHeadDim = 4096;

struct RowCommandOptions {
  explicit RowCommandOptions(CLI::App& app) : common(app, Numerics::paper) {}
  CommonOptions common;
  RowOptions row;
};

std::string row_text(const RowResult& result, const RunOptions& run) {
  std::string text =
      fmt::format("The last of {} queries, head_dim {}, seed {}; {} numerics, centred: {}\n\n", result.row.tokens,
                  result.row.head_dim, result.row.seed, name(run.numerics), name(run.centre));
  Table table({"mode", "delta", "sum dS > 0", "sum dS < 0", "row sum", "share of sum |dS|"});
  for (const auto& [mode, row] : result.modes) {
    table.add({std::string(name(mode)), fixed(row.delta), fixed(row.sum_positive), fixed(row.sum_negative),
               scientific(row.row_sum), percent(row.share)});
  }
  text += table.text();
  text += fmt::format(
      "\n  Row sum of dS under the stale delta, and where it comes from:\n"
      "    probabilities were rounded in the forward pass  {:>10}\n"
      "    dO was rounded for dP, but not for delta        {:>10}\n"
      "    the rest: O was stored in BF16                  {:>10}\n"
      "\n  In exact arithmetic the row sums to zero: softmax does not see a shift of all its logits. A delta that is\n"
      "  built from other operands than dS leaves a sum, and pushes dQ along the mean of the keys the row looks at.\n",
      scientific(result.split_probability), scientific(result.split_gradient), scientific(result.split_remainder));
  return text;
}

int run_row(const RowCommandOptions& options) {
  const RunOptions run = options.common.run();
  RowOptions row = options.row;
  row.seed = options.common.seed(row.seed);
  check_head_dim(row.head_dim, run.numerics, "--head-dim");
  const OutputFile page(options.common.html(), "--html");
  const RowResult result = worked_row(row, run);
  if (page) page.write(row_html(result, {run, options.common.device()}));
  print_out(options.common.json() ? row_json(result, run, options.common.device()) + "\n" : row_text(result, run));
  return kDone;
}

}  // namespace

Command add_row(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("row", "The worked row: one row of dS under each mode's delta");
  const auto options = std::make_shared<RowCommandOptions>(*app);
  app->add_option("--tokens", options->row.tokens, "Keys of the row")
      ->type_name("N")
      ->check(whole_number(1, kMostTokens))
      ->capture_default_str();
  app->add_option("--head-dim", options->row.head_dim, "Head dimension")
      ->type_name("D")
      ->check(whole_number(1, kLargestHeadDim))
      ->capture_default_str();
  app->footer(
      "Examples:\n"
      "  dmattn row\n"
      "  dmattn row --tokens 16 --head-dim 64 --seed 3 --json\n"
      "  dmattn row --mode stale --mode matched --ablation bf16_dp");
  return {app, [options] { return run_row(*options); }};
}

}  // namespace dmattn::cli
