#include "abi/backends.h"

#include "cpu/backend.h"
#if defined(DMATTN_HAVE_CUDA)
#include "cuda/backend.h"
#endif

namespace dmattn {

const Backend& cpu_backend() {
  constexpr auto no_workspace = [](const Problem&) { return WorkspaceSizes{0, 0}; };  // host memory of its own
  constexpr auto no_codes = [](const Problem&) { return size_t{0}; };
  static constexpr Backend backend{[] { return true; }, no_workspace, no_codes,     cpu::forward,
                                   cpu::backward,       cpu::delta,   cpu::quantise};
  return backend;
}

const Backend* cuda_backend() {
#if defined(DMATTN_HAVE_CUDA)
  static constexpr Backend backend{cuda::available, cuda::workspace_size, cuda::saved_codes_size, cuda::forward,
                                   cuda::backward,  cuda::delta,          cuda::quantise};
  return &backend;
#else
  return nullptr;
#endif
}

}  // namespace dmattn
