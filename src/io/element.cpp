#include "io/element.h"

#include <bit>
#include <cstdint>

#include "core/error.h"
#include "numerics/bf16.h"

namespace dmattn {
namespace {

uint32_t word(const std::byte* at, int bytes) {
  uint32_t value = 0;
  for (int i = bytes; i-- > 0;) value = value << 8 | std::to_integer<uint32_t>(at[i]);
  return value;
}

// Exact: every half is a float. Subnormals are 24-bit-exact multiples of 2^-24.
float from_f16(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1fu, fraction = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

template <int kBytes, typename Decode>
void decode(std::span<const std::byte> bytes, float* out, Decode value_of) {
  for (std::size_t i = 0; i < bytes.size() / kBytes; ++i) out[i] = value_of(word(bytes.data() + i * kBytes, kBytes));
}

}  // namespace

void decode_to_bf16(safetensors::Dtype dtype, std::span<const std::byte> bytes, float* out) {
  using numerics::bf16_round;
  switch (dtype) {
    case safetensors::Dtype::bf16:
      return decode<2>(bytes, out, [](uint32_t bits) { return numerics::bf16_decode(static_cast<uint16_t>(bits)); });
    case safetensors::Dtype::f16:
      return decode<2>(bytes, out, [](uint32_t bits) { return bf16_round(from_f16(bits)); });
    case safetensors::Dtype::f32:
      return decode<4>(bytes, out, [](uint32_t bits) { return bf16_round(std::bit_cast<float>(bits)); });
    default: throw InvalidValue("dtype must be BF16, F16 or F32");
  }
}

}  // namespace dmattn
