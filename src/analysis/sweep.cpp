// Sweep: the residual table over random heads. Per seed and head, the median over rows; then the median of those.
#include "analysis/analysis.h"
#include "analysis/statistics.h"

namespace dmattn {
namespace {

struct Samples {
  std::vector<double> residual, residual_after_cast, column_sum, o, dq, dk, dv;

  void add(const ModeResult& head) {
    residual.push_back(head.residual.median);
    residual_after_cast.push_back(head.residual_after_cast.median);
    column_sum.push_back(head.column_sum);
    o.push_back(head.error.o);
    dq.push_back(head.error.dq);
    dk.push_back(head.error.dk);
    dv.push_back(head.error.dv);
  }

  void write(SweepRow& row) const {
    row.residual = quantile(residual, 0.5);
    row.residual_after_cast = quantile(residual_after_cast, 0.5);
    row.column_sum = quantile(column_sum, 0.5);
    row.error_o = quantile(o, 0.5);
    row.error_dq = quantile(dq, 0.5);
    row.error_dk = quantile(dk, 0.5);
    row.error_dv = quantile(dv, 0.5);
  }
};

}  // namespace

std::vector<SweepRow> sweep(const SweepOptions& sweep_options, const RunOptions& options) {
  std::vector<SweepRow> rows;
  RunOptions quiet = options;
  quiet.progress = nullptr;
  const std::vector<std::string> families = sweep_options.families;
  const double total = static_cast<double>(families.size() * sweep_options.spreads.size()) * sweep_options.seeds;
  double done = 0;
  for (const std::string& family : families)
    for (const double spread : sweep_options.spreads) {
      std::map<Mode, Samples> samples;
      for (int seed = 0; seed < sweep_options.seeds; ++seed) {
        const Layer layer =
            random_layer(family, spread, sweep_options, sweep_options.first_seed + static_cast<uint64_t>(seed));
        for (const HeadResult& head : probe(layer, quiet).heads)
          for (const auto& [mode, numbers] : head.modes) samples[mode].add(numbers);
        done += 1;
        if (options.progress) options.progress(done / total, family);
      }
      for (const Mode mode : options.modes) {
        SweepRow row;
        row.inputs = family;
        row.spread = spread;
        row.mode = mode;
        samples[mode].write(row);
        rows.push_back(row);
      }
    }
  return rows;
}

}  // namespace dmattn
