// Matrix products of the twin. Compiled once per instruction set (DMATTN_ISA names it); see tile_kernels.h.
// Nothing here may instantiate an inline function that other files share: the linker could pick this file's copy.

#include <cstdint>

#include "cpu/isa.h"
#include "cpu/isa_gemm.h"
#include "numerics/constants.h"
#include "numerics/hd.h"

namespace dmattn::cpu::DMATTN_ISA {
namespace {

// ---- the tensor core's accumulator -------------------------------------------------------------------------------
//
// Per output and step of 32: E = the largest of the products' exponents (sum of the operands' exponents; a
// subnormal has -6; a zero operand takes no part) and the accumulator's. Every term is truncated toward zero to a
// multiple of 2^(E - 13), at least of 2^-126, the sum is exact, then truncated to 13 fraction bits. Lanes are outputs.

constexpr int kLaneWidth = kVectorBytes / 4;
constexpr int kGroups = 4;                   // vectors of outputs worked on together
constexpr int kSpan = kLaneWidth * kGroups;  // outputs per pass
constexpr int kExponentOffset = 32;          // an exponent in [-6, 8] is kept as e + 32, zero as 0
constexpr int kSmallestPair = 2 * (kExponentOffset - 6);
constexpr int kMaxDepth = 512;  // longest k of one call

using F = Vec<float, kLaneWidth>;
using I = Vec<int32_t, kLaneWidth>;
using U8 = Vec<uint8_t, kSpan>;
using U8Group = Vec<uint8_t, kLaneWidth>;

inline __attribute__((always_inline)) uint8_t exponent_of(float code) {
  const uint32_t biased = (numerics::float_bits(code) >> 23) & 0xffu;  // subnormal codes are normal floats
  const int exponent = static_cast<int>(biased) - 127;
  const int clamped = exponent < -6 ? -6 : exponent;
  return static_cast<uint8_t>(biased == 0 ? 0 : clamped + kExponentOffset);
}

inline __attribute__((always_inline)) F step(const float* a, const float* b, int64_t ldb, const U8Group* largest, F sum,
                                             int group) {
  const I sum_bits = reinterpret_cast<I>(sum);
  const I sum_biased = (sum_bits >> 23) & 0xff;
  I pair = __builtin_convertvector(largest[group], I);
  // Exponent E, biased: of the products, or the accumulator's. No unit lies below 2^-126, FP32's smallest normal.
  constexpr int kSmallest = numerics::kAccumulatorFractionBits + 1;
  pair = pair >= kSmallestPair ? pair - 2 * kExponentOffset + 127 : I{} + kSmallest;
  const I unit = (sum_biased > pair ? sum_biased : pair) - numerics::kAccumulatorFractionBits;
  const F inverse = reinterpret_cast<F>((254 - unit) << 23);
  I total = __builtin_convertvector(sum * inverse, I);  // truncates toward zero
  for (int kk = 0; kk < numerics::kTensorCoreStep; ++kk) {
    const F right = load<F>(b + kk * ldb + group * kLaneWidth);
    total += __builtin_convertvector(right * a[kk] * inverse, I);  // a product is exact, and may be zero
  }
  const F exact = __builtin_convertvector(total, F);  // below 2^21: exact
  const I kept = reinterpret_cast<I>(exact) & ~((1 << (23 - numerics::kAccumulatorFractionBits)) - 1);
  return reinterpret_cast<F>(kept) * reinterpret_cast<F>(unit << 23);
}

void tensor_core_span(int m, int k, const float* a, int64_t lda, const uint8_t* a_exponents, const float* b,
                      int64_t ldb, float* c, int64_t ldc, bool accumulate, int width) {
  alignas(64) uint8_t b_exponents[kMaxDepth * kSpan];
  alignas(64) float tail[kMaxDepth * kSpan];
  if (width < kSpan) {  // a narrow last span works on a padded copy
    for (int kk = 0; kk < k; ++kk)
      for (int j = 0; j < kSpan; ++j) tail[kk * kSpan + j] = j < width ? b[kk * ldb + j] : 0.0f;
    b = tail;
    ldb = kSpan;
  }
  for (int kk = 0; kk < k; ++kk)
    for (int j = 0; j < kSpan; ++j) b_exponents[kk * kSpan + j] = exponent_of(b[kk * ldb + j]);
  for (int r = 0; r < m; ++r) {
    F sum[kGroups];
    alignas(64) float row[kSpan] = {};
    if (accumulate)
      for (int j = 0; j < width; ++j) row[j] = c[r * ldc + j];
    for (int g = 0; g < kGroups; ++g) sum[g] = load<F>(row + g * kLaneWidth);
    for (int k0 = 0; k0 < k; k0 += numerics::kTensorCoreStep) {
      U8 largest = {};
      for (int kk = k0; kk < k0 + numerics::kTensorCoreStep; ++kk) {
        const U8 pair = load<U8>(b_exponents + kk * kSpan) + a_exponents[r * k + kk];
        largest = pair > largest ? pair : largest;
      }
      alignas(64) uint8_t bytes[kSpan];
      store<U8>(bytes, largest);
      U8Group groups[kGroups];
      for (int g = 0; g < kGroups; ++g) groups[g] = load<U8Group>(bytes + g * kLaneWidth);
      for (int g = 0; g < kGroups; ++g) sum[g] = step(a + r * lda + k0, b + k0 * ldb, ldb, groups, sum[g], g);
    }
    for (int g = 0; g < kGroups; ++g) store<F>(row + g * kLaneWidth, sum[g]);
    for (int j = 0; j < width; ++j) c[r * ldc + j] = row[j];
  }
}

// At most 64 rows at a time, so that the exponents fit on the stack.
void product_tensor_core(int m, int n, int k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                         int64_t ldc, bool accumulate) {
  constexpr int kMaxRows = 64;
  uint8_t a_exponents[kMaxRows * kMaxDepth];
  for (int r0 = 0; r0 < m; r0 += kMaxRows) {
    const int rows = m - r0 < kMaxRows ? m - r0 : kMaxRows;
    for (int r = 0; r < rows; ++r)
      for (int kk = 0; kk < k; ++kk) a_exponents[r * k + kk] = exponent_of(a[(r0 + r) * lda + kk]);
    for (int j = 0; j < n; j += kSpan)
      tensor_core_span(rows, k, a + r0 * lda, lda, a_exponents, b + j, ldb, c + r0 * ldc + j, ldc, accumulate,
                       n - j < kSpan ? n - j : kSpan);
  }
}

}  // namespace

void fill_products(TileKernels& table) {
  table.product_f32 = product<float>;  // two roundings a term, on every instruction set
  table.product_f64 = product<double>;
  table.product_tensor_core = product_tensor_core;
}

}  // namespace dmattn::cpu::DMATTN_ISA
