// From a safetensors file to the layer that analysis measures.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/analysis.h"
#include "io/safetensors.h"

namespace dmattn {

struct LayerOptions {
  bool causal = true;
  std::optional<float> softmax_scale;  // else the file's metadata, else 1 / sqrt(head_dim)
  std::vector<int64_t> heads;          // query heads to keep, rising, each once; empty: all
};

// Reads tensors q and d_o [[B,] N, Hq, D], k and v [[B,] Nk, Hk, D] of BF16, F16 or F32, rounded to BF16 (nearest
// even; NaN and infinity stay what they are). Throws InvalidValue.
//
// A selection of heads that takes equally many query heads of each KV head it touches stays grouped; any other gives
// each query head its own copy of its KV head.
Layer read_layer(const safetensors::Archive& archive, const LayerOptions& options);

// "0,3,6-11" to a rising list of head numbers, each once. Throws InvalidValue.
std::vector<int64_t> parse_heads(std::string_view text);

// Numbers of the selected heads in place of their positions, in a result measured on the selection.
void restore_head_numbers(ProbeResult& result, const std::vector<int64_t>& heads);

// Throws InvalidValue where these numerics do not offer the head dimension.
void check_head_dim(int64_t head_dim, Numerics numerics, const std::string& what);

}  // namespace dmattn
