#include "abi/backends.h"

#include "cpu/backend.h"
#if defined(DMATTN_HAVE_CUDA)
#include "cuda/backend.h"
#endif

namespace dmattn {

const Backend& cpu_backend() {
  static constexpr Backend backend{
      [] { return true; }, [](const Problem&) { return WorkspaceSizes{0, 0}; },  // host memory of its own
      cpu::forward,        cpu::backward,
      cpu::delta,          cpu::quantise};
  return backend;
}

const Backend* cuda_backend() {
#if defined(DMATTN_HAVE_CUDA)
  static constexpr Backend backend{cuda::available, cuda::workspace_size, cuda::forward,
                                   cuda::backward,  cuda::delta,          cuda::quantise};
  return &backend;
#else
  return nullptr;
#endif
}

}  // namespace dmattn
