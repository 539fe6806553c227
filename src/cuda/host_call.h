// What a caller of the C ABI on CUDA has to bring along, for `dmattn certify`: memory of a GPU, and the GPU's name. The
// library itself never allocates. Every failure of the runtime is a DeviceError.
#pragma once

#include <cstddef>
#include <string>

namespace dmattn::cuda {

// Memory of one GPU; every byte is 0xff (NaN in every format) until something is written.
class DeviceMemory {
 public:
  DeviceMemory(int device_index, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return data_; }
  // All of it. On the default stream and after all that was queued there; read() reports faults of kernels as well.
  void write(const void* from) const;
  void read(void* to) const;

 private:
  int device_index_;
  size_t bytes_;
  void* data_ = nullptr;
};

// Waits for the GPU; throws with `what` in front if anything queued there failed.
void wait_for_gpu(int device_index, const char* what);

struct GpuIdentity {
  std::string name;
  std::string driver;   // as nvidia-smi prints it; empty if nothing tells
  std::string runtime;  // CUDA runtime that this program holds: "13.0"
};

GpuIdentity gpu_identity(int device_index);

}  // namespace dmattn::cuda
