#include "cpu/backend.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "cpu/parallel.h"
#include "cpu/reference.h"
#include "cpu/tensors.h"
#include "cpu/tiles.h"
#include "numerics/fp8.h"
#include "numerics/hd.h"

namespace dmattn::cpu {
namespace {

TwinConfig config_of(const Problem& problem) {
  return {problem.numerics, problem.centre, problem.accumulator, problem.threads};
}

// Calls work(sequence, kv_head). Few groups run one after the other with all threads inside each.
template <class Work>
void each_group(const Problem& problem, Work work) {
  const int64_t groups = problem.batch * problem.kv_heads;
  const bool outer = groups >= thread_count(problem.threads);
  parallel_for(groups, outer ? problem.threads : 1,
               [&](int64_t item) { work(item / problem.kv_heads, item % problem.kv_heads); });
}

// What the backward knows of a head's forward.
struct RowState {
  std::vector<float> reference, sum, sum_rounded;
  std::vector<float> o_full;  // O with its remainder (hopper) or in FP32 (paper)
};

RowState from_saved(const Problem& problem, const dmattn_backward_args& args, int64_t first, int64_t rows) {
  const float* reference = args.saved.reference + first;
  const float* sum = args.saved.sum + first;
  const float* rounded = sum + problem.row_vector_length();
  return {{reference, reference + rows}, {sum, sum + rows}, {rounded, rounded + rows}, {}};
}

// From the public lse alone: M and the sum such that 2^M sum = 2^(lse log2 e), scores centred as the twin has them.
RowState from_lse(const HeadShape& shape, const KvHead& kv, const std::vector<float>& q, const float* lse) {
  RowState state;
  for (int64_t i = 0; i < shape.queries; ++i) {
    if (std::isinf(lse[i]) && lse[i] < 0) {
      state.reference.push_back(numerics::negative_infinity());
      state.sum.push_back(0.0f);
      continue;
    }
    const double mean = contract_dot(q.data() + i * shape.dim_padded, kv.k_mean.data(), shape.dim_padded);
    const double log2_sum = (lse[i] - static_cast<double>(shape.softmax_scale) * mean) / std::log(2.0);
    const double reference = std::floor(log2_sum);
    state.reference.push_back(static_cast<float>(reference));
    state.sum.push_back(static_cast<float>(std::exp2(log2_sum - reference)));
  }
  state.sum_rounded = state.sum;
  return state;
}

struct QueryInputs {
  std::vector<float> q, d_o, o;
  QueryHead query;
  RowState state;
};

QueryInputs query_inputs(const Problem& problem, const dmattn_backward_args& args, const HeadShape& shape,
                         const KvHead& kv, int64_t sequence, int64_t head) {
  QueryInputs in;
  const TwinConfig config = config_of(problem);
  in.q = load(head_view(problem, args.q, sequence, head, true));
  in.d_o = load(head_view(problem, args.d_o, sequence, head, true));
  in.o = load(head_view(problem, args.o, sequence, head, true));
  in.query = prepare_query(shape, config, kv, in.q.data());
  const int64_t first = problem.row_vector(sequence, head);
  if (problem.numerics == Numerics::paper && (problem.mode == Mode::onepass || !args.saved.reference)) {
    // The recipe keeps O in FP32 for onepass, which no saved BF16 pair can hold: run its forward again.
    const Forward again = forward(shape, config, kv, in.query, in.q.data(), problem.mode);
    in.state = {again.reference, again.sum, again.sum_rounded, divide_o(shape, config, again, problem.mode)};
    return in;
  }
  in.state = args.saved.reference ? from_saved(problem, args, first, shape.queries)
                                  : from_lse(shape, kv, in.q, args.lse + first);
  in.state.o_full = in.o;
  if (args.saved.o_low.data != nullptr && problem.mode == Mode::onepass) {
    const std::vector<float> low = load(head_view(problem, args.saved.o_low, sequence, head, true));
    for (size_t i = 0; i < low.size(); ++i) in.state.o_full[i] += low[i];
  }
  return in;
}

BackwardInput twin_input(const Problem& problem, const QueryInputs& in, const float* delta) {
  BackwardInput input;
  input.mode = problem.mode;
  input.d_o = in.d_o.data();
  input.o_stored = in.o.data();
  input.o_full = in.state.o_full.data();
  input.reference = in.state.reference.data();
  input.sum = in.state.sum.data();
  input.sum_rounded = in.state.sum_rounded.data();
  input.delta = delta;
  return input;
}

KvHead load_kv(const Problem& problem, const HeadShape& shape, const dmattn_tensor& k, const dmattn_tensor& v,
               int64_t sequence, int64_t kv_head) {
  const std::vector<float> keys = load(head_view(problem, k, sequence, kv_head, false));
  const std::vector<float> values = load(head_view(problem, v, sequence, kv_head, false));
  return prepare_kv(shape, config_of(problem), keys.data(), values.data());
}

}  // namespace

void forward(const Problem& problem, const dmattn_forward_args& args) {
  const TwinConfig config = config_of(problem);
  each_group(problem, [&](int64_t sequence, int64_t kv_head) {
    const HeadShape shape = head_shape(problem, sequence);
    const KvHead kv = load_kv(problem, shape, args.k, args.v, sequence, kv_head);
    for (int64_t head = kv_head * problem.group(); head < (kv_head + 1) * problem.group(); ++head) {
      const std::vector<float> q = load(head_view(problem, args.q, sequence, head, true));
      const QueryHead query = prepare_query(shape, config, kv, q.data());
      const Forward state = forward(shape, config, kv, query, q.data(), problem.mode);
      std::vector<float> o = divide_o(shape, config, state, problem.mode);
      store(o, head_view(problem, args.o, sequence, head, true));
      if (args.saved.o_low.data != nullptr) {
        for (float& value : o) value -= numerics::bf16_round(value);
        store(o, head_view(problem, args.saved.o_low, sequence, head, true));
      }
      const int64_t first = problem.row_vector(sequence, head);
      if (args.lse) std::copy(state.lse.begin(), state.lse.end(), args.lse + first);
      if (args.saved.reference) std::copy(state.reference.begin(), state.reference.end(), args.saved.reference + first);
      if (args.saved.sum) {
        float* const unrounded = args.saved.sum + first;
        if (needs_unrounded_sum(problem, args))
          std::copy(state.sum.begin(), state.sum.end(), unrounded);
        else
          std::fill_n(unrounded, state.sum.size(), numerics::quiet_nan());
        std::copy(state.sum_rounded.begin(), state.sum_rounded.end(),
                  args.saved.sum + problem.row_vector_length() + first);
      }
    }
  });
}

void backward(const Problem& problem, const dmattn_backward_args& args) {
  const TwinConfig config = config_of(problem);
  const Wanted wanted{args.dq.data != nullptr, args.dk.data != nullptr, args.dv.data != nullptr};
  each_group(problem, [&](int64_t sequence, int64_t kv_head) {
    const HeadShape shape = head_shape(problem, sequence);
    const KvHead kv = load_kv(problem, shape, args.k, args.v, sequence, kv_head);
    KeySums group;
    for (int64_t head = kv_head * problem.group(); head < (kv_head + 1) * problem.group(); ++head) {
      const QueryInputs in = query_inputs(problem, args, shape, kv, sequence, head);
      const int64_t first = problem.row_vector(sequence, head);
      const BackwardInput input = twin_input(problem, in, args.delta ? args.delta + first : nullptr);
      const Gradients gradients = backward(shape, config, kv, in.query, input, wanted, nullptr, &group);
      if (wanted.dq) store(gradients.dq, head_view(problem, args.dq, sequence, head, true));
      if (args.delta_out) std::copy(gradients.delta.begin(), gradients.delta.end(), args.delta_out + first);
    }
    finish(problem.numerics, shape.softmax_scale, group);
    if (wanted.dk) store(group.dk, head_view(problem, args.dk, sequence, kv_head, false));
    if (wanted.dv) store(group.dv, head_view(problem, args.dv, sequence, kv_head, false));
  });
}

void delta(const Problem& problem, const dmattn_backward_args& args) {
  each_group(problem, [&](int64_t sequence, int64_t kv_head) {
    const HeadShape shape = head_shape(problem, sequence);
    const KvHead kv = load_kv(problem, shape, args.k, args.v, sequence, kv_head);
    for (int64_t head = kv_head * problem.group(); head < (kv_head + 1) * problem.group(); ++head) {
      const QueryInputs in = query_inputs(problem, args, shape, kv, sequence, head);
      const auto tiles = make_tiles(shape, config_of(problem), kv, in.query, twin_input(problem, in, nullptr));
      float* out = args.delta_out + problem.row_vector(sequence, head);
      for (int64_t i = 0; i < shape.queries; ++i) out[i] = tiles->true_delta(i);
    }
  });
}

void quantise(const Problem& problem, const dmattn_quantise_args& args) {
  const bool is_query = args.operand == DMATTN_OPERAND_Q || args.operand == DMATTN_OPERAND_D_O;
  const int64_t query_block = problem.numerics == Numerics::hopper ? numerics::kFlushRows : numerics::kQueryScaleRows;
  const int64_t block = is_query ? query_block : numerics::kKeyScaleRows;
  const int64_t heads = is_query ? problem.q_heads : problem.kv_heads, dim = problem.head_dim;
  const int64_t dim_padded = round_up(dim, kLanes);
  int64_t longest = 0;
  for (const Sequence& at : problem.sequences) longest = std::max(longest, is_query ? at.q_rows : at.k_rows);
  const int64_t blocks = blocks_of(longest, block);
  parallel_for(problem.batch * heads, problem.threads, [&](int64_t item) {
    const int64_t sequence = item / heads, head = item % heads;
    const HeadView view = head_view(problem, args.x, sequence, head, is_query);
    std::vector<float> x = load(view);
    std::vector<float> mean(static_cast<size_t>(dim_padded), 0.0f);
    if (args.operand == DMATTN_OPERAND_K && problem.centre != Centre::none) {
      mean = channel_mean(x.data(), view.rows, dim_padded);
      for (int64_t i = 0; i < view.rows * dim_padded; ++i)
        x[static_cast<size_t>(i)] -= mean[static_cast<size_t>(i % dim_padded)];
    }
    const ScaleRule rule = args.operand == DMATTN_OPERAND_V ? value_scale(problem.numerics) : ScaleRule::amax;
    const Codes codes = quantise(x.data(), view.rows, dim_padded, block, -1.0f, rule);
    float* scale = args.scale + item * blocks;
    std::fill(scale, scale + blocks, 0.0f);
    std::copy(codes.scale.begin(), codes.scale.end(), scale);
    if (args.mean) std::copy(mean.begin(), mean.begin() + dim, args.mean + item * dim);
    const Sequence& at = problem.sequences[static_cast<size_t>(sequence)];
    const int64_t first_row = problem.variable_length ? (is_query ? at.q_first : at.k_first) : sequence * view.rows;
    for (int64_t i = 0; i < view.rows; ++i) {
      uint8_t* out = args.codes + ((first_row + i) * heads + head) * dim;
      const bool nan = std::isnan(codes.scale_of_row(i));
      for (int64_t c = 0; c < dim; ++c)
        out[c] = nan ? numerics::kE4m3Nan : numerics::e4m3_code_of(codes.row(i, dim_padded)[c]);
    }
  });
}

namespace {

// Writes one head's FP64 rows into a contiguous [batch, rows, heads, head_dim] array (or adds, for the GQA sum).
void write_rows(const Problem& problem, const std::vector<double>& rows, int64_t sequence, int64_t head, bool is_query,
                bool accumulate, double* out) {
  if (!out) return;
  const Sequence& at = problem.sequences[static_cast<size_t>(sequence)];
  const int64_t count = is_query ? at.q_rows : at.k_rows, heads = is_query ? problem.q_heads : problem.kv_heads;
  const int64_t first = problem.variable_length ? (is_query ? at.q_first : at.k_first) : sequence * count;
  const int64_t dim = problem.head_dim, dim_padded = round_up(dim, kLanes);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < dim; ++c) {
      double& to = out[((first + i) * heads + head) * dim + c];
      const double value = rows[static_cast<size_t>(i * dim_padded + c)];
      to = accumulate ? to + value : value;
    }
}

}  // namespace

void reference(const Problem& problem, const dmattn_reference_args& args) {
  each_group(problem, [&](int64_t sequence, int64_t kv_head) {
    const HeadShape shape = head_shape(problem, sequence);
    const std::vector<float> k = load(head_view(problem, args.k, sequence, kv_head, false));
    const std::vector<float> v = load(head_view(problem, args.v, sequence, kv_head, false));
    const int64_t first_head = kv_head * problem.group();
    const bool gradients = args.dq != nullptr || args.dk != nullptr || args.dv != nullptr;
    for (int64_t head = first_head; head < first_head + problem.group(); ++head) {
      const std::vector<float> q = load(head_view(problem, args.q, sequence, head, true));
      const std::vector<float> d_o = load(head_view(problem, gradients ? args.d_o : args.q, sequence, head, true));
      static constexpr float kNoRows = 0;  // a gradient without rows is still a gradient, and its pointer may be null
      const Reference truth =
          reference_attention(shape, q.data(), k.data(), v.data(),
                              gradients ? (d_o.empty() ? &kNoRows : d_o.data()) : nullptr, problem.threads);
      write_rows(problem, truth.o, sequence, head, true, false, args.o);
      if (args.lse) std::copy(truth.lse.begin(), truth.lse.end(), args.lse + problem.row_vector(sequence, head));
      if (!gradients) continue;
      write_rows(problem, truth.dq, sequence, head, true, false, args.dq);
      write_rows(problem, truth.dk, sequence, kv_head, false, head > first_head, args.dk);
      write_rows(problem, truth.dv, sequence, kv_head, false, head > first_head, args.dv);
    }
  });
}

}  // namespace dmattn::cpu
