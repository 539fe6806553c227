#include "command.h"
#include "core/error.h"

namespace dmattn::cli {

Command add_certify(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("certify", "Compare the GPU kernels with the twin (needs the CUDA backend)");
  return {
      app, []() -> int {
        throw Unsupported("certify compares a GPU with the twin and needs the CUDA backend, which this build lacks");
      }};
}

}  // namespace dmattn::cli
