#include "agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

#include "abi/caller.h"
#include "analysis/random.h"
#include "core/error.h"
#include "cpu/codes.h"
#include "cpu/twin.h"
#include "delta_matching/delta_matching.h"
#include "numerics/bf16.h"
#include "numerics/constants.h"
#include "numerics/fp8.h"

namespace dmattn::cli {
namespace {

using abi::Block;
using abi::Inputs;
using abi::Results;
using abi::Side;

// Bounded: docs/numerics.md, section 7. dQ and dK sum terms that went through two casts.
double limit_of(const std::string& name) { return name == "dq" || name == "dk" ? 2e-3 * std::numbers::sqrt2 : 2e-3; }
constexpr size_t kSmallCap = 1;  // one group of heads against 128 keys at a time

// Ragged ends everywhere, rows without keys in the first, and at least 600^2 pairs of a query and a key: with fewer, a
// single code of P that falls on the other side of its rounding is more than the limit.
constexpr int64_t kHeadDims[] = {64, 128, 256};
std::vector<AgreementShape> shapes(bool quick) {
  std::vector<AgreementShape> all;
  for (const int64_t dim : kHeadDims) {
    all.push_back({1, 8, 2, dim, 700, 1100, true});
    if (quick) continue;
    all.push_back({1, 4, 4, dim, 1009, 871, true});
    all.push_back({2, 4, 4, dim, 301, 517, false});
    all.push_back({1, 8, 2, dim, 1100, 333, false});
  }
  return all;
}

// ---- inputs --------------------------------------------------------------------------------------------------------

// [batch, length, heads, head_dim]. Gaussian; or with a mean by channel, an outlier channel, rows of different size and
// a block of zeros, so that codes and scales have something to disagree on.
std::vector<uint16_t> draw(Random& random, int64_t batch, int64_t length, int64_t heads, int64_t dim, bool varied) {
  std::vector<double> mean(static_cast<size_t>(dim));
  for (double& value : mean) value = varied ? 3 * random.normal() : 0;
  std::vector<uint16_t> out;
  out.reserve(static_cast<size_t>(batch * length * heads * dim));
  for (int64_t row = 0; row < batch * length; ++row) {
    const bool zero = varied && row % length >= 64 && row % length < 128;
    const int exponent = varied ? static_cast<int>(random.next() % 8) - 4 : 0;
    for (int64_t i = 0; i < heads * dim; ++i) {
      double value = random.normal() + mean[static_cast<size_t>(i % dim)];
      if (varied && i % dim == 0) value *= 8;
      out.push_back(numerics::bf16_encode(zero ? 0.0f : static_cast<float>(std::ldexp(value, exponent))));
    }
  }
  return out;
}

Inputs inputs_of(const AgreementShape& s, uint64_t seed, bool varied) {
  Random random(seed);
  Inputs in;
  in.q = draw(random, s.batch, s.q_len, s.q_heads, s.head_dim, varied);
  in.k = draw(random, s.batch, s.k_len, s.kv_heads, s.head_dim, varied);
  in.v = draw(random, s.batch, s.k_len, s.kv_heads, s.head_dim, varied);
  in.d_o = draw(random, s.batch, s.q_len, s.q_heads, s.head_dim, varied);
  return in;
}

// ---- calls ---------------------------------------------------------------------------------------------------------

dmattn_problem problem_of(const Side& side, const AgreementShape& s, Mode mode, size_t cap = 0) {
  dmattn_problem problem = abi::hopper_problem(side, mode);
  problem.batch = s.batch;
  problem.q_heads = s.q_heads;
  problem.kv_heads = s.kv_heads;
  problem.q_len = s.q_len;
  problem.k_len = s.k_len;
  problem.head_dim = s.head_dim;
  problem.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_dim)));
  problem.causal = s.causal ? 1 : 0;
  problem.workspace_cap = cap;
  return problem;
}

WorkspaceSizes workspace_of(const dmattn_problem& problem) {
  const WorkspaceSizes sizes = abi::workspace_sizes(problem);
  const bool none = sizes.forward == 0 && sizes.backward == 0, both = sizes.forward > 0 && sizes.backward > 0;
  if (problem.device == DMATTN_CPU ? !none : !both)
    throw std::runtime_error(fmt::format("dmattn_workspace_size: {} and {} bytes on {}", sizes.forward, sizes.backward,
                                         problem.device == DMATTN_CPU ? "the CPU" : "a GPU"));
  return sizes;
}

Results run(const Side& side, const AgreementShape& shape, Mode mode, const Inputs& inputs, size_t cap = 0,
            bool saves_codes = false) {
  const dmattn_problem problem = problem_of(side, shape, mode, cap);
  workspace_of(problem);
  abi::Attention attention(side, problem, inputs, saves_codes);
  attention.forward();
  attention.backward();
  return attention.results();
}

// ---- codes ---------------------------------------------------------------------------------------------------------

struct QuantisedOperand {
  std::vector<uint8_t> codes;
  std::vector<float> scale, mean;
};

int64_t mean_blocks(const AgreementShape& s) { return cpu::blocks_of(s.q_len, numerics::query_mean_rows(s.q_len)); }

QuantisedOperand quantise(const Side& side, const AgreementShape& s, const Inputs& in, int32_t operand) {
  const bool is_query = operand == DMATTN_OPERAND_Q_SCORES;
  const std::vector<uint16_t>& source = is_query ? in.q : operand == DMATTN_OPERAND_K ? in.k : in.v;
  const int64_t heads = is_query ? s.q_heads : s.kv_heads, length = is_query ? s.q_len : s.k_len;
  const int64_t block = is_query ? numerics::kQueryScaleRows : numerics::kKeyScaleRows;
  const int64_t means = is_query ? mean_blocks(s) : 1;
  Block x(side, source), k(side, in.k), codes(side, source.size());
  Block scale(side, sizeof(float) * static_cast<size_t>(s.batch * heads * cpu::blocks_of(length, block)));
  Block mean(side, sizeof(float) * static_cast<size_t>(s.batch * heads * means * s.head_dim));
  const dmattn_problem problem = problem_of(side, s, Mode::matched);
  const size_t bytes = workspace_of(problem).forward;
  Block workspace(side, bytes);
  dmattn_quantise_args args{};
  args.struct_size = sizeof args;
  args.operand = operand;
  args.x = {x.data(), length * heads * s.head_dim, heads * s.head_dim, s.head_dim};
  args.codes = codes.data<uint8_t>();
  args.scale = scale.data<float>();
  args.mean = mean.data<float>();
  if (is_query) args.k = {k.data(), s.k_len * s.kv_heads * s.head_dim, s.kv_heads * s.head_dim, s.head_dim};
  args.workspace = workspace.data();
  args.workspace_bytes = bytes;
  abi::call(dmattn_quantise(&problem, &args), "dmattn_quantise");
  abi::wait(side, "dmattn_quantise");
  return {codes.read<uint8_t>(), scale.read<float>(), mean.read<float>()};
}

// One head's rows in FP32. The head dimensions of hopper numerics need no padding.
std::vector<float> rows_of(const std::vector<uint16_t>& x, int64_t length, int64_t heads, int64_t dim, int64_t batch,
                           int64_t head) {
  std::vector<float> out;
  out.reserve(static_cast<size_t>(length * dim));
  for (int64_t i = 0; i < length; ++i)
    for (int64_t c = 0; c < dim; ++c)
      out.push_back(numerics::bf16_decode(x[static_cast<size_t>(((batch * length + i) * heads + head) * dim + c)]));
  return out;
}

// Q_SCORES of the twin, which its ABI does not offer.
QuantisedOperand twin_query_codes(const AgreementShape& s, const Inputs& in) {
  const int64_t dim = s.head_dim, scales = cpu::blocks_of(s.q_len, numerics::kQueryScaleRows);
  const int64_t mean_rows = numerics::query_mean_rows(s.q_len), means = mean_blocks(s);
  const dmattn_problem problem = problem_of({false, 0}, s, Mode::matched);
  const cpu::HeadShape shape{s.q_len, s.k_len, dim, dim, problem.softmax_scale, s.causal};
  const cpu::TwinConfig config;  // hopper numerics, Q and K centred, the tensor core's accumulator
  QuantisedOperand out;
  out.codes.resize(in.q.size());
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t head = 0; head < s.q_heads; ++head) {
      const int64_t kv_head = head / (s.q_heads / s.kv_heads);
      const std::vector<float> q = rows_of(in.q, s.q_len, s.q_heads, dim, b, head);
      const cpu::KvHead kv = cpu::prepare_kv(shape, config, rows_of(in.k, s.k_len, s.kv_heads, dim, b, kv_head).data(),
                                             rows_of(in.v, s.k_len, s.kv_heads, dim, b, kv_head).data());
      const cpu::Codes made = cpu::prepare_query(shape, config, kv, q.data()).s;
      for (int64_t i = 0; i < s.q_len; ++i) {
        const bool nan = std::isnan(made.scale_of_row(i));
        for (int64_t c = 0; c < dim; ++c)
          out.codes[static_cast<size_t>(((b * s.q_len + i) * s.q_heads + head) * dim + c)] =
              nan ? numerics::kE4m3Nan : numerics::e4m3_code_of(made.row(i, dim)[c]);
      }
      out.scale.insert(out.scale.end(), made.scale.begin(), made.scale.begin() + scales);
      for (int64_t block = 0; block < means; ++block) {
        const int64_t first = block * mean_rows, count = std::min(mean_rows, s.q_len - first);
        for (const float value : cpu::channel_mean(q.data() + first * dim, count, dim))
          out.mean.push_back(numerics::bf16_round(value));
      }
    }
  return out;
}

// ---- distances -----------------------------------------------------------------------------------------------------

double value_of(float x) { return x; }
double value_of(uint16_t x) { return numerics::bf16_decode(x); }  // BF16
double value_of(uint8_t x) { return x; }                          // a code: whatever it stands for, it is no NaN here

// Values whose bits differ; every NaN equals every other.
template <class T>
double mismatches(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) throw std::logic_error("certify: sizes differ");
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0 && !(std::isnan(value_of(a[i])) && std::isnan(value_of(b[i]))))
      ++count;
  return static_cast<double>(count);
}

double mismatches(const Results& a, const Results& b) {
  return mismatches(a.o, b.o) + mismatches(a.o_low, b.o_low) + mismatches(a.lse, b.lse) +
         mismatches(a.reference, b.reference) + mismatches(a.sum, b.sum) + mismatches(a.delta, b.delta) +
         mismatches(a.dq, b.dq) + mismatches(a.dk, b.dk) + mismatches(a.dv, b.dv);
}

// Relative Frobenius distance of a from b. Infinities must be the same ones, and there is no NaN; else NaN.
template <class T>
double distance(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) throw std::logic_error("certify: sizes differ");
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = value_of(a[i]), y = value_of(b[i]);
    if (std::isinf(x) && x == y) continue;  // lse of a row without keys
    difference += (x - y) * (x - y);
    size += y * y;
  }
  if (!std::isfinite(difference) || !std::isfinite(size)) return std::nan("");
  if (difference == 0) return 0;
  return size == 0 ? std::nan("") : std::sqrt(difference / size);
}

// ---- what is measured ----------------------------------------------------------------------------------------------

class Measurement {
 public:
  explicit Measurement(const AgreementOptions& options) : options_(options), gpu_{true, options.device_index} {}

  std::vector<AgreementCase> run_all() {
    const std::vector<AgreementShape> all = shapes(options_.quick);
    const size_t steps = all.size() * (kModes.size() + 1);
    size_t done = 0;
    uint64_t seed = options_.seed;
    for (const AgreementShape& shape : all) {
      const Inputs inputs = inputs_of(shape, seed, false);
      report(done++, steps, shape, "codes");
      add_codes(shape, inputs, "");
      add_codes(shape, inputs_of(shape, seed, true), ", varied inputs");
      for (const Mode mode : kModes) {
        report(done++, steps, shape, name(mode));
        add_mode(shape, mode, inputs);
      }
      ++seed;
    }
    return std::move(cases_);
  }

 private:
  void report(size_t done, size_t steps, const AgreementShape& shape, std::string_view what) const {
    if (options_.progress)
      options_.progress(static_cast<double>(done) / static_cast<double>(steps),
                        fmt::format("head dimension {}, {}", shape.head_dim, what));
  }

  void add(std::string case_name, const AgreementShape& shape, std::optional<Mode> mode, bool bitwise, double value) {
    const double limit = bitwise ? 0 : limit_of(case_name);
    cases_.push_back({std::move(case_name), shape, mode, bitwise, value, limit});
  }

  void add_codes(const AgreementShape& shape, const Inputs& inputs, const char* which) {
    const auto compare = [&](const char* operand, const QuantisedOperand& ours, const QuantisedOperand& twin) {
      add(fmt::format("quantise {}: codes{}", operand, which), shape, {}, true, mismatches(ours.codes, twin.codes));
      add(fmt::format("quantise {}: scales{}", operand, which), shape, {}, true, mismatches(ours.scale, twin.scale));
      add(fmt::format("quantise {}: mean{}", operand, which), shape, {}, true, mismatches(ours.mean, twin.mean));
    };
    const auto through_abi = [&](const char* operand, int32_t number) {
      compare(operand, quantise(gpu_, shape, inputs, number), quantise(twin_, shape, inputs, number));
    };
    through_abi("k", DMATTN_OPERAND_K);
    through_abi("v", DMATTN_OPERAND_V);
    compare("q for scores", quantise(gpu_, shape, inputs, DMATTN_OPERAND_Q_SCORES), twin_query_codes(shape, inputs));
  }

  void add_mode(const AgreementShape& shape, Mode mode, const Inputs& inputs) {
    const Results twin = run(twin_, shape, mode, inputs), ours = run(gpu_, shape, mode, inputs);
    add("o", shape, mode, false, distance(ours.o, twin.o));
    add("lse", shape, mode, false, distance(ours.lse, twin.lse));
    add("delta_out", shape, mode, false, distance(ours.delta, twin.delta));
    add("dq", shape, mode, false, distance(ours.dq, twin.dq));
    add("dk", shape, mode, false, distance(ours.dk, twin.dk));
    add("dv", shape, mode, false, distance(ours.dv, twin.dv));
    if (mode != Mode::matched) {  // its delta is a sum over P, which is bounded alone
      abi::Attention attention(gpu_, problem_of(gpu_, shape, mode), inputs);
      attention.take_forward(twin);
      attention.delta();
      add("delta from the twin's forward", shape, mode, true, mismatches(attention.delta_out(), twin.delta));
    }
    add("a second run, all outputs", shape, mode, true, mismatches(run(gpu_, shape, mode, inputs), ours));
    add("saved codes, all outputs", shape, mode, true, mismatches(run(gpu_, shape, mode, inputs, 0, true), ours));
    add("workspace_cap 1, all outputs", shape, mode, true, mismatches(run(gpu_, shape, mode, inputs, kSmallCap), ours));
  }

  const AgreementOptions& options_;
  Side gpu_, twin_{false, 0};
  std::vector<AgreementCase> cases_;
};

}  // namespace

std::vector<AgreementCase> measure_agreement(const AgreementOptions& options) { return Measurement(options).run_all(); }

}  // namespace dmattn::cli
