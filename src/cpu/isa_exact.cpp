// Products whose terms FP32 holds exactly (of codes, of BF16 values). Compiled with fused multiply-adds where the
// instruction set has them: a fused term and a rounded exact one are the same, so every instruction set gives the same
// bits. See tile_kernels.h.

#include "cpu/isa.h"
#include "cpu/isa_gemm.h"

namespace dmattn::cpu::DMATTN_ISA {

void fill_exact(TileKernels& table) { table.product_exact = product<float>; }

}  // namespace dmattn::cpu::DMATTN_ISA
