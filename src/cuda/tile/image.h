// Tile images: how codes lie in global and in shared memory, so that producers copy them as they are.
//
// An image of R rows x C bytes is C / 16 columns of R x 16 bytes:
//     offset(row, byte) = (byte / 16) * (16 R) + 16 row + byte % 16.
// Eight rows x 16 bytes are then 128 contiguous bytes, the "core matrix" of a wgmma descriptor without swizzle;
// matrices that are neighbours along the contraction lie 16 R apart (leading offset), along the rows 128 (stride
// offset).
//
// Two kinds, both 64 D bytes:
//   row image         64 rows (queries or keys) x D channels        contraction over channels: S, dP
//   transposed image  D channels x 64 rows                          contraction over rows: O, dV, dK, dQ
// A contraction over rows runs in an order that saves shuffles; within 16 rows, position p holds row
//   sigma(p): 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15    where the other operand is an accumulator packed in registers
//   rho(p):   0 8 1 9 2 10 ... 7 15                    where it is dS as ldmatrix turns it (dQ's K codes)
// Every block of 128 rows is two images; indices of images are [head][block of 128 rows][half].
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DMATTN_CUDA_HD __host__ __device__ __forceinline__
#else
#define DMATTN_CUDA_HD inline
#endif

namespace dmattn::cuda {

constexpr int kImageRows = 64;
constexpr int kBlockRows = 128;  // rows of a work item; padded sequences are multiples of it
constexpr int kBiasBytes = 32;   // one k = 32 step: slots of the bias, then zeros

DMATTN_CUDA_HD constexpr int image_offset(int rows, int row, int byte) {
  return (byte / 16) * (16 * rows) + 16 * row + byte % 16;
}

DMATTN_CUDA_HD constexpr int sigma(int position) {
  return 2 * (position >> 2) + (position & 1) + 8 * ((position >> 1) & 1);
}
DMATTN_CUDA_HD constexpr int rho(int position) { return (position >> 1) + 8 * (position & 1); }

// dS tiles: 64 queries x 64 keys as the key gradients' registers hold them, in rows of 16 bytes. Row (w, h, t, g) has
// keys 16 w + g and 16 w + g + 8, bytes interleaved (two keys are a 16-bit element), of queries 16 k + 8 h + 2 t and
// the next, for k = 0 ... 3. Rows g = 0 ... 7 are an 8 x 8 matrix, which ldmatrix transposes: eight queries with 16
// keys in rho order. They lie so that eight neighbouring lanes store 128 contiguous bytes and that a matrix has one row
// in each of the eight 16-byte columns of shared memory's banks.
constexpr int kDsTileBytes = kImageRows * kImageRows;
DMATTN_CUDA_HD constexpr int ds_tile_row(int w, int h, int t, int g) {
  return 64 * w + 32 * h + 8 * (g >> 1) + 2 * (t ^ (g >> 1)) + (g & 1);
}
// The query in row g of matrix (h, t).
DMATTN_CUDA_HD constexpr int ds_tile_query(int h, int t, int g) { return 16 * (g >> 1) + 8 * h + 2 * t + (g & 1); }

#if defined(__CUDACC__)
// wgmma descriptor of an image of `rows` rows (start at any row that is a multiple of 8), from a shared address / 16
// that the whole warp shares and a constant byte offset: one 64-bit addition in the uniform data path, where an address
// in vector registers costs a move for every descriptor, and a 32-bit addition one for the upper half.
__device__ __forceinline__ uint64_t image_descriptor_at(uint32_t base16, int offset, int rows) {
  return (static_cast<uint64_t>(128 >> 4) << 32 | base16) +
         static_cast<uint64_t>((static_cast<uint32_t>(offset) >> 4) + (static_cast<uint32_t>(rows) << 16));
}
// An image in shared memory as an operand: its k = 32 steps, each from some row on. Constants where the caller's are.
struct ImageOperand {
  uint32_t base16;
  int offset, rows;
  __device__ __forceinline__ uint64_t at(int step, int row = 0) const {
    return image_descriptor_at(base16, offset + 32 * rows * step + 16 * row, rows);
  }
};
// What to add to a descriptor for the next k = 32 step, and for `rows` rows further down.
__device__ __forceinline__ constexpr uint64_t image_step(int rows) { return static_cast<uint64_t>(2 * rows); }
__device__ __forceinline__ constexpr uint64_t image_rows(int rows) { return static_cast<uint64_t>(rows); }
#endif

}  // namespace dmattn::cuda
