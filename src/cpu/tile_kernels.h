// The twin's inner loops, compiled once per instruction set and picked at run time. Every instruction set gives the
// same bits: sums of codes are exact or modelled, fused multiply-adds are asked for by name, and reductions run over
// 16 fixed lanes.
#pragma once

#include <cstdint>
#include <vector>

namespace dmattn::cpu {

inline constexpr int kLanes = 16;  // padding of every inner dimension, and lanes of a reduction

// Row-major matrices with leading dimensions in elements. n is a multiple of 16.
// C[m][n] = A[m][k] B[k][n], plus C's old value if accumulate.
template <class T>
using ProductFn = void (*)(int m, int n, int k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                           bool accumulate);

struct ExpSums {
  float unrounded;  // sum of 2^y
  float rounded;    // sum of its E4M3 codes; exact: at most 64 multiples of 2^-9 up to 2^8
};

struct TileKernels {
  const char* name;
  ProductFn<float> product_f32;
  // The same for operands whose products FP32 holds exactly (codes, BF16 values): faster, and the same bits.
  ProductFn<float> product_exact;
  ProductFn<double> product_f64;
  // The tensor core's FP8 product: A and B hold code values, k is a multiple of 32 (docs/numerics.md, "tensor core").
  ProductFn<float> product_tensor_core;

  float (*amax)(const float* x, int64_t n);                              // NaN and infinity sticky; 0 for n = 0
  void (*cast)(const float* x, float inverse, int64_t n, float* codes);  // codes = E4M3(x * inverse), as values
  float (*row_max)(const float* x, int n);                               // -infinity for n = 0; x has no NaN
  // y = fma(score, factor, offset), p = 2^y, code = E4M3(p) for n <= 64 columns; columns up to 64 are zeroed. One
  // offset for each 16 columns.
  ExpSums (*exp_row)(const float* score, float factor, const float* offset, int n, float* p, float* code);
  // p = 2^fma(score, factor, -reference), zero from column n on; returns its sum.
  float (*exp_row_plain)(const float* score, float factor, float reference, int n, float* p);
  // ds = (p * p_scale) * fma(dp, dp_scale, -delta), one p_scale for each 16 columns; n columns, the rest of 64 zeroed.
  // Returns amax.
  float (*ds_row)(const float* p, const float* p_scale, const float* dp, float dp_scale, float delta, int n, float* ds);
  // sum_j p_j x_j over n columns.
  float (*dot_row)(const float* p, const float* x, int n);
  void (*axpy)(const float* x, float factor, int64_t n, float* y);        // y = fma(x, factor, y)
  void (*add_scaled)(const float* x, float factor, int64_t n, float* y);  // y = y + x * factor, two roundings
};

// The best table for this machine; the environment's DMATTN_ISA=base|avx2|avx512 asks for a lesser one.
const TileKernels& tile_kernels();

// Every table that this machine can run, the best first: for tests that compare them.
std::vector<TileKernels> all_tile_kernels();

}  // namespace dmattn::cpu
