#include "cuda/host_call.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "cuda/launch/device.h"

namespace dmattn::cuda {
namespace {

// NVML is where nvidia-smi has it from, and it is there where files of the driver are not (containers).
std::string driver_from_nvml() {
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {};
  using Call = int (*)();
  using Ask = int (*)(char*, unsigned);
  const auto start = reinterpret_cast<Call>(dlsym(library, "nvmlInit_v2"));
  const auto stop = reinterpret_cast<Call>(dlsym(library, "nvmlShutdown"));
  const auto ask = reinterpret_cast<Ask>(dlsym(library, "nvmlSystemGetDriverVersion"));
  std::string version;
  if (start != nullptr && stop != nullptr && ask != nullptr && start() == 0) {
    char text[96] = "";
    if (ask(text, sizeof text) == 0) version = text;
    stop();
  }
  dlclose(library);
  return version;
}

// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  ...": the first word of digits and dots.
std::string driver_from_proc() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string word;
  while (file >> word)
    if (word.find('.') != std::string::npos &&
        std::all_of(word.begin(), word.end(), [](char c) { return c == '.' || (c >= '0' && c <= '9'); }))
      return word;
  return {};
}

}  // namespace

DeviceMemory::DeviceMemory(int device_index, size_t bytes) : device_index_(device_index), bytes_(bytes) {
  if (bytes_ == 0) return;
  const CurrentDevice current(device_index_);
  check_cuda(cudaMalloc(&data_, bytes_), "GPU memory");
  if (const cudaError_t error = cudaMemset(data_, 0xff, bytes_); error != cudaSuccess) {
    cudaFree(data_);  // no destructor runs for what was not made
    check_cuda(error, "filling of GPU memory");
  }
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) cudaFree(data_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_index_(other.device_index_), bytes_(other.bytes_), data_(other.data_) {
  other.data_ = nullptr;
}

void DeviceMemory::write(const void* from) const {
  if (bytes_ == 0) return;
  const CurrentDevice current(device_index_);
  check_cuda(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice), "copy to the GPU");
}

void DeviceMemory::read(void* to) const {
  if (bytes_ == 0) return;
  const CurrentDevice current(device_index_);
  check_cuda(cudaMemcpy(to, data_, bytes_, cudaMemcpyDeviceToHost), "copy from the GPU");
}

void wait_for_gpu(int device_index, const char* what) {
  const CurrentDevice current(device_index);
  check_cuda(cudaGetLastError(), what);
  check_cuda(cudaDeviceSynchronize(), what);
}

GpuIdentity gpu_identity(int device_index) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device_index), "device");
  int runtime = 0;
  check_cuda(cudaRuntimeGetVersion(&runtime), "CUDA runtime");
  std::string driver = driver_from_nvml();
  if (driver.empty()) driver = driver_from_proc();
  return {properties.name, driver, fmt::format("{}.{}", runtime / 1000, runtime % 1000 / 10)};
}

}  // namespace dmattn::cuda
