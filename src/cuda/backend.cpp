#include "cuda/backend.h"

#include "cuda/launch/device.h"
#include "cuda/schedule/workspace.h"

namespace dmattn::cuda {

bool available() { return any_usable_device(); }

WorkspaceSizes workspace_size(const Problem& problem) {
  const Launch launch = launch_on(problem);
  return {plan_forward(problem, nullptr).bytes, plan_backward(problem, launch.multiprocessors, nullptr).bytes};
}

size_t saved_codes_size(const Problem& problem) {
  launch_on(problem);  // the GPU must be one that runs the kernels
  return saved_codes_bytes(problem);
}

}  // namespace dmattn::cuda
