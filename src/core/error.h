// Failures that carry one line for the user. Thrown inside the library, turned into a status at the C ABI and into
// an exit code in the command line; never crosses the ABI.
#pragma once

#include <stdexcept>
#include <string>

namespace dmattn {

// A value is out of its domain: names the argument, what was expected and what came.
struct InvalidValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Well-formed, but not offered here.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The CUDA runtime refused a query or a launch: names what was tried and the runtime's own words.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace dmattn
