// Quantiles and error sums of the reports.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "analysis/analysis.h"

namespace dmattn {

// Linear interpolation between order statistics, as numpy.quantile does. NaN for no values.
inline double quantile(std::vector<double> values, double fraction) {
  if (values.empty()) return kNaN;
  std::sort(values.begin(), values.end());
  const double at = fraction * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

inline Statistic statistic(const std::vector<double>& values) {
  return {quantile(values, 0.5), quantile(values, 0.95), quantile(values, 1.0)};
}

inline SignedResidual signed_residual(const std::vector<double>& values) {
  if (values.empty()) return {};
  double sum = 0, squares = 0, below = 0, above = 0;
  for (const double value : values) {
    sum += value;
    squares += value * value;
    below += value < 0;
    above += value > 0;
  }
  const auto rows = static_cast<double>(values.size());
  return {std::sqrt(squares / rows), sum / rows, below / rows, above / rows};
}

inline std::vector<double> magnitudes(std::vector<double> values) {
  for (double& value : values) value = std::abs(value);
  return values;
}

// Relative Frobenius error, gathered in pieces.
struct ErrorSum {
  double difference = 0, reference = 0;

  template <class Mine>
  void add(const Mine& mine, const std::vector<double>& truth) {
    for (size_t i = 0; i < truth.size(); ++i) {
      const double d = static_cast<double>(mine[i]) - truth[i];
      difference += d * d;
      reference += truth[i] * truth[i];
    }
  }
  void add(const ErrorSum& other) {
    difference += other.difference;
    reference += other.reference;
  }
  double value() const { return reference > 0 ? std::sqrt(difference / reference) : kNaN; }  // NaN: no measure
};

}  // namespace dmattn
