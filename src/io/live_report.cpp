#include "io/live_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "core/error.h"
#include "io/json_build.h"

namespace dmattn {
namespace {

constexpr std::size_t kMostChannels = 32;
constexpr std::size_t kMostCells = std::size_t{1} << 22;  // layers and modes times steps: ten numbers each

// Adds up what was measured; NaN takes no part.
class Over {
 public:
  void add(double value) {
    if (!std::isfinite(value)) return;
    sum_ += value;
    largest_ = std::max(largest_, value);
    ++count_;
  }
  double mean() const { return count_ > 0 ? sum_ / count_ : kNaN; }
  double largest() const { return count_ > 0 ? largest_ : kNaN; }

 private:
  double sum_ = 0, largest_ = -std::numeric_limits<double>::infinity(), count_ = 0;
};

// All names, in the order of the latest step that has them.
std::vector<std::string> layer_names(const LiveLog& log) {
  std::vector<std::string> names;
  std::set<std::string> known;
  for (auto step = log.steps.rbegin(); step != log.steps.rend(); ++step)
    for (const LiveLayer& layer : step->second.layers)
      if (known.insert(layer.layer).second) names.push_back(layer.layer);
  return names;
}

void put(LiveModeSeries& series, std::size_t at, std::size_t steps, const LiveLayer& layer, const std::string& mode) {
  Over rms, after, mean, sharpens, column, o, dq, dk, dv;
  for (const LiveHead& head : layer.heads) {
    const auto found = head.modes.find(mode);
    if (found == head.modes.end()) continue;
    const LiveMode& one = found->second;
    rms.add(one.rms);
    after.add(one.rms_after_cast);
    mean.add(one.mean_after_cast);
    sharpens.add(one.sharpens);
    column.add(one.column_sum_after_cast);
    o.add(one.error.o);
    dq.add(one.error.dq);
    dk.add(one.error.dk);
    dv.add(one.error.dv);
  }
  const auto set = [&](std::vector<double>& values, double value) {
    values.resize(steps, kNaN);
    values[at] = value;
  };
  set(series.residual, rms.mean());
  set(series.residual_after_cast, after.mean());
  set(series.mean_after_cast, mean.mean());
  set(series.sharpens, sharpens.mean());
  set(series.column_sum_after_cast, column.mean());
  set(series.error_o, o.largest());
  set(series.error_dq, dq.largest());
  set(series.error_dk, dk.largest());
  set(series.error_dv, dv.largest());
}

std::vector<LiveLayerSeries> series_of(const LiveLog& log) {
  std::map<std::string, LiveLayerSeries> by_name;
  const std::vector<std::string> names = layer_names(log);
  const std::size_t steps = log.steps.size();
  std::size_t cells = names.size() * steps;
  const auto check = [&] {
    if (cells > kMostCells)
      throw InvalidValue(
          fmt::format("the log must hold at most {} layers and modes times steps, got more", kMostCells));
  };
  check();
  std::size_t at = 0;
  for (const auto& [number, step] : log.steps) {
    for (const LiveLayer& layer : step.layers) {
      LiveLayerSeries& series = by_name[layer.layer];
      series.entropy.resize(steps, kNaN);
      series.gain_share.resize(steps, kNaN);
      Over entropy, gain;
      std::set<std::string> modes;
      for (const LiveHead& head : layer.heads) {
        entropy.add(head.entropy);
        gain.add(head.gain_share);
        for (const auto& [mode, numbers] : head.modes) modes.insert(mode);
      }
      series.entropy[at] = entropy.mean();
      series.gain_share[at] = gain.largest();
      for (const std::string& mode : modes) {
        if (series.modes.find(mode) == series.modes.end()) cells += steps;
        check();
        put(series.modes[mode], at, steps, layer, mode);
      }
    }
    ++at;
  }
  std::vector<LiveLayerSeries> out;
  for (const std::string& name : names) {
    by_name[name].layer = name;
    out.push_back(std::move(by_name[name]));
  }
  return out;
}

std::vector<LiveChannel> channels_of(const LiveLog& log) {
  struct Sums {
    std::vector<double> signed_sum, magnitude;
    int64_t steps = 0;
  };
  std::map<std::tuple<std::string, int64_t, std::string>, Sums> all;
  for (const auto& [number, step] : log.steps)
    for (const LiveLayer& layer : step.layers)
      for (const LiveHead& head : layer.heads)
        for (const auto& [mode, numbers] : head.modes) {
          const bool known = std::none_of(numbers.columns.begin(), numbers.columns.end(),
                                          [](float value) { return std::isnan(value); });
          if (!known || numbers.columns.empty()) continue;
          Sums& sums = all[{layer.layer, head.head, mode}];
          sums.signed_sum.resize(std::max(sums.signed_sum.size(), numbers.columns.size()));
          sums.magnitude.resize(sums.signed_sum.size());
          for (std::size_t c = 0; c < numbers.columns.size(); ++c) {
            sums.signed_sum[c] += static_cast<double>(numbers.columns[c]);
            sums.magnitude[c] += std::abs(static_cast<double>(numbers.columns[c]));
          }
          ++sums.steps;
        }
  std::vector<LiveChannel> channels;
  const auto larger = [](const LiveChannel& a, const LiveChannel& b) { return std::abs(a.share) > std::abs(b.share); };
  for (const auto& [key, sums] : all) {
    const auto& [layer, head, mode] = key;
    for (std::size_t c = 0; c < sums.magnitude.size(); ++c) {
      if (!(sums.magnitude[c] > 0)) continue;
      channels.push_back({layer, mode, head, static_cast<int64_t>(c), sums.steps,
                          sums.signed_sum[c] / static_cast<double>(sums.steps),
                          std::abs(sums.signed_sum[c]) / sums.magnitude[c]});
    }
    if (channels.size() > 4096) {  // keeps memory to what is shown
      std::stable_sort(channels.begin(), channels.end(), larger);
      channels.resize(kMostChannels);
    }
  }
  std::stable_sort(channels.begin(), channels.end(), larger);
  if (channels.size() > kMostChannels) channels.resize(kMostChannels);
  return channels;
}

std::vector<LiveGap> gaps_of(const LiveLog& log) {
  std::map<std::pair<std::string, std::string>, int64_t> counts;
  for (const auto& [number, step] : log.steps)
    for (const LiveRefusal& refusal : step.not_measured) ++counts[{refusal.layer, refusal.reason}];
  std::vector<LiveGap> gaps;
  for (const auto& [key, steps] : counts) gaps.push_back({key.first, key.second, steps});
  return gaps;
}

// Four digits: a page of a thousand steps and a hundred layers holds a million of these.
ordered_json rounded(double value) {
  return std::isfinite(value) ? ordered_json(std::strtod(fmt::format("{:.3e}", value).c_str(), nullptr))
                              : ordered_json(nullptr);
}

ordered_json json_of(const std::vector<double>& values) {
  ordered_json out = ordered_json::array();
  for (const double value : values) out.push_back(rounded(value));
  return out;
}

ordered_json json_of(const LiveLayerSeries& layer) {
  ordered_json modes = ordered_json::object();
  for (const auto& [mode, series] : layer.modes)
    modes[mode] = {{"residual", json_of(series.residual)},
                   {"residual_after_cast", json_of(series.residual_after_cast)},
                   {"mean_after_cast", json_of(series.mean_after_cast)},
                   {"sharpens", json_of(series.sharpens)},
                   {"column_sum_after_cast", json_of(series.column_sum_after_cast)},
                   {"error",
                    {{"o", json_of(series.error_o)},
                     {"dq", json_of(series.error_dq)},
                     {"dk", json_of(series.error_dk)},
                     {"dv", json_of(series.error_dv)}}}};
  return {{"layer", layer.layer},
          {"entropy", json_of(layer.entropy)},
          {"gain_share", json_of(layer.gain_share)},
          {"modes", modes}};
}

ordered_json document_of(const LiveReport& report, const std::string& file) {
  ordered_json document{
      {"schema", "dmattn.report/1"},
      {"version", DMATTN_VERSION_STRING},
      {"numerics", report.numerics},
      {"centre", report.centre},
      {"device", report.device},
      {"input", {{"file", file}, {"lines", report.lines}, {"runs", report.runs}, {"unfinished", report.unfinished}}},
      {"steps", report.steps},
      {"layers", ordered_json::array()},
      {"channels", ordered_json::array()},
      {"not_measured", ordered_json::array()}};
  for (const LiveLayerSeries& layer : report.layers) document["layers"].push_back(json_of(layer));
  for (const LiveChannel& one : report.channels)
    document["channels"].push_back({{"layer", one.layer},
                                    {"head", one.head},
                                    {"mode", one.mode},
                                    {"channel", one.channel},
                                    {"share", rounded(one.share)},
                                    {"consistency", rounded(one.consistency)},
                                    {"steps", one.steps}});
  for (const LiveGap& gap : report.not_measured)
    document["not_measured"].push_back({{"layer", gap.layer}, {"reason", gap.reason}, {"steps", gap.steps}});
  return document;
}

}  // namespace

LiveReport live_report(const LiveLog& log) {
  LiveReport report;
  report.numerics = log.numerics;
  report.centre = log.centre;
  report.device = log.device;
  report.lines = log.lines;
  report.runs = log.runs;
  report.unfinished = log.unfinished;
  for (const auto& [step, numbers] : log.steps) report.steps.push_back(step);
  report.layers = series_of(log);
  report.channels = channels_of(log);
  report.not_measured = gaps_of(log);
  return report;
}

std::string live_report_json(const LiveReport& report, const std::string& file) {
  return dumped(document_of(report, file), -1);
}

std::string live_report_html(const LiveReport& report, const std::string& file) {
  return report_page("report", "dmattn report: " + file, {"head_report.html", "live.html", "foot.html"},
                     document_of(report, file), nullptr);
}

}  // namespace dmattn
