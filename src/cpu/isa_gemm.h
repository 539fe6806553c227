// Matrix products in registers: included by the files that are compiled once per instruction set, and nowhere else.
// Whether a term is one rounding or two is the including file's flag (-ffp-contract), which src/CMakeLists.txt sets.
#pragma once

#include <cstdint>

namespace dmattn::cpu::DMATTN_ISA {
namespace {

template <class T, int N>
struct VecOf {
  typedef T type __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T)), may_alias));
};
template <class T, int N>
using Vec = typename VecOf<T, N>::type;

template <class V, class T>
inline __attribute__((always_inline)) V load(const T* p) {
  return *reinterpret_cast<const V*>(p);
}
template <class V, class T>
inline __attribute__((always_inline)) void store(T* p, V v) {
  *reinterpret_cast<V*>(p) = v;
}

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRows = 4, kColumns = 4;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
constexpr int kRows = 4, kColumns = 2;
#else
constexpr int kVectorBytes = 16;
constexpr int kRows = 4, kColumns = 2;
#endif

// kR x (kC vectors) of C in registers, over all of k.
template <class T, int kR, int kC>
void block(int k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));
  using V = Vec<T, kWidth>;
  V sum[kR][kC];
  for (int r = 0; r < kR; ++r)
    for (int j = 0; j < kC; ++j) sum[r][j] = accumulate ? load<V>(c + r * ldc + j * kWidth) : V{};
  for (int kk = 0; kk < k; ++kk) {
    V right[kC];
    for (int j = 0; j < kC; ++j) right[j] = load<V>(b + kk * ldb + j * kWidth);
    for (int r = 0; r < kR; ++r) {
      const T left = a[r * lda + kk];
      for (int j = 0; j < kC; ++j) sum[r][j] += left * right[j];
    }
  }
  for (int r = 0; r < kR; ++r)
    for (int j = 0; j < kC; ++j) store<V>(c + r * ldc + j * kWidth, sum[r][j]);
}

template <class T, int kC>
void columns(int m, int k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  int r = 0;
  for (; r + kRows <= m; r += kRows) block<T, kRows, kC>(k, a + r * lda, lda, b, ldb, c + r * ldc, ldc, accumulate);
  for (; r < m; ++r) block<T, 1, kC>(k, a + r * lda, lda, b, ldb, c + r * ldc, ldc, accumulate);
}

template <class T>
void product(int m, int n, int k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
             bool accumulate) {
  constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));
  int j = 0;
  for (; j + kColumns * kWidth <= n; j += kColumns * kWidth)
    columns<T, kColumns>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
  for (; j + kWidth <= n; j += kWidth) columns<T, 1>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
}

}  // namespace
}  // namespace dmattn::cpu::DMATTN_ISA
