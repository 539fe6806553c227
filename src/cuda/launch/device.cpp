#include "cuda/launch/device.h"

#include <fmt/format.h>

#include <vector>

#include "core/error.h"
#include "cuda/schedule/workspace.h"

namespace dmattn::cuda {
namespace {

constexpr int kMajor = 9, kMinor = 0;  // sm_90a runs on nothing else

struct Device {
  int major, minor, multiprocessors;
  bool usable() const { return major == kMajor && minor == kMinor; }
};

std::vector<Device> query_devices() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "device: no GPU can be used");
  std::vector<Device> devices(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    Device& device = devices[static_cast<size_t>(i)];
    check_cuda(cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, i), "device");
    check_cuda(cudaDeviceGetAttribute(&device.minor, cudaDevAttrComputeCapabilityMinor, i), "device");
    check_cuda(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, i), "device");
  }
  return devices;
}

// Asked once: a process's GPUs do not change. A failure is not remembered.
const std::vector<Device>& devices() {
  static const std::vector<Device> all = query_devices();
  return all;
}

const char* kind_of(cudaMemoryType type) {
  return type == cudaMemoryTypeHost ? "pinned host memory" : "host memory that CUDA does not know";
}

}  // namespace

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)));
}

bool any_usable_device() {
  try {
    for (const Device& device : devices())
      if (device.usable()) return true;
  } catch (const DeviceError&) {  // no driver, or no GPU
  }
  return false;
}

Launch launch_on(const Problem& problem) {
  const std::vector<Device>& all = devices();
  if (static_cast<size_t>(problem.device_index) >= all.size())
    throw InvalidValue(
        fmt::format("device_index: expected 0 ... {}, got {}", static_cast<int>(all.size()) - 1, problem.device_index));
  const Device& device = all[static_cast<size_t>(problem.device_index)];
  if (!device.usable())
    throw Unsupported(fmt::format("device: expected a GPU of compute capability {}.{} (Hopper), got {}.{}", kMajor,
                                  kMinor, device.major, device.minor));
  return {static_cast<cudaStream_t>(problem.stream), static_cast<int32_t>(problem.head_dim), device.multiprocessors,
          static_cast<int32_t>(problem.device_index)};
}

CurrentDevice::CurrentDevice(int index) : index_(index) {
  check_cuda(cudaGetDevice(&previous_), "device: the current GPU");
  if (previous_ != index_) check_cuda(cudaSetDevice(index_), "device_index");
}

CurrentDevice::~CurrentDevice() {
  if (previous_ != index_) cudaSetDevice(previous_);
}

void check_device_pointer(const Problem& problem, const void* pointer, const char* name, size_t alignment) {
  if (pointer == nullptr) return;
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0)
    throw InvalidValue(fmt::format("{}: expected an address aligned to {} bytes", name, alignment));
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), name);
  if (attributes.type == cudaMemoryTypeManaged) return;
  if (attributes.type != cudaMemoryTypeDevice)
    throw InvalidValue(
        fmt::format("{}: expected memory of GPU {}, got {}", name, problem.device_index, kind_of(attributes.type)));
  if (attributes.device != problem.device_index)
    throw InvalidValue(fmt::format("{}: expected memory of GPU {}, got memory of GPU {}", name, problem.device_index,
                                   attributes.device));
}

void check_memory(const Problem& problem, const void* memory, size_t bytes, size_t needed, const std::string& name) {
  if (bytes < needed) throw InvalidValue(fmt::format("{}_bytes: expected at least {}, got {}", name, needed, bytes));
  if (needed == 0) return;
  check_pointer(memory, name);
  check_device_pointer(problem, memory, name.c_str(), Layout::kAlignment);
}

}  // namespace dmattn::cuda
