// The JSON header of a safetensors file: from hostile bytes to tensors whose ranges are known to be sound.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "io/safetensors.h"
#include "io/text.h"

namespace dmattn::safetensors {
namespace {

using nlohmann::json;

constexpr std::size_t kDeepest = 4;  // the format needs three levels: header, tensor, shape
constexpr std::size_t kMostDimensions = 32;
constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  int64_t bytes;
};

constexpr std::array kDtypes{DtypeRow{Dtype::boolean, "BOOL", 1},    DtypeRow{Dtype::u8, "U8", 1},
                             DtypeRow{Dtype::i8, "I8", 1},           DtypeRow{Dtype::f8_e4m3, "F8_E4M3", 1},
                             DtypeRow{Dtype::f8_e5m2, "F8_E5M2", 1}, DtypeRow{Dtype::f8_e8m0, "F8_E8M0", 1},
                             DtypeRow{Dtype::u16, "U16", 2},         DtypeRow{Dtype::i16, "I16", 2},
                             DtypeRow{Dtype::f16, "F16", 2},         DtypeRow{Dtype::bf16, "BF16", 2},
                             DtypeRow{Dtype::u32, "U32", 4},         DtypeRow{Dtype::i32, "I32", 4},
                             DtypeRow{Dtype::f32, "F32", 4},         DtypeRow{Dtype::u64, "U64", 8},
                             DtypeRow{Dtype::i64, "I64", 8},         DtypeRow{Dtype::f64, "F64", 8},
                             DtypeRow{Dtype::c64, "C64", 8}};

const DtypeRow& row_of(Dtype dtype) {
  return *std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeRow& row) { return row.dtype == dtype; });
}

[[noreturn]] void fail(const std::string& origin, const std::string& what) {
  throw InvalidValue(in_quotes(origin) + ": " + what);
}

// A JSON value in a message, cut to a length that fits a line. A container is named by its kind: dumping a deep or
// long one would cost more than the message is worth.
std::string shown(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array() && value.size() > kMostDimensions) return fmt::format("{} entries", value.size());
  return in_quotes(value.dump(-1, ' ', true, json::error_handler_t::replace));
}

// Watches the parser, which alone sees names given twice, and stops what no valid header has before it costs memory.
class Watch {
 public:
  explicit Watch(const std::string& origin) : origin_(origin) {}

  bool operator()(json::parse_event_t event, const json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start: open(); break;
      case json::parse_event_t::array_start: open(); break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end: levels_.pop_back(); break;
      case json::parse_event_t::key: key(parsed.get_ref<const std::string&>()); break;
      case json::parse_event_t::value: value(); break;
    }
    return true;
  }

 private:
  struct Level {
    std::set<std::string> names;
    std::size_t values = 0;
  };

  void open() {
    value();
    if (levels_.size() == kDeepest) fail(origin_, "header JSON must nest at most 4 levels, got more");
    levels_.emplace_back();
  }

  void key(const std::string& name) {
    if (!levels_.back().names.insert(name).second) {
      fail(origin_, fmt::format("header names {} twice, expected each name once", in_quotes(name)));
    }
  }

  // Counts what a list holds; an object's entries are counted by its names.
  void value() {
    if (levels_.empty() || !levels_.back().names.empty()) return;
    if (++levels_.back().values > kMostDimensions) {
      fail(origin_, fmt::format("a list in the header has more than {} entries", kMostDimensions));
    }
  }

  const std::string& origin_;
  std::vector<Level> levels_;
};

json parse_json(std::span<const std::byte> bytes, const std::string& origin) {
  const char* text = reinterpret_cast<const char*>(bytes.data());
  if (bytes.empty() || *text != '{') {
    fail(origin, "not a safetensors file: header must be a JSON object that starts with '{'");
  }
  // The parser takes a zero byte for the end and would never look at what follows.
  if (const void* zero = std::memchr(text, 0, bytes.size())) {
    fail(origin, fmt::format("header is not valid JSON at byte {}", static_cast<const char*>(zero) - text + 1));
  }
  Watch watch(origin);
  const json::parser_callback_t callback = [&](int, json::parse_event_t event, json& parsed) {
    return watch(event, parsed);
  };
  try {
    return json::parse(text, text + bytes.size(), callback);
  } catch (const json::parse_error& error) {
    fail(origin, fmt::format("header is not valid JSON at byte {}", error.byte));
  } catch (const json::exception&) {  // a number no double can hold
    fail(origin, "header is not valid JSON: a number is out of range");
  }
}

std::map<std::string, std::string, std::less<>> parse_metadata(const json& entry, const std::string& origin) {
  if (!entry.is_object()) fail(origin, "__metadata__ must be an object of strings, got " + shown(entry));
  std::map<std::string, std::string, std::less<>> metadata;
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) {
      fail(origin, fmt::format("__metadata__ {} must be a string, got {}", in_quotes(key), shown(value)));
    }
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

// One tensor's entry; the messages all start with file and tensor.
class Entry {
 public:
  Entry(const std::string& origin, const std::string& name, const json& entry)
      : origin_(origin), name_(name), entry_(entry) {
    if (!entry.is_object()) wrong("must be an object with dtype, shape and data_offsets, got " + shown(entry));
  }

  Tensor tensor(uint64_t data_bytes) const {
    Tensor tensor;
    tensor.name = name_;
    const DtypeRow& row = dtype();
    tensor.dtype = row.dtype;
    tensor.shape = shape();
    std::tie(tensor.begin, tensor.end) = offsets(data_bytes);
    check_bytes(tensor, row);
    return tensor;
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const {
    fail(origin_, fmt::format("tensor {}: {}", in_quotes(name_), what));
  }

  const json& field(const char* key) const {
    const auto found = entry_.find(key);
    if (found == entry_.end()) wrong(fmt::format("has no {}", key));
    return *found;
  }

  const DtypeRow& dtype() const {
    const json& value = field("dtype");
    if (!value.is_string()) wrong("dtype must be a string such as \"BF16\", got " + shown(value));
    const auto& text = value.get_ref<const std::string&>();
    const auto found =
        std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeRow& row) { return row.name == text; });
    if (found == kDtypes.end()) wrong(fmt::format("dtype {} is not known", in_quotes(text)));
    return *found;
  }

  uint64_t whole(const json& value, const char* what) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > kLargest) {
      wrong(fmt::format("{} must be whole numbers from 0 to 2^63 - 1, got {}", what, shown(value)));
    }
    return value.get<uint64_t>();
  }

  std::vector<int64_t> shape() const {
    const json& value = field("shape");
    if (!value.is_array()) wrong("shape must be a list of whole numbers, got " + shown(value));
    std::vector<int64_t> shape;
    for (const json& size : value) shape.push_back(static_cast<int64_t>(whole(size, "shape entries")));
    return shape;
  }

  std::pair<uint64_t, uint64_t> offsets(uint64_t data_bytes) const {
    const json& value = field("data_offsets");
    if (!value.is_array() || value.size() != 2) wrong("data_offsets must be [begin, end], got " + shown(value));
    const uint64_t begin = whole(value[0], "data_offsets"), end = whole(value[1], "data_offsets");
    if (begin > end) wrong(fmt::format("data_offsets must not fall, got [{}, {}]", begin, end));
    if (end > data_bytes) {
      wrong(fmt::format("data_offsets [{}, {}] end past the file, which holds {} data bytes (truncated?)", begin, end,
                        data_bytes));
    }
    return {begin, end};
  }

  void check_bytes(const Tensor& tensor, const DtypeRow& row) const {
    uint64_t bytes = static_cast<uint64_t>(row.bytes);
    for (const int64_t size : tensor.shape) {
      const uint64_t factor = static_cast<uint64_t>(size);
      if (factor != 0 && bytes > kLargest / factor) {
        wrong(fmt::format("shape [{}] is too large: its size must fit 63 bits", fmt::join(tensor.shape, ", ")));
      }
      bytes *= factor;
    }
    if (tensor.end - tensor.begin != bytes) {
      wrong(fmt::format("shape [{}] of {} needs {} bytes, data_offsets [{}, {}] hold {}", fmt::join(tensor.shape, ", "),
                        row.name, bytes, tensor.begin, tensor.end, tensor.end - tensor.begin));
    }
  }

  const std::string& origin_;
  const std::string& name_;
  const json& entry_;
};

// The format wants the data covered exactly once: that alone rules out overlaps, holes and trailing bytes.
void check_coverage(const Header& header, uint64_t data_bytes, const std::string& origin) {
  std::vector<const Tensor*> order;
  for (const auto& [name, tensor] : header.tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(),
            [](const Tensor* a, const Tensor* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
  uint64_t covered = 0;
  const Tensor* before = nullptr;
  for (const Tensor* tensor : order) {
    if (tensor->begin < covered) {
      fail(origin, fmt::format("tensors {} and {} overlap: the second must begin at byte {} or later, got {}",
                               in_quotes(before->name), in_quotes(tensor->name), covered, tensor->begin));
    }
    if (tensor->begin > covered) {
      fail(origin, fmt::format("bytes {} to {} before tensor {} belong to no tensor", covered, tensor->begin,
                               in_quotes(tensor->name)));
    }
    covered = tensor->end;
    before = tensor;
  }
  if (covered != data_bytes) {
    fail(origin, fmt::format("{} data bytes after the last tensor, expected none", data_bytes - covered));
  }
}

}  // namespace

std::string_view name(Dtype dtype) { return row_of(dtype).name; }
int64_t element_bytes(Dtype dtype) { return row_of(dtype).bytes; }

Header parse_header(std::span<const std::byte> bytes, uint64_t data_bytes, const std::string& origin) {
  const json root = parse_json(bytes, origin);
  Header header;
  for (const auto& [name, entry] : root.items()) {
    if (name == "__metadata__") {
      header.metadata = parse_metadata(entry, origin);
    } else {
      header.tensors.emplace(name, Entry(origin, name, entry).tensor(data_bytes));
    }
  }
  check_coverage(header, data_bytes, origin);
  return header;
}

}  // namespace dmattn::safetensors
