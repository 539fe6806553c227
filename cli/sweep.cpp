#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "command.h"
#include "core/error.h"
#include "io/html_report.h"
#include "io/json_report.h"
#include "io/layer.h"
#include "io/text.h"
#include "options.h"
#include "output.h"
#include "progress.h"
#include "table.h"

namespace dmattn::cli {
namespace {

constexpr uint64_t kMostElements = uint64_t{1} << 28;  // of one operand: 1 GiB as floats

// What the user gave; what is missing depends on the input family.
struct SweepCommandOptions {
  explicit SweepCommandOptions(CLI::App& app) : common(app, Numerics::paper) {}
  CommonOptions common;
  std::vector<std::string> inputs;
  std::vector<double> spreads;
  std::optional<int64_t> heads, tokens, head_dim, seeds;
  std::optional<double> sink_share;
  bool full = false;
};

// The sink demonstration of docs/method.md has sizes of its own.
SweepOptions sizes(const SweepCommandOptions& options, const std::string& family) {
  const bool sink = family == "sink";
  SweepOptions sweep;
  sweep.families = {family};
  if (sink) {
    sweep.heads = 2;
    sweep.tokens = 2048;
    sweep.head_dim = 128;
    sweep.seeds = 8;
    sweep.spreads = {1};
  }
  sweep.heads = static_cast<int>(options.heads.value_or(sweep.heads));
  sweep.tokens = options.tokens.value_or(sweep.tokens);
  sweep.head_dim = options.head_dim.value_or(sweep.head_dim);
  sweep.seeds = static_cast<int>(options.seeds.value_or(sweep.seeds));
  sweep.first_seed = options.common.seed(sweep.first_seed);
  if (!options.spreads.empty()) sweep.spreads = options.spreads;
  sweep.causal = !options.full;
  if (sink && options.sink_share) {
    const double share = *options.sink_share;
    sweep.sink_logit = std::log(static_cast<double>(sweep.tokens) * share / (1 - share)) + 0.5;
  }
  const uint64_t elements =
      static_cast<uint64_t>(sweep.heads) * static_cast<uint64_t>(sweep.tokens) * static_cast<uint64_t>(sweep.head_dim);
  if (elements > kMostElements) {
    throw InvalidValue(
        fmt::format("--heads x --tokens x --head-dim must be at most {}, got {}", kMostElements, elements));
  }
  return sweep;
}

std::vector<std::string> families(const SweepCommandOptions& options) {
  if (options.inputs.empty()) return {"gaussian", "outlier"};
  std::vector<std::string> families;
  for (const std::string& family : options.inputs) {
    if (family != "gaussian" && family != "outlier" && family != "sink") {
      throw InvalidValue("--inputs: must be gaussian, outlier or sink, got " + in_quotes(family));
    }
    if (std::find(families.begin(), families.end(), family) == families.end()) families.push_back(family);
  }
  return families;
}

std::string sweep_text(const std::vector<SweepRow>& rows, const RunOptions& run) {
  std::string text = fmt::format("{} numerics, centred: {}; median over rows, then over seeds\n", name(run.numerics),
                                 name(run.centre));
  for (std::size_t at = 0; at < rows.size();) {
    const SweepRow& first = rows[at];
    Table table({"mode", "residual", "after cast", "column sum", "O", "dQ", "dK", "dV"});
    for (; at < rows.size() && rows[at].inputs == first.inputs && rows[at].spread == first.spread; ++at) {
      const SweepRow& row = rows[at];
      table.add({std::string(name(row.mode)), scientific(row.residual), scientific(row.residual_after_cast),
                 scientific(row.column_sum), percent(row.error_o), percent(row.error_dq), percent(row.error_dk),
                 percent(row.error_dv)});
    }
    text += fmt::format("\n{} inputs, spread {}\n\n{}", first.inputs, first.spread, table.text());
  }
  return text +
         "\n  residual    |sum of a row of dS| / sum |dS|: 0 in exact arithmetic, for every row; then after the cast\n"
         "              of dS to E4M3. The wider the logits spread, the staler the shortcut's delta.\n"
         "  column sum  |sum over keys of dK| / sum |dK|, dS before the cast: 0 in exact arithmetic.\n"
         "  O ... dV    relative error (Frobenius) against FP64.\n";
}

std::vector<SweepRow> measure(const SweepCommandOptions& options, const std::vector<std::string>& families,
                              RunOptions run) {
  Progress progress;
  const auto show = progress.callback();
  std::vector<SweepRow> rows;
  for (std::size_t i = 0; i < families.size(); ++i) {
    if (show) {
      run.progress = [&, i](double fraction, const std::string& what) {
        show((static_cast<double>(i) + fraction) / static_cast<double>(families.size()), what);
      };
    }
    const std::vector<SweepRow> part = sweep(sizes(options, families[i]), run);
    rows.insert(rows.end(), part.begin(), part.end());
  }
  return rows;
}

int run_sweep(const SweepCommandOptions& options) {
  const RunOptions run = options.common.run();
  const std::vector<std::string> wanted = families(options);
  for (const std::string& family : wanted) {
    check_head_dim(sizes(options, family).head_dim, run.numerics, "--head-dim");
  }
  const OutputFile page(options.common.html(), "--html");
  const std::vector<SweepRow> rows = measure(options, wanted, run);
  const std::string device = options.common.device();
  if (page) {
    const WorkedRow row = worked_example(run, options.common.seed(RowOptions{}.seed));
    page.write(sweep_html(rows, row, {run, device}));
  }
  print_out(options.common.json() ? sweep_json(rows, run, device) + "\n" : sweep_text(rows, run));
  return kDone;
}

}  // namespace

Command add_sweep(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("sweep", "The residual table: modes on random inputs of growing spread");
  const auto options = std::make_shared<SweepCommandOptions>(*app);
  SweepCommandOptions& o = *options;
  add_list(*app, "--inputs", o.inputs, "gaussian, outlier or sink, repeatable [gaussian and outlier]")
      ->type_name("NAME");
  add_list(*app, "--spread", o.spreads, "Standard deviation of q, repeatable [1, 2, 4; sink: 1]")
      ->type_name("X")
      ->check(positive_number(1e4));
  app->add_option("--heads", o.heads, "Heads [4; sink: 2]")->type_name("N")->check(whole_number(1, 64));
  app->add_option("--tokens", o.tokens, "Tokens [512; sink: 2048]")->type_name("N")->check(whole_number(1, 65536));
  app->add_option("--head-dim", o.head_dim, "Head dimension [64; sink: 128]")
      ->type_name("D")
      ->check(whole_number(1, 4096));
  app->add_option("--seeds", o.seeds, "Seeds, from --seed on [6; sink: 8]")
      ->type_name("N")
      ->check(whole_number(1, 1000));
  app->add_option("--sink-share", o.sink_share, "Share of a long row that the sink's key 0 holds [about 0.87]")
      ->type_name("X")
      ->check(positive_number(0.9999));
  app->add_flag("--full", o.full, "Full attention [causal]");
  app->footer(
      "Examples:\n"
      "  dmattn sweep\n"
      "  dmattn sweep --numerics hopper --json\n"
      "  dmattn sweep --inputs sink --mode stale --mode matched");
  return {app, [options] { return run_sweep(*options); }};
}

}  // namespace dmattn::cli
