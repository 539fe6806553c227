#include "options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/error.h"
#include "io/text.h"

namespace dmattn::cli {
namespace {

constexpr uint64_t kMostThreads = 1024;

template <class T>
bool parse_whole_text(const std::string& text, T& value) {
  const char* const end = text.data() + text.size();
  const auto [next, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && next == end;
}

Mode mode_named(const std::string& text) {
  if (const auto mode = mode_from_name(text)) return *mode;
  const bool ablation = ablation_from_name(text).has_value();
  throw InvalidValue(fmt::format("--mode: unknown mode {}: the modes are {}{}", in_quotes(text), mode_names(),
                                 ablation ? "; this one is an ablation, see --ablation" : ""));
}

Mode ablation_named(const std::string& text) {
  if (const auto mode = ablation_from_name(text)) return *mode;
  throw InvalidValue(
      fmt::format("--ablation: unknown ablation {}: the ablations are {}", in_quotes(text), ablation_names()));
}

void add_once(std::vector<Mode>& modes, Mode mode) {
  if (std::find(modes.begin(), modes.end(), mode) == modes.end()) modes.push_back(mode);
}

}  // namespace

CLI::Validator whole_number(uint64_t least, uint64_t most) {
  const auto check = [least, most](std::string& text) -> std::string {
    uint64_t value = 0;
    if (parse_whole_text(text, value) && value >= least && value <= most) return {};
    return fmt::format("must be a whole number from {} to {}, got {}", least, most, in_quotes(text));
  };
  return CLI::Validator(check, "");
}

CLI::Validator positive_number(double most) {
  const auto check = [most](std::string& text) -> std::string {
    double value = 0;
    // Down to the smallest normal float: the value is used in FP32.
    if (parse_whole_text(text, value) && value >= 1.2e-38 && value <= most) return {};
    return fmt::format("must be a finite number above 0, at most {}, got {}", most, in_quotes(text));
  };
  return CLI::Validator(check, "");
}

WorkedRow worked_example(RunOptions run, uint64_t seed) {
  run.progress = nullptr;
  run.numerics = Numerics::paper;
  run.centre = default_centre(Numerics::paper);
  run.modes.assign(kModes.begin(), kModes.end());
  return {worked_row({.seed = seed}, run), run};
}

CommonOptions::CommonOptions(CLI::App& app, Numerics default_numerics, bool offers_gpu)
    : numerics_(name(default_numerics)), offers_gpu_(offers_gpu) {
  app.add_option("--numerics", numerics_, "paper (the article's recipe) or hopper (what the kernels compute)")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--centre", centre_,
                 "What is centred before the cast: none, k or, in hopper, qk [k in paper, qk in hopper]")
      ->type_name("NAME");
  add_list(app, "--mode", modes_, "A mode to run, repeatable: " + mode_names() + " [all four]")->type_name("NAME");
  add_list(app, "--ablation", ablations_, "Also run, repeatable, paper numerics only: " + ablation_names())
      ->type_name("NAME");
  app.add_option("--seed", seed_, "Seed of the random inputs")->type_name("N")->check(whole_number(0, UINT64_MAX));
  app.add_option("--threads", threads_, "CPU threads, 0 for all; never changes a number")
      ->type_name("N")
      ->check(whole_number(0, kMostThreads))
      ->capture_default_str();
  app.add_option("--device", device_,
                 offers_gpu
                     ? "What is measured: cpu, the twin, whose numbers are the GPU's within docs/numerics.md, or "
                       "cuda, the kernels on a Hopper GPU [cpu]"
                     : "cpu, the twin that is measured, whose numbers are the GPU's within docs/numerics.md [cpu]")
      ->type_name("NAME");
  if (offers_gpu)
    app.add_option("--device-index", device_index_, "GPU of --device cuda, counted from 0")
        ->type_name("N")
        ->check(whole_number(0, 1023))
        ->capture_default_str();
  app.add_flag("--json", json_, "Print a JSON document in place of the table");
  app.add_option("--html", html_, "Also write a self-contained page with the plots")->type_name("FILE");
}

void CommonOptions::check_device() const {
  if (device_.empty() || device_ == "cpu") return;
  if (!on_gpu()) throw InvalidValue("--device: must be cpu or cuda, got " + in_quotes(device_));
#if defined(DMATTN_HAVE_CUDA)
  if (!offers_gpu_)
    throw Unsupported(
        "--device: what is measured is the CPU twin, whose numbers are the GPU's within docs/numerics.md, section 7; "
        "expected cpu, got cuda");
  if (!ablations_.empty())
    throw Unsupported("--ablation: the GPU's kernels have no ablations, use --device cpu --numerics paper");
  if (numerics_ == name(Numerics::paper))
    throw Unsupported("--numerics: expected hopper with --device cuda, got paper (it runs on the CPU alone)");
#else
  throw Unsupported("--device: no CUDA backend in this build, use --device cpu");
#endif
}

RunOptions CommonOptions::run() const {
  check_device();
  RunOptions run;
  const auto numerics = numerics_from_name(numerics_);
  if (!numerics) throw InvalidValue("--numerics: must be paper or hopper, got " + in_quotes(numerics_));
  run.numerics = *numerics;
  run.centre = default_centre(run.numerics);
  if (!centre_.empty()) {
    const auto centre = centre_from_name(centre_);
    if (!centre) throw InvalidValue("--centre: must be none, k or qk, got " + in_quotes(centre_));
    run.centre = *centre;
    if (run.numerics == Numerics::paper && run.centre == Centre::qk) {
      throw InvalidValue("--centre: paper numerics centres none or k, got qk (add --numerics hopper)");
    }
  }
  if (!modes_.empty()) run.modes.clear();
  for (const std::string& mode : modes_) add_once(run.modes, mode_named(mode));
  for (const std::string& ablation : ablations_) add_once(run.modes, ablation_named(ablation));
  if (!ablations_.empty() && run.numerics != Numerics::paper) {
    throw InvalidValue("--ablation: offered in paper numerics only, add --numerics paper");
  }
  std::sort(run.modes.begin(), run.modes.end());
  run.threads = threads_;
  return run;
}

}  // namespace dmattn::cli
