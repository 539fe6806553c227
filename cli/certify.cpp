#include <fmt/format.h>

#include <memory>

#include "agreement.h"
#include "command.h"
#include "core/error.h"
#include "options.h"
#include "output.h"
#if defined(DMATTN_HAVE_CUDA)
#include <cmath>
#include <cstdlib>
#include <map>

#include "abi/caller.h"
#include "cuda/host_call.h"
#include "io/json_build.h"
#include "numerics/constants.h"
#include "progress.h"
#include "revision.h"
#include "table.h"
#endif

namespace dmattn::cli {
namespace {

struct CertifyOptions {
  AgreementOptions agreement;
  std::string out;
  bool json = false;
};

#if defined(DMATTN_HAVE_CUDA)

// What is unknown is null. A build outside git takes the environment's word.
ordered_json known(std::string text, const char* variable = nullptr) {
  if (text.empty() && variable != nullptr)
    if (const char* const value = std::getenv(variable)) text = value;
  return text.empty() ? ordered_json(nullptr) : ordered_json(text);
}

ordered_json case_json(const AgreementCase& one) {
  const AgreementShape& s = one.shape;
  return {{"name", one.name},
          {"shape",
           {{"batch", s.batch},
            {"q_heads", s.q_heads},
            {"kv_heads", s.kv_heads},
            {"head_dim", s.head_dim},
            {"q_len", s.q_len},
            {"k_len", s.k_len},
            {"causal", s.causal}}},
          {"mode", one.mode ? ordered_json(name(*one.mode)) : ordered_json(nullptr)},
          {"grade", one.bitwise ? "bitwise" : "bounded"},
          {"value", number(one.value)},
          {"limit", one.limit},
          {"mismatches", one.bitwise ? ordered_json(static_cast<int64_t>(one.value)) : ordered_json(nullptr)},
          {"pass", one.pass()}};
}

std::string certificate_json(const std::vector<AgreementCase>& cases, const cuda::GpuIdentity& gpu,
                             const AgreementOptions& options) {
  ordered_json document{{"schema", "dmattn.certificate/1"},
                        {"version", DMATTN_VERSION_STRING},
                        {"numerics", name(Numerics::hopper)},
                        {"centre", name(default_centre(Numerics::hopper))},
                        {"device", "cuda"},
                        {"numerics_version", numerics::kNumericsVersion},
                        {"gpu", known(gpu.name)},
                        {"driver", known(gpu.driver)},
                        {"cuda", gpu.runtime},
                        {"nvcc", known(DMATTN_NVCC_VERSION)},
                        {"flags", known(DMATTN_NVCC_FLAGS)},
                        {"commit", known(DMATTN_BUILT_COMMIT, "DMATTN_COMMIT")},
                        {"tree",
                         {{"src/cuda", known(DMATTN_BUILT_TREE_CUDA, "DMATTN_TREE_CUDA")},
                          {"src/numerics", known(DMATTN_BUILT_TREE_NUMERICS, "DMATTN_TREE_NUMERICS")}}},
                        {"seed", options.seed},
                        {"cases", ordered_json::array()}};
  for (const AgreementCase& one : cases) document["cases"].push_back(case_json(one));
  return dumped(document, 1) + "\n";
}

// Shapes together: the worst value of each thing that was measured, by mode.
struct Line {
  std::string name, mode;
  bool bitwise;
  double worst, limit;
  int runs, failed;
};

std::vector<Line> summary(const std::vector<AgreementCase>& cases) {
  std::vector<Line> lines;
  std::map<std::pair<std::string, std::string>, size_t> places;
  for (const AgreementCase& one : cases) {
    const std::string mode = one.mode ? std::string(name(*one.mode)) : "-";
    const auto [place, is_new] = places.try_emplace({one.name, mode}, lines.size());
    if (is_new) lines.push_back({one.name, mode, one.bitwise, one.value, one.limit, 0, 0});
    Line& line = lines[place->second];
    if (std::isnan(one.value) || one.value > line.worst) line.worst = one.value;
    ++line.runs;
    line.failed += one.pass() ? 0 : 1;
  }
  return lines;
}

std::string certificate_text(const std::vector<AgreementCase>& cases, const cuda::GpuIdentity& gpu) {
  Table table({"case", "mode", "grade", "shapes", "failed", "worst", "limit"});
  int failed = 0;
  for (const Line& line : summary(cases)) {
    const auto shown = [&](double value) {
      return line.bitwise && std::isfinite(value) ? fmt::format("{:.0f}", value) : scientific(value);
    };
    table.add({line.name, line.mode, line.bitwise ? "bitwise" : "bounded", fmt::format("{}", line.runs),
               fmt::format("{}", line.failed), shown(line.worst), shown(line.limit)});
    failed += line.failed;
  }
  return fmt::format("{}, driver {}, CUDA {}: against the twin, numerics version {}\n\n{}\n  {} cases: {}\n", gpu.name,
                     gpu.driver.empty() ? "unknown" : gpu.driver, gpu.runtime, numerics::kNumericsVersion, table.text(),
                     cases.size(), failed == 0 ? "all pass" : fmt::format("{} FAILED", failed));
}

int run_certify(CertifyOptions options) {
  abi::check_gpu(options.agreement.device_index, "certify compares a CUDA GPU with the twin");
  const OutputFile file(options.out, "--out");
  const cuda::GpuIdentity gpu = cuda::gpu_identity(options.agreement.device_index);
  std::vector<AgreementCase> cases;
  {
    Progress progress;
    options.agreement.progress = progress.callback();
    cases = measure_agreement(options.agreement);
  }
  const std::string document = certificate_json(cases, gpu, options.agreement);
  if (file) file.write(document);
  print_out(options.json ? document : certificate_text(cases, gpu));
  for (const AgreementCase& one : cases)
    if (!one.pass()) return kCheckFailed;
  return kDone;
}

#else

int run_certify(const CertifyOptions&) {
  throw Unsupported("certify compares a GPU with the twin and needs the CUDA backend, which this build lacks");
}

#endif

}  // namespace

Command add_certify(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("certify", "Compare the GPU kernels with the twin (needs the CUDA backend)");
  const auto options = std::make_shared<CertifyOptions>();
  app->add_flag("--json", options->json, "Print the certificate, a JSON document, in place of the table");
  app->add_option("--out", options->out, "Also write the certificate")->type_name("FILE");
  app->add_option("--seed", options->agreement.seed, "Seed of the random inputs")
      ->type_name("N")
      ->check(whole_number(0, UINT64_MAX))
      ->capture_default_str();
  app->add_flag("--quick", options->agreement.quick, "One shape for each head dimension");
  app->add_option("--device-index", options->agreement.device_index, "GPU, counted from 0")
      ->type_name("N")
      ->check(whole_number(0, 1023))
      ->capture_default_str();
  app->footer(
      "Examples:\n"
      "  dmattn certify\n"
      "  dmattn certify --quick --json\n"
      "  dmattn certify --out gpu.json");
  return {app, [options] { return run_certify(*options); }};
}

}  // namespace dmattn::cli
