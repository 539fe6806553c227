#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "command.h"
#include "core/modes.h"
#include "cpu/tile_kernels.h"
#include "io/json_build.h"
#include "numerics/constants.h"
#include "output.h"

namespace dmattn::cli {
namespace {

// The instruction sets that decide which of the twin's inner loops run.
std::vector<std::string> cpu_features() {
  std::vector<std::string> features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) features.emplace_back("avx2");
  if (__builtin_cpu_supports("fma")) features.emplace_back("fma");
  if (__builtin_cpu_supports("avx512f")) features.emplace_back("avx512f");
  if (__builtin_cpu_supports("avx512bw")) features.emplace_back("avx512bw");
#endif
  return features;
}

unsigned cpu_threads() { return std::max(1u, std::thread::hardware_concurrency()); }

std::string info_json() {
  const ordered_json document{
      {"schema", "dmattn.info/1"},
      {"version", DMATTN_VERSION_STRING},
      {"numerics", name(Numerics::hopper)},
      {"centre", name(default_centre(Numerics::hopper))},
      {"device", "cpu"},
      {"numerics_version", numerics::kNumericsVersion},
      {"backends", ordered_json::array({"cpu"})},
      {"cpu", {{"threads", cpu_threads()}, {"features", cpu_features()}, {"loops", cpu::tile_kernels().name}}},
      {"gpus", ordered_json::array()}};
  return dumped(document, 2) + "\n";
}

std::string info_text() {
  const std::vector<std::string> features = cpu_features();
  return fmt::format(
      "dmattn {}, numerics version {}\n"
      "  backends   cpu (no CUDA backend in this build)\n"
      "  cpu        {} threads; {}; inner loops: {}\n"
      "  gpus       none looked for\n",
      DMATTN_VERSION_STRING, numerics::kNumericsVersion, cpu_threads(),
      features.empty() ? "no vector extensions used" : fmt::format("{}", fmt::join(features, ", ")),
      cpu::tile_kernels().name);
}

}  // namespace

Command add_info(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("info", "Version, numerics version, backends, CPU features, GPUs");
  const auto json = std::make_shared<bool>(false);
  app->add_flag("--json", *json, "Print a JSON document");
  return {app, [json] {
            print_out(*json ? info_json() : info_text());
            return kDone;
          }};
}

}  // namespace dmattn::cli
