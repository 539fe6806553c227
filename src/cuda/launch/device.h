// The GPU around a call: which one, whether it can run the kernels, whether a pointer is its memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "core/problem.h"
#include "cuda/kernels/kernels.h"

namespace dmattn::cuda {

// Throws DeviceError with the runtime's words; clears what the runtime remembers of it.
void check_cuda(cudaError_t error, const char* what);

// GPUs that run the kernels. Throws nothing.
bool any_usable_device();

// What a launch needs to know of the problem's GPU. Throws DeviceError without a driver or a GPU, InvalidValue for an
// index that is not there, Unsupported for a GPU that is not Hopper.
Launch launch_on(const Problem& problem);

// Makes the problem's GPU current while it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0, index_;
};

// A host pointer in a kernel is a fault that no later call recovers from; here it is a line that names the argument.
// NULL passes: whether a pointer may be missing is checked elsewhere.
void check_device_pointer(const Problem& problem, const void* pointer, const char* name, size_t alignment = 4);

// Memory that the caller brings for `needed` bytes of pieces (Layout): `name` is its pointer, `name`_bytes its size.
void check_memory(const Problem& problem, const void* memory, size_t bytes, size_t needed, const std::string& name);
inline void check_workspace(const Problem& problem, const void* workspace, size_t bytes, size_t needed) {
  check_memory(problem, workspace, bytes, needed, "args.workspace");
}
inline void check_codes(const Problem& problem, const dmattn_saved& saved, size_t needed) {
  check_memory(problem, saved.codes, saved.codes_bytes, needed, "saved.codes");
}

}  // namespace dmattn::cuda
