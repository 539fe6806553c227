// libFuzzer: any bytes as a safetensors file, read up to the layer that probe would measure. InvalidValue is the only
// way out besides success, its message is one line, and a layer that comes out has the sizes it claims.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "core/error.h"
#include "io/layer.h"
#include "io/safetensors.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const dmattn::Layer& layer) {
  const auto rows = static_cast<size_t>(layer.batch * layer.q_tokens),
             keys = static_cast<size_t>(layer.batch * layer.k_tokens);
  const auto q_row = static_cast<size_t>(layer.q_heads * layer.head_dim),
             k_row = static_cast<size_t>(layer.kv_heads * layer.head_dim);
  require(layer.q.size() == rows * q_row && layer.d_o.size() == rows * q_row);
  require(layer.k.size() == keys * k_row && layer.v.size() == keys * k_row);
  require(layer.q_heads % layer.kv_heads == 0 && layer.head_dim >= 1 && layer.softmax_scale > 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const auto archive = dmattn::safetensors::Archive::from_bytes(bytes, "fuzz");
    check(dmattn::read_layer(archive, {}));
    dmattn::LayerOptions some;
    some.heads = {0};
    check(dmattn::read_layer(archive, some));
  } catch (const dmattn::InvalidValue& error) {
    const std::string line = error.what();
    require(!line.empty() && line.find('\n') == std::string::npos);
  }
  return 0;
}
