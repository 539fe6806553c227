#include "io/live_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>

#include "core/error.h"
#include "io/text.h"

namespace dmattn {
namespace {

using nlohmann::json;

constexpr std::string_view kSchema = "dmattn.live/1";
constexpr std::size_t kLongestLine = std::size_t{16} << 20;  // 100 layers of 16 heads take a quarter of it
constexpr std::size_t kMostValues = std::size_t{1} << 26;    // kept of a log: 2,000 steps of 64 layers of 4 heads
constexpr std::size_t kMostEntries = 65536;                  // of a list in a line
constexpr int kDeepest = 32;
constexpr std::size_t kMostModes = 16;
constexpr int64_t kLargestStep = int64_t{1} << 53;  // exact in a script's numbers

// A value of a line and where it stands, for messages.
class Field {
 public:
  Field(const json& value, std::string path) : value_(&value), path_(std::move(path)) {}

  Field operator[](const char* key) const {
    if (!value_->is_object()) fail("must be an object");
    const auto found = value_->find(key);
    if (found == value_->end()) throw InvalidValue(fmt::format("{}.{}: is missing", path_, key));
    return {*found, fmt::format("{}.{}", path_, key)};
  }

  bool null() const { return value_->is_null(); }

  double number() const {  // null: not measured
    if (value_->is_null()) return kNaN;
    if (!value_->is_number()) fail("must be a number or null");
    return value_->get<double>();
  }

  int64_t count(int64_t most = kLargestStep) const {
    if (!value_->is_number_integer() || value_->get<double>() < 0 || value_->get<double>() > static_cast<double>(most))
      fail(fmt::format("must be a whole number from 0 to {}", most));
    return value_->get<int64_t>();
  }

  std::string text() const {
    if (!value_->is_string()) fail("must be a string");
    return value_->get<std::string>();
  }

  std::vector<Field> list() const {
    if (!value_->is_array()) fail("must be a list");
    if (value_->size() > kMostEntries) fail(fmt::format("must have at most {} entries", kMostEntries));
    std::vector<Field> entries;
    for (std::size_t i = 0; i < value_->size(); ++i)
      entries.emplace_back((*value_)[i], fmt::format("{}[{}]", path_, i));
    return entries;
  }

  std::vector<std::pair<std::string, Field>> members() const {
    if (!value_->is_object()) fail("must be an object");
    std::vector<std::pair<std::string, Field>> out;
    for (const auto& [name, value] : value_->items())
      out.emplace_back(name, Field(value, fmt::format("{}[{}]", path_, in_quotes(name))));
    return out;
  }

  [[noreturn]] void fail(const std::string& what) const {
    const std::string kind = value_->is_primitive()
                                 ? in_quotes(value_->dump(-1, ' ', true, json::error_handler_t::replace))
                                 : std::string(value_->is_object() ? "an object" : "a list");
    throw InvalidValue(fmt::format("{}: {}, got {}", path_, what, kind));
  }

 private:
  const json* value_;
  std::string path_;
};

LiveMode mode_of(const Field& field) {
  LiveMode mode;
  const Field before = field["signed_residual"], after = field["signed_residual_after_cast"], error = field["error"];
  mode.rms = before["rms"].number();
  mode.sharpens = before["sharpens"].number();
  mode.rms_after_cast = after["rms"].number();
  mode.mean_after_cast = after["mean"].number();
  mode.column_sum_after_cast = field["column_sum_after_cast"].number();
  mode.error = {error["o"].number(), error["dq"].number(), error["dk"].number(), error["dv"].number()};
  for (const Field& column : field["columns_after_cast"].list()) {
    const double value = column.number();
    if (std::abs(value) > std::numeric_limits<float>::max()) column.fail("must be within FP32's range");
    mode.columns.push_back(static_cast<float>(value));
  }
  return mode;
}

LiveHead head_of(const Field& field) {
  LiveHead head;
  head.head = field["head"].count();
  head.entropy = field["entropy"].number();
  const Field gain = field["gain"];
  if (!gain.null()) head.gain_share = gain["share"].number();
  const auto modes = field["modes"].members();
  if (modes.size() > kMostModes) field["modes"].fail(fmt::format("must have at most {} members", kMostModes));
  for (const auto& [name, mode] : modes) head.modes[name] = mode_of(mode);
  return head;
}

LiveStep step_of(const Field& line) {
  LiveStep step;
  std::set<std::string> names;
  for (const Field& field : line["layers"].list()) {
    LiveLayer layer{field["layer"].text(), {}};
    if (!names.insert(layer.layer).second) field["layer"].fail("must be there once");
    std::set<int64_t> heads;
    for (const Field& head : field["heads"].list()) {
      layer.heads.push_back(head_of(head));
      if (!heads.insert(layer.heads.back().head).second) head["head"].fail("must be there once");
    }
    step.layers.push_back(std::move(layer));
  }
  for (const Field& field : line["not_measured"].list())
    step.not_measured.push_back({field["layer"].text(), field["reason"].text()});
  return step;
}

std::size_t values_of(const LiveStep& step) {
  std::size_t values = step.not_measured.size();
  for (const LiveLayer& layer : step.layers)
    for (const LiveHead& head : layer.heads) {
      values += 2;
      for (const auto& [name, mode] : head.modes) values += 9 + mode.columns.size();
    }
  return values;
}

class Reader {
 public:
  void take(const std::string& text) {
    json document;
    try {
      document = json::parse(text, [](int depth, json::parse_event_t, json&) {
        if (depth > kDeepest) throw InvalidValue("nests too deeply");  // each level costs memory
        return true;
      });
    } catch (const json::exception&) {  // its own words speak of bytes and states
      throw InvalidValue("is not JSON (NaN and infinity are not, either)");
    }
    const Field line(document, "line");
    if (!document.is_object()) line.fail("must be an object");
    if (const std::string schema = line["schema"].text(); schema != kSchema)
      throw InvalidValue(fmt::format("schema must be {}, got {}", kSchema, in_quotes(schema)));
    log.numerics = line["numerics"].text();
    log.centre = line["centre"].text();
    log.device = line["device"].text();
    if (document.contains("run")) ++log.runs;
    LiveStep step = step_of(line);
    LiveStep& kept = log.steps[line["step"].count()];
    values_ += values_of(step);
    values_ -= values_of(kept);
    kept = std::move(step);
    if (values_ > kMostValues)
      throw InvalidValue(fmt::format("the log must hold at most {} numbers; report on parts of it", kMostValues));
  }

  LiveLog log;

 private:
  std::size_t values_ = 0;
};

void check_regular(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  switch (status.type()) {
    case std::filesystem::file_type::regular: return;
    case std::filesystem::file_type::not_found: throw InvalidValue(in_quotes(path) + ": no such file");
    case std::filesystem::file_type::directory: throw InvalidValue(in_quotes(path) + ": is a directory");
    case std::filesystem::file_type::none:
      throw InvalidValue(in_quotes(path) + ": cannot be opened: " + one_line(error.message()));
    default: throw InvalidValue(in_quotes(path) + ": is not a regular file");
  }
}

// Lines of a file, none of which may cost more memory than a line may have.
class Lines {
 public:
  explicit Lines(std::istream& in) : in_(in) {}

  // The next line without its end, false at the end of the file. `ended`: the line had an end.
  bool next(std::string& line, bool& ended) {
    line.clear();
    ended = false;
    while (at_ < block_.size() || fill()) {
      const std::size_t end = std::min(block_.find('\n', at_), block_.size());
      line.append(block_, at_, end - at_);
      ended = end < block_.size();
      at_ = end + (ended ? 1 : 0);
      if (line.size() > kLongestLine)
        throw InvalidValue(fmt::format("must be at most {} bytes long, got more", kLongestLine));
      if (ended) return true;
    }
    return !line.empty();
  }

 private:
  bool fill() {
    block_.resize(std::size_t{1} << 16);
    in_.read(block_.data(), static_cast<std::streamsize>(block_.size()));
    if (in_.bad()) throw InvalidValue("cannot be read");
    block_.resize(static_cast<std::size_t>(in_.gcount()));
    at_ = 0;
    return !block_.empty();
  }

  std::istream& in_;
  std::string block_;
  std::size_t at_ = 0;
};

}  // namespace

LiveLog parse_live_log(std::istream& in, const std::string& origin) {
  Reader reader;
  Lines lines(in);
  std::string line;
  bool ended = false;
  int64_t number = 1;
  try {
    while (lines.next(line, ended)) {
      if (!ended) {
        reader.log.unfinished = true;
        break;
      }
      reader.take(line);
      ++number;
    }
  } catch (const InvalidValue& fault) {
    throw InvalidValue(fmt::format("{}: line {}: {}", in_quotes(origin), number, fault.what()));
  }
  reader.log.lines = number - 1;
  if (number == 1)
    throw InvalidValue(
        in_quotes(origin) +
        (reader.log.unfinished ? ": must hold a whole line of schema " : ": is empty, expected lines of schema ") +
        std::string(kSchema));
  return std::move(reader.log);
}

LiveLog read_live_log(const std::string& path) {
  check_regular(path);
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) throw InvalidValue(fmt::format("{}: cannot be opened: {}", in_quotes(path), std::strerror(errno)));
  return parse_live_log(in, path);
}

}  // namespace dmattn
