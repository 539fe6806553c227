// The log of a live probe (dmattn.live/1, docs/schemas.md): from a file of JSON lines to what a report needs.
#pragma once

#include <cstdint>
#include <istream>
#include <map>
#include <string>
#include <vector>

#include "analysis/analysis.h"

namespace dmattn {

// One head of a layer in one mode at one step. NaN where nothing could be measured.
struct LiveMode {
  double rms = kNaN, rms_after_cast = kNaN, mean_after_cast = kNaN;  // of the signed residual
  double sharpens = kNaN, column_sum_after_cast = kNaN;
  Errors error;
  std::vector<float> columns;  // after the cast, by key channel
};

struct LiveHead {
  int64_t head = 0;
  double entropy = kNaN, gain_share = kNaN;
  std::map<std::string, LiveMode> modes;
};

struct LiveLayer {
  std::string layer;
  std::vector<LiveHead> heads;
};

struct LiveRefusal {
  std::string layer, reason;
};

struct LiveStep {
  std::vector<LiveLayer> layers;
  std::vector<LiveRefusal> not_measured;
};

struct LiveLog {
  std::string numerics, centre, device;  // of the last line
  int64_t lines = 0, runs = 0;
  bool unfinished = false;            // the last line has no end: a training is writing it, or was killed
  std::map<int64_t, LiveStep> steps;  // where a step comes twice the later line counts
};

// Throws InvalidValue, which names the file, the line and the field, for what is no such log, or is larger than a
// training's log can be.
LiveLog read_live_log(const std::string& path);

// The same of a stream; `origin` is what messages call it.
LiveLog parse_live_log(std::istream& in, const std::string& origin);

}  // namespace dmattn
