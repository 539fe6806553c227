// What a live probe's log says, layer by layer: as a document, as tables and as a page.
#pragma once

#include <string>
#include <vector>

#include "io/live_log.h"

namespace dmattn {

// One mode of a layer by step, over its measured heads: means, but of errors the largest. NaN where nothing was.
struct LiveModeSeries {
  std::vector<double> residual, residual_after_cast, mean_after_cast, sharpens, column_sum_after_cast;
  std::vector<double> error_o, error_dq, error_dk, error_dv;
};

struct LiveLayerSeries {
  std::string layer;
  std::vector<double> entropy, gain_share;  // mean over heads, largest over heads
  std::map<std::string, LiveModeSeries> modes;
};

// A key channel of a head, and how it was pushed over all measured steps.
struct LiveChannel {
  std::string layer, mode;
  int64_t head = 0, channel = 0, steps = 0;
  double share = kNaN;        // mean of sum_j dK_jc / sum |dK| over steps
  double consistency = kNaN;  // |sum over steps| / sum over steps of magnitudes
};

struct LiveGap {
  std::string layer, reason;
  int64_t steps = 0;
};

struct LiveReport {
  std::string numerics, centre, device;
  int64_t lines = 0, runs = 0;
  bool unfinished = false;
  std::vector<int64_t> steps;
  std::vector<LiveLayerSeries> layers;  // every series has a value for each step
  std::vector<LiveChannel> channels;    // those with the largest mean share, largest first
  std::vector<LiveGap> not_measured;
};

// Throws InvalidValue where layers times steps are more than a report can hold.
LiveReport live_report(const LiveLog& log);

// dmattn.report/1
std::string live_report_json(const LiveReport& report, const std::string& file);

std::string live_report_html(const LiveReport& report, const std::string& file);

}  // namespace dmattn
