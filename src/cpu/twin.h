// The CPU twin of one head: forward and backward in either numerics, the same operations in the same order as the
// kernels (hopper) or as the article's recipe (paper). Everything is linear in the number of rows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/codes.h"

namespace dmattn::cpu {

// Operands made from q: codes for S and codes for dK.
struct QueryHead {
  Codes s;
  Codes plain;                   // empty in paper numerics, where they are those of S: use plain_codes()
  std::vector<float> bias_dots;  // [mean blocks][keys rounded up to 64]: mu . (k - mean); empty unless Q is centred
  int64_t bias_rows = 128;       // rows of a mean block
  const Codes& plain_codes() const { return plain.value.empty() ? s : plain; }
};

QueryHead prepare_query(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const float* q,
                        const PerTensorAmax& amax = {});

// What a forward leaves. Sums are of 2^(x - reference), x the score in log2 units.
struct Forward {
  std::vector<float> accumulated;  // [queries][dim_padded]: O before the division
  std::vector<float> reference;    // [queries]: M; -infinity for a row without keys
  std::vector<float> sum;          // of unrounded P
  std::vector<float> sum_rounded;  // of rounded P
  std::vector<float> lse;          // natural log, of uncentred scores
};

Forward forward(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
                const float* q, Mode mode);

// O in FP32 as the mode divides it: by the rounded sum (hopper; onepass in paper) or the unrounded one.
std::vector<float> divide_o(const HeadShape& shape, const TwinConfig& config, const Forward& forward, Mode mode);

struct BackwardInput {
  Mode mode = Mode::matched;
  const float* d_o = nullptr;          // [queries][dim_padded]
  const float* o_stored = nullptr;     // O as BF16 holds it
  const float* o_full = nullptr;       // onepass: O with its remainder
  const float* reference = nullptr;    // [queries]
  const float* sum = nullptr;          // [queries]: of unrounded P
  const float* sum_rounded = nullptr;  // [queries]: of rounded P
  const float* delta = nullptr;        // true delta from outside, or null
  const float* v_raw_tiles = nullptr;  // BF16-dP ablation
  PerTensorAmax amax;
  float d_s_amax = -1;  // per-tensor ablation: amax of all of dS; below 0: per tile
};

// Per row, in FP64: sum and sum of magnitudes of dS, before and after its cast; and the column sums of dK.
struct Diagnostics {
  std::vector<double> sum, magnitude, cast_sum, cast_magnitude;  // [queries]
  // [dim_padded]: sum_j dK_jc, exact product of row sums and Q codes, from dS before and after its cast.
  std::vector<double> column, column_after_cast;
  double dk_magnitude = 0;  // sum |dK|, from dS before the cast
};

struct Wanted {
  bool dq = true, dk = true, dv = true;
};

struct Gradients {
  std::vector<float> dq;      // [queries][dim_padded]
  std::vector<float> dk, dv;  // [keys][dim_padded]
  std::vector<float> delta;   // [queries], true delta
};

// dK and dV of a KV head, its query heads added in ascending order. Empty until the first has come.
struct KeySums {
  std::vector<float> dk, dv;  // [keys][dim_padded]
};

class TileSource;  // cpu/tiles.h
std::unique_ptr<TileSource> make_tiles(const HeadShape& shape, const TwinConfig& config, const KvHead& kv,
                                       const QueryHead& query, const BackwardInput& input);

// One head's gradients; what it adds to those of its KV head goes to `group` as well.
Gradients backward(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
                   const BackwardInput& input, const Wanted& wanted, Diagnostics* diagnostics = nullptr,
                   KeySums* group = nullptr);

// What is left to do once all heads are in: hopper numerics multiplies dK by softmax_scale here, paper head by head.
void finish(Numerics numerics, float softmax_scale, KeySums& group);

// Largest |dS| of a head, for per-tensor scales.
float d_s_amax(const HeadShape& shape, const TwinConfig& config, const KvHead& kv, const QueryHead& query,
               const BackwardInput& input);

}  // namespace dmattn::cpu
