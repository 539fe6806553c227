// The GPUs of this machine, for `dmattn info`.
#pragma once

#include <string>
#include <vector>

namespace dmattn::cuda {

struct Gpu {
  std::string name;
  int major, minor;  // compute capability
  int multiprocessors;
  size_t memory_bytes;
};

struct Gpus {
  std::string problem;  // why there are none: no driver, no GPU; else empty
  int driver, runtime;  // CUDA versions, 1000 major + 10 minor; driver 0: none
  std::vector<Gpu> all;
};

Gpus gpus();  // throws nothing of its own

}  // namespace dmattn::cuda
