#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <optional>

#include "abi/layer_kernels.h"
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

constexpr std::size_t kMostHeadsShown = 32;  // a screenful; --json has them all

struct ProbeOptions {
  explicit ProbeOptions(CLI::App& app) : common(app, Numerics::hopper, true) {}
  CommonOptions common;
  std::string file, heads, softmax_scale;
  bool full = false;
};

std::string describe(const Layer& layer, const RunOptions& run, const std::string& file, bool on_gpu) {
  const std::string keys = layer.k_tokens == layer.q_tokens ? "" : fmt::format(", {} keys", layer.k_tokens);
  const std::string batch = layer.batch == 1 ? "" : fmt::format("{} sequences, ", layer.batch);
  return fmt::format(
      "{}\n  {}{} tokens{}, {} query and {} key heads of dimension {}, softmax scale {:.4g}, {}\n"
      "  {} numerics, centred: {}{}\n",
      one_line(in_quotes(file)), batch, layer.q_tokens, keys, layer.q_heads, layer.kv_heads, layer.head_dim,
      layer.softmax_scale, layer.causal ? "causal" : "full attention", name(run.numerics), name(run.centre),
      on_gpu ? ", computed by the GPU" : "");
}

std::string mode_table(const ProbeResult& result) {
  Table table({"mode", "residual", "after cast", "column sum", "O", "dQ", "dK", "dV", "worst head", "its dQ"});
  for (const auto& [mode, r] : result.modes) {
    table.add({std::string(name(mode)), scientific(r.residual.median), scientific(r.residual_after_cast.median),
               scientific(r.column_sum), percent(r.error.o), percent(r.error.dq), percent(r.error.dk),
               percent(r.error.dv), r.worst_head < 0 ? "-" : fmt::format("{}", r.worst_head),
               percent(r.worst_head_dq)});
  }
  return "\n" + table.text() +
         "\n  residual    |sum of a row of dS| / sum |dS|, median over rows: 0 in exact arithmetic, for every row.\n"
         "              What is left of it after the cast of dS to E4M3 stands beside it.\n"
         "  column sum  |sum over keys of dK| / sum |dK|, dS before the cast: 0 in exact arithmetic.\n"
         "  O ... dV    relative error (Frobenius) against FP64, over all heads.\n";
}

double largest_dq(const HeadResult& head) {
  double largest = -1;
  for (const auto& [mode, result] : head.modes) {
    if (std::isfinite(result.error.dq)) largest = std::max(largest, result.error.dq);
  }
  return largest;
}

std::string head_table(const ProbeResult& result) {
  std::vector<const HeadResult*> heads;
  for (const HeadResult& head : result.heads) heads.push_back(&head);
  const bool cut = heads.size() > kMostHeadsShown;
  if (cut) {
    std::stable_sort(heads.begin(), heads.end(),
                     [](const HeadResult* a, const HeadResult* b) { return largest_dq(*a) > largest_dq(*b); });
    heads.resize(kMostHeadsShown);
  }
  std::vector<std::string> header{"head"};
  for (const auto& [mode, r] : result.modes) header.emplace_back(name(mode));
  Table table(header);
  for (const HeadResult* head : heads) {
    std::vector<std::string> row{fmt::format("{}", head->head)};
    for (const auto& [mode, r] : result.modes) {
      const auto found = head->modes.find(mode);
      row.push_back(found == head->modes.end() ? "-" : percent(found->second.error.dq));
    }
    table.add(row);
  }
  return fmt::format(
      "\n  Error of dQ by query head{}\n\n{}",
      cut ? fmt::format(" (the {} worst of {}; --json has all)", kMostHeadsShown, result.heads.size()) : "",
      table.text());
}

// The sentence that a reader should take away.
std::string verdict(const ProbeResult& result) {
  const ModeResult* worst = nullptr;
  Mode mode = Mode::stale;
  for (const auto& [one, r] : result.modes) {
    if (r.worst_head >= 0 && (worst == nullptr || r.worst_head_dq > worst->worst_head_dq)) {
      worst = &r;
      mode = one;
    }
  }
  if (worst == nullptr)
    return result.nonfinite_heads.empty() ? "\n  Nothing could be measured: no row has two keys and a gradient.\n"
                                          : "\n  Nothing could be measured: every head was left out.\n";
  std::string text = fmt::format("\n  Worst: head {}, whose dQ is off by {} of its norm in {}", worst->worst_head,
                                 percent(worst->worst_head_dq), name(mode));
  for (const HeadResult& head : result.heads) {
    if (head.head != worst->worst_head) continue;
    for (const auto& [one, r] : head.modes) {
      if (one != mode) text += fmt::format(", {} in {}", percent(r.error.dq), name(one));
    }
  }
  return text + ".\n";
}

std::string probe_text(const ProbeResult& result, const Layer& layer, const RunOptions& run, const std::string& file,
                       bool on_gpu) {
  return describe(layer, run, file, on_gpu) + mode_table(result) + head_table(result) + verdict(result);
}

std::optional<float> softmax_scale(const std::string& text) {
  if (text.empty()) return std::nullopt;
  float value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);  // the option's check has read it before
  return value;
}

ProbeResult measure(const Layer& layer, const RunOptions& run, const CommonOptions& common) {
  if (!common.on_gpu()) return probe(layer, run);
  abi::AbiKernels kernels({true, common.device_index()}, run);
  return probe(layer, run, &kernels);
}

int run_probe(const ProbeOptions& options) {
  RunOptions run = options.common.run();
  if (options.common.on_gpu())
    abi::check_gpu(options.common.device_index(), "probe with --device cuda measures the kernels of a CUDA GPU");
  LayerOptions wanted;
  wanted.causal = !options.full;
  wanted.softmax_scale = softmax_scale(options.softmax_scale);
  if (!options.heads.empty()) wanted.heads = parse_heads(options.heads);
  const OutputFile page(options.common.html(), "--html");
  if (page.is(options.file)) throw InvalidValue("--html: names the input file, which would be overwritten");
  const Layer layer = read_layer(safetensors::Archive::open(options.file), wanted);
  check_head_dim(layer.head_dim, run.numerics, in_quotes(options.file) + ": head_dim");

  ProbeResult result;
  {
    Progress progress;
    run.progress = progress.callback();
    result = measure(layer, run, options.common);
  }
  restore_head_numbers(result, wanted.heads);
  if (page) {
    const WorkedRow row = worked_example(run, options.common.seed(RowOptions{}.seed));
    page.write(probe_html(result, layer, options.file, row, {run, options.common.device()}));
  }
  print_out(options.common.json() ? probe_json(result, layer, run, options.file, options.common.device()) + "\n"
                                  : probe_text(result, layer, run, options.file, options.common.on_gpu()));
  if (result.nonfinite_heads.empty()) return kDone;
  say_on_stderr(fmt::format("dmattn: left out heads {}: NaN or infinity in the input, or logits beyond 2^24\n",
                            fmt::join(result.nonfinite_heads, ", ")));
  return kCheckFailed;
}

}  // namespace

Command add_probe(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("probe", "Measure a real layer: q, k, v, d_o from a safetensors file");
  const auto options = std::make_shared<ProbeOptions>(*app);
  app->add_option("FILE", options->file, "Tensors q, d_o [[B,] N, Hq, D] and k, v [[B,] N, Hk, D]; BF16, F16 or F32")
      ->required()
      ->type_name("");
  app->add_flag("--full", options->full, "Full attention [causal]");
  app->add_option("--softmax-scale", options->softmax_scale, "[the file's softmax_scale metadata, else 1/sqrt(D)]")
      ->type_name("X")
      ->check(positive_number(3.4e38));
  app->add_option("--heads", options->heads, "Query heads to measure, such as 0,3,6-11 [all]")->type_name("LIST");
  app->footer(
      "Examples:\n"
      "  dmattn probe layer.safetensors\n"
      "  dmattn probe layer.safetensors --html report.html\n"
      "  dmattn probe layer.safetensors --device cuda\n"
      "  dmattn probe layer.safetensors --numerics paper --mode stale --mode matched --json");
  return {app, [options] { return run_probe(*options); }};
}

}  // namespace dmattn::cli
