#include "cpu/tile_kernels.h"

#include <cstdlib>
#include <cstring>

#include "cpu/isa.h"

namespace dmattn::cpu {
namespace {

template <class Fill>
TileKernels make(const char* name, Fill fill) {
  TileKernels table{};
  table.name = name;
  fill(table);
  return table;
}

}  // namespace

std::vector<TileKernels> all_tile_kernels() {
  std::vector<TileKernels> tables;
#if defined(DMATTN_HAVE_ISA_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    tables.push_back(
        make("avx512", [](TileKernels& t) { avx512::fill_products(t), avx512::fill_exact(t), avx512::fill_rows(t); }));
#endif
#if defined(DMATTN_HAVE_ISA_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    tables.push_back(
        make("avx2", [](TileKernels& t) { avx2::fill_products(t), avx2::fill_exact(t), avx2::fill_rows(t); }));
#endif
  tables.push_back(
      make("base", [](TileKernels& t) { base::fill_products(t), base::fill_exact(t), base::fill_rows(t); }));
  return tables;
}

const TileKernels& tile_kernels() {
  static const TileKernels table = [] {
    const std::vector<TileKernels> tables = all_tile_kernels();
    if (const char* wanted = std::getenv("DMATTN_ISA"))
      for (const TileKernels& candidate : tables)
        if (std::strcmp(candidate.name, wanted) == 0) return candidate;
    return tables.front();
  }();
  return table;
}

}  // namespace dmattn::cpu
