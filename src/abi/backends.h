// The backends of this build.
#pragma once

#include "core/backend.h"

namespace dmattn {

const Backend& cpu_backend();
const Backend* cuda_backend();  // null: this build has none

inline const Backend& backend_of(const Problem& problem) {
  return problem.cuda ? *cuda_backend() : cpu_backend();  // check_problem refuses cuda where there is none
}

}  // namespace dmattn
