// Declares each instruction set's entry points. Included by the files that are compiled once per instruction set.
#pragma once

#include "cpu/tile_kernels.h"

#define DMATTN_DECLARE_ISA(isa)           \
  namespace dmattn::cpu::isa {            \
  void fill_products(TileKernels& table); \
  void fill_exact(TileKernels& table);    \
  void fill_rows(TileKernels& table);     \
  }
DMATTN_DECLARE_ISA(base)
DMATTN_DECLARE_ISA(avx2)
DMATTN_DECLARE_ISA(avx512)
#undef DMATTN_DECLARE_ISA
