// GPU against twin through the C ABI: the measurements behind `dmattn certify` (docs/numerics.md, section 7).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/modes.h"

namespace dmattn::cli {

struct AgreementShape {
  int64_t batch, q_heads, kv_heads, head_dim, q_len, k_len;
  bool causal;
};

// One thing measured, and its limit.
struct AgreementCase {
  std::string name;
  AgreementShape shape;
  std::optional<Mode> mode;  // none: the same in every mode
  bool bitwise;              // else bounded
  double value, limit;       // bitwise: mismatches and 0; bounded: relative Frobenius distance; NaN: no number
  bool pass() const { return value <= limit; }
};

struct AgreementOptions {
  int device_index = 0;
  uint64_t seed = 0;
  bool quick = false;
  std::function<void(double fraction, const std::string& what)> progress;  // may be empty
};

// Throws on a call that fails; what differs is a case that does not pass.
std::vector<AgreementCase> measure_agreement(const AgreementOptions& options);

}  // namespace dmattn::cli
