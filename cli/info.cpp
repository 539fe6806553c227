#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "command.h"
#include "core/modes.h"
#include "cpu/tile_kernels.h"
#if defined(DMATTN_HAVE_CUDA)
#include "cuda/devices.h"
#endif
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

// What this build knows of GPUs: one line or more for people, an array and a backend's name for machines.
struct GpuReport {
  std::string backends, text;
  ordered_json backend_names, gpus;
};

#if defined(DMATTN_HAVE_CUDA)
std::string cuda_version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

GpuReport gpu_report() {
  GpuReport report{"cpu, cuda", "", ordered_json::array({"cpu", "cuda"}), ordered_json::array()};
  const cuda::Gpus found = cuda::gpus();
  for (const cuda::Gpu& gpu : found.all) {
    const double gib = static_cast<double>(gpu.memory_bytes) / (1 << 30);
    report.text += fmt::format("{}{}, capability {}.{}, {} multiprocessors, {:.0f} GiB, driver for CUDA {}",
                               report.text.empty() ? "" : "\n             ", gpu.name, gpu.major, gpu.minor,
                               gpu.multiprocessors, gib, cuda_version(found.driver));
    report.gpus.push_back({{"name", gpu.name},
                           {"capability", fmt::format("{}.{}", gpu.major, gpu.minor)},
                           {"multiprocessors", gpu.multiprocessors},
                           {"memory_bytes", gpu.memory_bytes},
                           {"driver_cuda", cuda_version(found.driver)}});
  }
  if (report.text.empty()) report.text = "none: " + (found.problem.empty() ? "no device" : found.problem);
  return report;
}
#else
GpuReport gpu_report() {
  return {"cpu (no CUDA backend in this build)", "none looked for", ordered_json::array({"cpu"}),
          ordered_json::array()};
}
#endif

std::string info_json() {
  const GpuReport report = gpu_report();
  const ordered_json document{
      {"schema", "dmattn.info/1"},
      {"version", DMATTN_VERSION_STRING},
      {"numerics", name(Numerics::hopper)},
      {"centre", name(default_centre(Numerics::hopper))},
      {"device", "cpu"},
      {"numerics_version", numerics::kNumericsVersion},
      {"backends", report.backend_names},
      {"cpu", {{"threads", cpu_threads()}, {"features", cpu_features()}, {"loops", cpu::tile_kernels().name}}},
      {"gpus", report.gpus}};
  return dumped(document, 2) + "\n";
}

std::string info_text() {
  const std::vector<std::string> features = cpu_features();
  const GpuReport report = gpu_report();
  return fmt::format(
      "dmattn {}, numerics version {}\n"
      "  backends   {}\n"
      "  cpu        {} threads; {}; inner loops: {}\n"
      "  gpus       {}\n",
      DMATTN_VERSION_STRING, numerics::kNumericsVersion, report.backends, cpu_threads(),
      features.empty() ? "no vector extensions used" : fmt::format("{}", fmt::join(features, ", ")),
      cpu::tile_kernels().name, report.text);
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
