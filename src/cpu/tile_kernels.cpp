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

TileKernels select() {
  [[maybe_unused]] const char* wanted = std::getenv("DMATTN_ISA");
  [[maybe_unused]] const auto allowed = [&](const char* isa) { return !wanted || std::strcmp(wanted, isa) == 0; };
#if defined(DMATTN_HAVE_ISA_AVX512)
  if (allowed("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return make("avx512", [](TileKernels& t) { avx512::fill_products(t), avx512::fill_rows(t); });
#endif
#if defined(DMATTN_HAVE_ISA_AVX2)
  if ((allowed("avx2") || allowed("avx512")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2"))
    return make("avx2", [](TileKernels& t) { avx2::fill_products(t), avx2::fill_rows(t); });
#endif
  return make("base", [](TileKernels& t) { base::fill_products(t), base::fill_rows(t); });
}

}  // namespace

const TileKernels& tile_kernels() {
  static const TileKernels table = select();
  return table;
}

}  // namespace dmattn::cpu
