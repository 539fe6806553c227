#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>

#include "command.h"
#include "core/error.h"
#include "io/live_report.h"
#include "io/text.h"
#include "output.h"
#include "table.h"

namespace dmattn::cli {
namespace {

constexpr std::size_t kMostLayersShown = 64;  // --json has them all
constexpr std::size_t kMostChannelsShown = 12;
constexpr std::size_t kMostGapsShown = 64;
constexpr std::size_t kLongestName = 40;  // of a layer, in a table

struct ReportOptions {
  std::string file, html;
  bool json = false;
};

// A layer's name for one cell: its end says more than its beginning.
std::string cell(const std::string& name) {
  std::size_t from = name.size() <= kLongestName ? 0 : name.size() - (kLongestName - 3);
  while (from > 0 && from < name.size() && (static_cast<unsigned char>(name[from]) & 0xc0u) == 0x80u)
    ++from;  // not within a character
  const std::string text = in_quotes(std::string_view(name).substr(from));
  return (from > 0 ? "..." : "") + text.substr(1, text.size() - 2);
}

double last(const std::vector<double>& values) {
  const auto found = std::find_if(values.rbegin(), values.rend(), [](double value) { return std::isfinite(value); });
  return found == values.rend() ? kNaN : *found;
}

std::string plain(double value) { return std::isfinite(value) ? fmt::format("{:.2f}", value) : "-"; }

std::string layer_table(const LiveReport& report) {
  Table table({"layer", "mode", "residual", "after cast", "mean", "O", "dQ", "dK", "dV", "entropy", "gain"});
  std::size_t shown = 0;
  for (const LiveLayerSeries& layer : report.layers) {
    if (shown++ == kMostLayersShown) break;
    for (const auto& [mode, series] : layer.modes)
      table.add({cell(layer.layer), cell(mode), scientific(last(series.residual)),
                 scientific(last(series.residual_after_cast)), scientific(last(series.mean_after_cast)),
                 percent(last(series.error_o)), percent(last(series.error_dq)), percent(last(series.error_dk)),
                 percent(last(series.error_dv)), plain(last(layer.entropy)), percent(last(layer.gain_share))});
  }
  return fmt::format(
      "\n  Last value of each layer{}\n\n{}"
      "\n  residual    signed sum of a row of dS / sum |dS|, root mean square over rows, then over heads the mean;\n"
      "              beside it after the cast of dS to E4M3, and the signed mean there.\n"
      "  O ... dV    relative error (Frobenius) against FP64, of the worst measured head.\n"
      "  gain        largest share of the sum of (g_q g_k)^2 in one channel of the QK-norms.\n",
      report.layers.size() > kMostLayersShown
          ? fmt::format(" (the first {} of {}; --json has all)", kMostLayersShown, report.layers.size())
          : "",
      table.text());
}

std::string channel_table(const LiveReport& report) {
  if (report.channels.empty()) return "";
  Table table({"layer", "head", "mode", "channel", "mean share", "consistency", "steps"});
  for (std::size_t i = 0; i < std::min(kMostChannelsShown, report.channels.size()); ++i) {
    const LiveChannel& one = report.channels[i];
    table.add({cell(one.layer), fmt::format("{}", one.head), cell(one.mode), fmt::format("{}", one.channel),
               scientific(one.share), plain(one.consistency), fmt::format("{}", one.steps)});
  }
  return "\n  Key channels that are pushed most: mean over steps of sum dK / sum |dK|, after the cast\n\n" +
         table.text();
}

std::string gap_lines(const LiveReport& report) {
  std::string text;
  std::size_t shown = 0;
  for (const LiveGap& gap : report.not_measured) {
    if (shown++ == kMostGapsShown) {
      text +=
          fmt::format("\n  {} more were not measured; --json has all\n", report.not_measured.size() - kMostGapsShown);
      break;
    }
    text += fmt::format("\n  Not measured in {} steps: {}: {}\n", gap.steps, cell(gap.layer), in_quotes(gap.reason));
  }
  return text;
}

std::string report_text(const LiveReport& report, const std::string& file) {
  const std::string unfinished = report.unfinished ? "\n  its last line has no end and was left out" : "";
  return fmt::format("{}\n  {} measured steps, {} to {}, in {} runs; {} layers{}\n", one_line(in_quotes(file)),
                     report.steps.size(), report.steps.front(), report.steps.back(), report.runs, report.layers.size(),
                     unfinished) +
         layer_table(report) + channel_table(report) + gap_lines(report);
}

int run_report(const ReportOptions& options) {
  const OutputFile page(options.html, "--html");
  if (page.is(options.file)) throw InvalidValue("--html: names the log, which would be overwritten");
  LiveReport report;
  try {
    report = live_report(read_live_log(options.file));
  } catch (const std::bad_alloc&) {
    throw InvalidValue(in_quotes(options.file) + ": out of memory; report on a part of the log");
  }
  if (page) page.write(live_report_html(report, options.file));
  print_out(options.json ? live_report_json(report, options.file) + "\n" : report_text(report, options.file));
  return kDone;
}

}  // namespace

Command add_report(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("report", "What a live probe's log says about a training");
  const auto options = std::make_shared<ReportOptions>();
  app->add_option("FILE", options->file, "The log: JSON lines that probe(model, path=...) has written")
      ->required()
      ->type_name("");
  app->add_flag("--json", options->json, "Print a JSON document in place of the tables");
  app->add_option("--html", options->html, "Also write a self-contained page with the plots")->type_name("FILE");
  app->footer(
      "Examples:\n"
      "  dmattn report probe.jsonl\n"
      "  dmattn report probe.jsonl --html training.html");
  return {app, [options] { return run_report(*options); }};
}

}  // namespace dmattn::cli
