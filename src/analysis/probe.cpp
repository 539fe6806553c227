// Probe: every mode on one captured layer, per query head and over the layer.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>

#include <omp.h>

#include "analysis/head_run.h"
#include "analysis/kernel_run.h"
#include "analysis/statistics.h"
#include "core/error.h"
#include "cpu/parallel.h"
#include "cpu/tile_kernels.h"
#include "numerics/bf16.h"

namespace dmattn {
namespace {

// Everything one mode adds up over some set of heads.
struct Tally {
  std::vector<double> residual, residual_after_cast;  // signed
  double column = 0, column_after_cast = 0, dk_magnitude = 0;
  std::vector<double> columns_after_cast;  // empty where heads were added up: their channels have nothing in common
  ErrorSum o, dq, dk, dv;
  bool used = false;

  void add_rows(const cpu::HeadShape& shape, const cpu::Diagnostics& diagnostics) {
    for (int64_t i = 0; i < shape.queries; ++i) {
      const auto row = static_cast<size_t>(i);
      if (shape.visible(i) < 2) continue;  // with one key dS is zero whatever the method
      if (diagnostics.magnitude[row] > 0) residual.push_back(diagnostics.sum[row] / diagnostics.magnitude[row]);
      if (diagnostics.cast_magnitude[row] > 0)
        residual_after_cast.push_back(diagnostics.cast_sum[row] / diagnostics.cast_magnitude[row]);
    }
    for (const double value : diagnostics.column) column += std::abs(value);
    for (const double value : diagnostics.column_after_cast) column_after_cast += std::abs(value);
    columns_after_cast.assign(diagnostics.column_after_cast.begin(), diagnostics.column_after_cast.begin() + shape.dim);
    dk_magnitude += diagnostics.dk_magnitude;
    used = true;
  }

  void add(const Tally& other) {
    residual.insert(residual.end(), other.residual.begin(), other.residual.end());
    residual_after_cast.insert(residual_after_cast.end(), other.residual_after_cast.begin(),
                               other.residual_after_cast.end());
    column += other.column;
    column_after_cast += other.column_after_cast;
    columns_after_cast.resize(std::max(columns_after_cast.size(), other.columns_after_cast.size()));
    for (size_t c = 0; c < other.columns_after_cast.size(); ++c) columns_after_cast[c] += other.columns_after_cast[c];
    dk_magnitude += other.dk_magnitude;
    o.add(other.o);
    dq.add(other.dq);
    dk.add(other.dk);
    dv.add(other.dv);
    used = used || other.used;
  }

  ModeResult result() const {
    ModeResult out;
    if (!used) return out;
    out.residual = statistic(magnitudes(residual));
    out.residual_after_cast = statistic(magnitudes(residual_after_cast));
    out.signed_residual = signed_residual(residual);
    out.signed_residual_after_cast = signed_residual(residual_after_cast);
    const double whole = !residual.empty() && dk_magnitude > 0 ? dk_magnitude : kNaN;
    out.column_sum = column / whole;
    out.column_sum_after_cast = column_after_cast / whole;
    out.columns_after_cast = columns_after_cast;
    for (double& value : out.columns_after_cast) value /= whole;
    out.error = {o.value(), dq.value(), dk.value(), dv.value()};
    return out;
  }
};

// Entropy of the exact softmax over rows with two visible keys or more.
struct Entropy {
  double sum = 0;
  int64_t rows = 0;

  void add(const cpu::HeadShape& shape, const std::vector<double>& entropy) {
    for (int64_t i = 0; i < shape.queries; ++i) {
      if (shape.visible(i) < 2) continue;
      sum += entropy[static_cast<size_t>(i)];
      ++rows;
    }
  }
  void add(const Entropy& other) {
    sum += other.sum;
    rows += other.rows;
  }
  double mean() const { return rows > 0 ? sum / static_cast<double>(rows) : kNaN; }
};

// One KV head of one batch entry: its query heads in order, and the group's summed dK and dV.
struct Group {
  std::vector<std::map<Mode, Tally>> heads;
  std::vector<Entropy> entropy;  // of each head
  std::map<Mode, Tally> whole;   // dk and dv of the group; everything else is in heads
  std::vector<bool> finite;
};

template <class T>
void accumulate(std::vector<T>& sum, std::vector<T>&& part) {
  if (sum.empty()) {
    sum = std::move(part);
  } else {
    for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
  }
}

class LayerProbe {
 public:
  LayerProbe(const Layer& layer, const RunOptions& options, LayerKernels* kernels)
      : layer_(layer), options_(options), amax_(tensor_amax(layer, options)) {
    if (kernels) kernels_.emplace(layer, options.modes, *kernels);
  }

  std::vector<Group> run() {
    const int64_t items = layer_.batch * layer_.kv_heads;
    std::vector<Group> groups(static_cast<size_t>(items));
    // Few groups: one after the other, all threads inside each. Many: a thread per group.
    const bool outer = items >= cpu::thread_count(options_.threads);
    cpu::parallel_for(items, outer ? options_.threads : 1, [&](int64_t item) {
      groups[static_cast<size_t>(item)] = run_group(item / layer_.kv_heads, item % layer_.kv_heads);
    });
    return groups;
  }

 private:
  // Sums over a group's query heads, in ascending order.
  struct GroupSums {
    std::vector<double> dk_truth, dv_truth;
    std::map<Mode, cpu::KeySums> modes;
  };

  Group run_group(int64_t batch, int64_t kv_head) {
    const int64_t members = layer_.q_heads / layer_.kv_heads;
    Group group;
    group.heads.resize(static_cast<size_t>(members));
    group.entropy.resize(static_cast<size_t>(members));
    GroupSums sums;
    for (int64_t member = 0; member < members; ++member) {
      const auto at = static_cast<size_t>(member);
      group.finite.push_back(run_head(batch, kv_head * members + member, group.heads[at], group.entropy[at], sums));
      report_progress();
    }
    for (auto& [mode, sum] : sums.modes) {
      if (kernels_) {
        sum = {kernels_->group_dk(mode, batch, kv_head), kernels_->group_dv(mode, batch, kv_head)};
      } else {
        cpu::finish(options_.numerics, layer_.softmax_scale, sum);
        for (auto* x : {&sum.dk, &sum.dv})
          for (float& value : *x) value = numerics::bf16_round(value);
      }
      group.whole[mode].dk.add(sum.dk, sums.dk_truth);
      group.whole[mode].dv.add(sum.dv, sums.dv_truth);
    }
    return group;
  }

  HeadMode run_mode(HeadRunner& runner, Mode mode, int64_t batch, int64_t q_head, cpu::KeySums& group) const {
    return kernels_ ? runner.measure(mode, kernels_->head(mode, batch, q_head)) : runner.run(mode, &group);
  }

  // False, and nothing added, for a head whose inputs are not finite or whose logits leave the domain.
  bool run_head(int64_t batch, int64_t q_head, std::map<Mode, Tally>& tallies, Entropy& entropy, GroupSums& sums) {
    const HeadInputs inputs = head_inputs(layer_, batch, q_head);
    HeadRunner runner(inputs, options_, amax_);
    if (!inputs.finite || (kernels_ ? kernels_->left_out(batch, q_head) : !runner.in_domain())) return false;
    cpu::Reference truth = cpu::reference_attention(inputs.shape, inputs.q.data(), inputs.k.data(), inputs.v.data(),
                                                    inputs.d_o.data(), options_.threads);
    entropy.add(inputs.shape, truth.entropy);
    for (const Mode mode : options_.modes) {
      const HeadMode result = run_mode(runner, mode, batch, q_head, sums.modes[mode]);
      Tally& tally = tallies[mode];
      tally.add_rows(inputs.shape, result.diagnostics);
      tally.o.add(result.o, truth.o);
      tally.dq.add(result.dq, truth.dq);
      tally.dk.add(result.dk, truth.dk);
      tally.dv.add(result.dv, truth.dv);
    }
    accumulate(sums.dk_truth, std::move(truth.dk));
    accumulate(sums.dv_truth, std::move(truth.dv));
    return true;
  }

  void report_progress() {
    const int64_t done = ++done_;
    if (options_.progress && omp_get_thread_num() == 0)
      options_.progress(static_cast<double>(done) / static_cast<double>(layer_.batch * layer_.q_heads), "heads");
  }

  const Layer& layer_;
  const RunOptions& options_;
  TensorAmax amax_;
  std::optional<KernelRun> kernels_;  // measured in place of the twin
  std::atomic<int64_t> done_{0};
};

}  // namespace

void check_options(const Layer& layer, const RunOptions& options) {
  const bool ablation =
      std::any_of(options.modes.begin(), options.modes.end(), [](Mode m) { return m > Mode::onepass; });
  if (options.numerics == Numerics::paper) {
    if (options.centre == Centre::qk)
      throw Unsupported("centre: paper numerics centres none or k, got qk (use hopper numerics)");
    return;
  }
  if (ablation) throw Unsupported("ablation: offered in paper numerics only, got hopper");
  if (layer.head_dim != 64 && layer.head_dim != 128 && layer.head_dim != 256)
    throw Unsupported("head_dim: hopper numerics takes 64, 128 or 256, got " + std::to_string(layer.head_dim) +
                      " (paper numerics takes any)");
}

ProbeResult probe(const Layer& layer, const RunOptions& options, LayerKernels* kernels) {
  check_options(layer, options);
  if (kernels && options.numerics == Numerics::paper)
    throw Unsupported("numerics: kernels other than the twin compute hopper numerics alone, got paper");
  const std::vector<Group> groups = LayerProbe(layer, options, kernels).run();
  ProbeResult out;
  std::map<Mode, Tally> whole;
  const int64_t members = layer.q_heads / layer.kv_heads;
  for (int64_t head = 0; head < layer.q_heads; ++head) {
    HeadResult result{head, kNaN, {}};
    bool finite = true;
    std::map<Mode, Tally> own;
    Entropy entropy;
    for (int64_t batch = 0; batch < layer.batch; ++batch) {
      const Group& group = groups[static_cast<size_t>(batch * layer.kv_heads + head / members)];
      const auto member = static_cast<size_t>(head % members);
      finite = finite && group.finite[member];
      entropy.add(group.entropy[member]);
      for (const auto& [mode, tally] : group.heads[member]) own[mode].add(tally);
    }
    if (finite) {
      result.entropy = entropy.mean();
    } else {
      out.nonfinite_heads.push_back(head);
    }
    for (const Mode mode : options.modes) {
      const ModeResult& numbers = result.modes[mode] = finite ? own[mode].result() : ModeResult{};
      if (!finite || !own[mode].used) continue;  // nothing was measured
      Tally& total = whole[mode];
      Tally without_kv = own[mode];
      without_kv.dk = without_kv.dv = {};  // the layer's dK and dV are those of the summed groups
      without_kv.columns_after_cast.clear();
      total.add(without_kv);
      ModeResult& layer_result = out.modes[mode];
      if (std::isfinite(numbers.error.dq) &&
          (layer_result.worst_head < 0 || numbers.error.dq > layer_result.worst_head_dq)) {
        layer_result.worst_head = head;
        layer_result.worst_head_dq = numbers.error.dq;
      }
    }
    out.heads.push_back(std::move(result));
  }
  for (const Group& group : groups)
    for (const auto& [mode, tally] : group.whole) {
      whole[mode].dk.add(tally.dk);
      whole[mode].dv.add(tally.dv);
    }
  for (const Mode mode : options.modes) {
    ModeResult& result = out.modes[mode];
    const int64_t worst = result.worst_head;
    const double worst_dq = result.worst_head_dq;
    result = whole[mode].result();
    result.worst_head = worst;
    result.worst_head_dq = worst_dq;
  }
  return out;
}

}  // namespace dmattn
