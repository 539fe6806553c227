// The three measurements of the command line, as plain data: a worked row, the residual table, a probed layer.
// They compute; cli/ and report code only format. Numbers follow docs/schemas.md.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "core/modes.h"

namespace dmattn {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct RunOptions {
  Numerics numerics = Numerics::hopper;
  Centre centre = Centre::qk;
  Accumulator accumulator = Accumulator::tensor_core;
  std::vector<Mode> modes{kModes.begin(), kModes.end()};                   // ablations may follow (paper numerics only)
  int threads = 0;                                                         // 0: all; never changes a number
  std::function<void(double fraction, const std::string& what)> progress;  // may be empty; called from one thread
};

// ---- probe -------------------------------------------------------------------------------------------------------

// A captured layer: row-major [tokens][heads][head_dim], values already rounded to BF16.
struct Layer {
  int64_t batch = 1, q_tokens = 0, k_tokens = 0, q_heads = 1, kv_heads = 1, head_dim = 1;
  float softmax_scale = 1;
  bool causal = true;
  std::vector<float> q, k, v,
      d_o;  // q, d_o: [batch][q_tokens][q_heads][head_dim]; k, v: [batch][k_tokens][kv_heads]...
};

struct Statistic {
  double median = kNaN, p95 = kNaN, max = kNaN;  // NaN where nothing could be measured
};

// Sum dS / sum|dS| with its sign, over rows: what the magnitudes of Statistic hide. Positive flattens the row's
// softmax, negative sharpens it (docs/probe.md).
struct SignedResidual {
  double rms = kNaN, mean = kNaN;
  double sharpens = kNaN, flattens = kNaN;  // share of rows below and above zero
};

struct Errors {
  double o = kNaN, dq = kNaN, dk = kNaN, dv = kNaN;  // relative Frobenius against FP64
};

struct ModeResult {
  Statistic residual, residual_after_cast;  // |sum dS| / sum|dS| over rows
  SignedResidual signed_residual, signed_residual_after_cast;
  double column_sum = kNaN;  // sum_c |sum_j dK_jc| / sum |dK|, dS before the cast
  double column_sum_after_cast = kNaN;
  std::vector<double> columns_after_cast;  // one head only: sum_j dK_jc / sum |dK| of each channel, signed
  Errors error;
  int64_t worst_head = -1;  // whole layer only: query head (over the batch) with the largest dQ error; -1: none
  double worst_head_dq = kNaN;
};

struct HeadResult {
  int64_t head = 0;
  double entropy = kNaN;  // of the exact softmax, mean over rows, nats
  std::map<Mode, ModeResult> modes;
};

struct ProbeResult {
  std::map<Mode, ModeResult> modes;      // over all heads
  std::vector<HeadResult> heads;         // by query head (all batches together)
  std::vector<int64_t> nonfinite_heads;  // query heads left out of the statistics: non-finite input
};

// What an implementation of hopper numerics other than the twin gives for one mode of a layer. Tensors hold BF16 bits
// and are laid out like the layer's; row vectors are [batch][q_heads][q_tokens].
struct LayerOutputs {
  std::vector<uint16_t> o, dq;
  std::vector<uint16_t> dk, dv;            // summed over the query heads of a KV head
  std::vector<uint16_t> head_dk, head_dv;  // before that sum: [batch][k_tokens][q_heads][head_dim]
  // As cpu::Forward has them: a sum is NaN where a row's logits leave the domain.
  std::vector<float> reference, sum, sum_rounded;
  std::vector<float> delta;  // true delta
};

class LayerKernels {
 public:
  virtual ~LayerKernels() = default;
  virtual LayerOutputs run(const Layer& layer, Mode mode) = 0;
};

// Measures the twin; or `kernels`: errors are those of their outputs, and what is said of dS is of the twin's tiles on
// their row sums and delta. Their dk and dv of a head are BF16 already, the twin's still FP32.
ProbeResult probe(const Layer& layer, const RunOptions& options, LayerKernels* kernels = nullptr);

// Throws Unsupported where numerics, centre, head_dim and modes do not go together.
void check_options(const Layer& layer, const RunOptions& options);

// ---- sweep -------------------------------------------------------------------------------------------------------

struct SweepOptions {
  int heads = 4;
  int64_t tokens = 512, head_dim = 64;
  int seeds = 6;
  uint64_t first_seed = 0;
  std::vector<double> spreads{1, 2, 4};
  bool causal = true;
  std::vector<std::string> families{"gaussian", "outlier"};  // and "sink": docs/numerics.md
  double sink_logit = 10;                                    // key 0's logit over the others' mean
};

struct SweepRow {
  std::string inputs;  // "gaussian", "outlier" or "sink"
  double spread = 1;
  Mode mode = Mode::stale;
  double residual = kNaN, residual_after_cast = kNaN, column_sum = kNaN;
  double error_o = kNaN, error_dq = kNaN, error_dk = kNaN, error_dv = kNaN;
};

std::vector<SweepRow> sweep(const SweepOptions& sweep, const RunOptions& options);

// A random layer of one input family; the generator is our own (docs/numerics.md), so a seed means the same
// everywhere. family: "gaussian", "outlier" or "sink".
Layer random_layer(const std::string& family, double spread, const SweepOptions& sweep, uint64_t seed);

// ---- row ---------------------------------------------------------------------------------------------------------

struct RowOptions {
  int64_t tokens = 8, head_dim = 4;
  uint64_t seed = 7;  // a clear row: stale 3 %, consistent a third of a percent
};

struct RowMode {
  double delta = kNaN, sum_positive = kNaN, sum_negative = kNaN, row_sum = kNaN, share = kNaN;
  std::vector<double> d_s;  // the row itself, before the cast
};

struct RowResult {
  RowOptions row;
  std::map<Mode, RowMode> modes;
  double split_probability = kNaN, split_gradient = kNaN, split_remainder = kNaN;  // of the stale row sum
  // What the identities need: delta stale - consistent, and the magnitude their tolerance is stated in.
  double gradient_rounding = kNaN;                // <quantised dO - dO, O in BF16>
  double o_rounding = kNaN;                       // <dO, O in FP32 - O in BF16>: what split_remainder should be
  double magnitude = kNaN;                        // sum_j P|dP| + sum_k |dO_k O_k|
  std::vector<double> p, p_rounded, d_p, q, d_o;  // of the last query
};

RowResult worked_row(const RowOptions& row, const RunOptions& options);

}  // namespace dmattn
