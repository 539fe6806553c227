// Quantised operands of one head, held as code values in FP32 so that products need no decoding.
#pragma once

#include <cstdint>
#include <vector>

#include "core/modes.h"

namespace dmattn::cpu {

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
inline int64_t blocks_of(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// One head: rows of q against rows of k and v. Inputs are row-major [rows][dim_padded], zero beyond dim.
struct HeadShape {
  int64_t queries = 0, keys = 0;
  int64_t dim = 1, dim_padded = 16;  // dim rounded up to the kernels' lanes
  float softmax_scale = 1;
  bool causal = true;

  // Keys that query i sees, counted from key 0 (bottom-right aligned). 0 for rows beyond the last query.
  int64_t visible(int64_t i) const {
    if (i >= queries) return 0;
    if (!causal) return keys;
    const int64_t last = i + keys - queries + 1;
    return last < 0 ? 0 : last < keys ? last : keys;
  }
};

struct TwinConfig {
  Numerics numerics = Numerics::hopper;
  Centre centre = Centre::qk;
  Accumulator accumulator = Accumulator::tensor_core;
  int threads = 0;
};

// Codes of a matrix with one scale per `block` rows.
struct Codes {
  int64_t block = 64;
  std::vector<float> value;  // [rows rounded up to 128][dim_padded]
  std::vector<float> scale;  // [blocks]

  const float* row(int64_t i, int64_t dim) const { return value.data() + i * dim; }
  float scale_of_row(int64_t i) const { return scale[static_cast<size_t>(i / block)]; }
};

enum class ScaleRule { amax, power };      // amax / 448, or the power of two at or above it
ScaleRule value_scale(Numerics numerics);  // the rule of V

// Quantises blocks of `block` rows. NaN or infinity in a block: its scale is NaN, its codes are zero.
// fixed_amax >= 0 takes the place of every block's own (per-tensor scales).
Codes quantise(const float* x, int64_t rows, int64_t dim_padded, int64_t block, float fixed_amax = -1.0f,
               ScaleRule rule = ScaleRule::amax);

// Per-channel FP32 mean: partial sums over 64 rows in ascending order, partials added in ascending order, one IEEE
// division. Zero for no rows.
std::vector<float> channel_mean(const float* x, int64_t rows, int64_t dim_padded);

// [block][dim_padded][64] from [rows][dim_padded]: the right-hand side of products over the head dimension.
std::vector<float> transpose_tiles(const float* x, int64_t rows, int64_t dim_padded);

// K and V of a KV head, shared by its query heads.
struct KvHead {
  std::vector<float> k_mean;  // [dim_padded], zero when K is not centred
  Codes k, v;
  std::vector<float> k_tiles, v_tiles;  // transposed codes
  std::vector<float> k_centred_tiles;   // transposed k - mean in FP32, where Q is centred
  std::vector<float> v_raw_tiles;       // transposed BF16 values, for the BF16-dP ablation
};

struct PerTensorAmax {
  float q = -1, k = -1, v = -1, d_o = -1;  // below 0: block scales
};

KvHead prepare_kv(const HeadShape& shape, const TwinConfig& config, const float* k, const float* v,
                  bool keep_raw_v = false, const PerTensorAmax& amax = {});

}  // namespace dmattn::cpu
