#include "io/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <numeric>
#include <span>

#include "core/error.h"
#include "io/element.h"
#include "io/text.h"

namespace dmattn {
namespace {

using safetensors::Archive;
using safetensors::Dtype;
using safetensors::Tensor;

// Bounds on what is looped over even where another size is zero, so that an empty file cannot keep a machine busy.
constexpr int64_t kMostHeads = 1 << 16;  // over the batch
constexpr int64_t kMostTokens = int64_t{1} << 31;
constexpr int64_t kLargestHeadDim = 4096;

struct Shape {
  int64_t batch, tokens, heads, head_dim;
};

[[noreturn]] void fail(const Archive& archive, const std::string& what) {
  throw InvalidValue(in_quotes(archive.origin()) + ": " + what);
}

std::string shown(const Tensor& tensor) { return fmt::format("[{}]", fmt::join(tensor.shape, ", ")); }

const Tensor& find(const Archive& archive, std::string_view name) {
  const auto& tensors = archive.header().tensors;
  const auto found = tensors.find(name);
  if (found == tensors.end()) {
    std::vector<std::string> names;
    for (const auto& [other, tensor] : tensors) {
      if (names.size() < 8) names.push_back(in_quotes(other));
    }
    fail(archive, fmt::format("has no tensor '{}': q, k, v and d_o are needed, the file holds {}{}", name,
                              names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")),
                              tensors.size() > names.size() ? ", ..." : ""));
  }
  const Dtype dtype = found->second.dtype;
  if (dtype != Dtype::bf16 && dtype != Dtype::f16 && dtype != Dtype::f32) {
    fail(archive, fmt::format("tensor '{}': dtype must be BF16, F16 or F32, got {}", name, safetensors::name(dtype)));
  }
  return found->second;
}

Shape shape_of(const Archive& archive, const Tensor& tensor) {
  const auto& s = tensor.shape;
  if (s.size() != 3 && s.size() != 4) {
    fail(archive, fmt::format("tensor '{}': shape must be [tokens, heads, head_dim] or [batch, tokens, heads, "
                              "head_dim], got {}",
                              tensor.name, shown(tensor)));
  }
  const std::size_t at = s.size() - 3;
  const Shape shape{at == 0 ? 1 : s[0], s[at], s[at + 1], s[at + 2]};
  const auto check = [&](const char* what, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
      fail(archive, fmt::format("tensor '{}': {} must be {} to {}, got {} (shape {})", tensor.name, what, least, most,
                                value, shown(tensor)));
    }
  };
  check("heads", shape.heads, 1, kMostHeads);
  check("batch x heads", shape.batch > kMostHeads ? shape.batch : shape.batch * shape.heads, 0, kMostHeads);
  check("tokens", shape.tokens, 0, kMostTokens);
  check("head_dim", shape.head_dim, 1, kLargestHeadDim);
  return shape;
}

void check_agreement(const Archive& archive, const std::array<const Tensor*, 4>& tensors) {
  const auto [q, k, v, d_o] = tensors;
  const auto same = [&](const Tensor* a, const Tensor* b) {
    if (a->shape != b->shape) {
      fail(archive, fmt::format("'{}' and '{}' must have the same shape, got {} and {}", a->name, b->name, shown(*a),
                                shown(*b)));
    }
  };
  same(q, d_o);
  same(k, v);
  const Shape a = shape_of(archive, *q), b = shape_of(archive, *k);
  if (a.batch != b.batch || a.head_dim != b.head_dim || q->shape.size() != k->shape.size()) {
    fail(archive, fmt::format("'q' and 'k' must agree in batch and head_dim, got {} and {}", shown(*q), shown(*k)));
  }
  if (a.heads % b.heads != 0) {
    fail(archive, fmt::format("heads of 'q' must be a multiple of the heads of 'k', got {} and {}", a.heads, b.heads));
  }
}

float softmax_scale(const Archive& archive, const LayerOptions& options, int64_t head_dim) {
  if (options.softmax_scale) return *options.softmax_scale;
  const auto& metadata = archive.header().metadata;
  const auto found = metadata.find("softmax_scale");
  if (found == metadata.end()) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  const std::string& text = found->second;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole_text = error == std::errc() && end == text.data() + text.size();
  const float scale = whole_text ? static_cast<float>(value) : 0;
  if (!std::isfinite(scale) || scale <= 0) {
    fail(archive, "metadata softmax_scale must be a finite number above 0, got " + in_quotes(text));
  }
  return scale;
}

// Which query heads are kept, and for each kept KV head which one of the file it is.
struct Selection {
  std::vector<int64_t> q, kv;
};

Selection select_heads(const Archive& archive, const std::vector<int64_t>& heads, int64_t q_heads, int64_t kv_heads) {
  Selection all{std::vector<int64_t>(static_cast<std::size_t>(q_heads)),
                std::vector<int64_t>(static_cast<std::size_t>(kv_heads))};
  std::iota(all.q.begin(), all.q.end(), 0);
  std::iota(all.kv.begin(), all.kv.end(), 0);
  if (heads.empty()) return all;
  if (heads.back() >= q_heads) {
    throw InvalidValue(fmt::format("--heads: must be below {}, the query heads of {}, got {}", q_heads,
                                   in_quotes(archive.origin()), heads.back()));
  }
  std::map<int64_t, int64_t> taken;  // of each KV head, how many query heads
  Selection selection{heads, {}};
  for (const int64_t head : heads) {
    const int64_t kv = head / (q_heads / kv_heads);
    selection.kv.push_back(kv);
    ++taken[kv];
  }
  const bool even =
      std::all_of(taken.begin(), taken.end(), [&](const auto& entry) { return entry.second == taken.begin()->second; });
  if (even) selection.kv.erase(std::unique(selection.kv.begin(), selection.kv.end()), selection.kv.end());
  return selection;
}

std::vector<float> gather(const Archive& archive, const Tensor& tensor, const Shape& shape,
                          const std::vector<int64_t>& heads) {
  const std::vector<std::byte> bytes = archive.read(tensor);
  const std::size_t element = static_cast<std::size_t>(safetensors::element_bytes(tensor.dtype));
  const std::size_t head_dim = static_cast<std::size_t>(shape.head_dim);
  const std::size_t rows = static_cast<std::size_t>(shape.batch * shape.tokens);
  std::vector<float> out(rows * heads.size() * head_dim);
  float* next = out.data();
  for (std::size_t row = 0; row < rows; ++row) {
    for (const int64_t head : heads) {
      const std::size_t at = (row * static_cast<std::size_t>(shape.heads) + static_cast<std::size_t>(head)) * head_dim;
      decode_to_bf16(tensor.dtype, std::span(bytes).subspan(at * element, head_dim * element), next);
      next += head_dim;
    }
  }
  return out;
}

}  // namespace

Layer read_layer(const Archive& archive, const LayerOptions& options) {
  const std::array<const Tensor*, 4> tensors{&find(archive, "q"), &find(archive, "k"), &find(archive, "v"),
                                             &find(archive, "d_o")};
  for (const Tensor* tensor : tensors) shape_of(archive, *tensor);
  check_agreement(archive, tensors);
  const auto [q, k, v, d_o] = tensors;
  const Shape q_shape = shape_of(archive, *q), k_shape = shape_of(archive, *k);
  const Selection selection = select_heads(archive, options.heads, q_shape.heads, k_shape.heads);
  Layer layer;
  layer.batch = q_shape.batch;
  layer.q_tokens = q_shape.tokens;
  layer.k_tokens = k_shape.tokens;
  layer.q_heads = static_cast<int64_t>(selection.q.size());
  layer.kv_heads = static_cast<int64_t>(selection.kv.size());
  layer.head_dim = q_shape.head_dim;
  layer.softmax_scale = softmax_scale(archive, options, layer.head_dim);
  layer.causal = options.causal;
  layer.q = gather(archive, *q, q_shape, selection.q);
  layer.k = gather(archive, *k, k_shape, selection.kv);
  layer.v = gather(archive, *v, k_shape, selection.kv);
  layer.d_o = gather(archive, *d_o, q_shape, selection.q);
  return layer;
}

std::vector<int64_t> parse_heads(std::string_view text) {
  const auto wrong = [&]() -> InvalidValue {
    return InvalidValue("--heads: must be numbers or ranges such as 0,3,6-11, below 65536, got " + in_quotes(text));
  };
  std::vector<int64_t> heads;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&] {
    uint32_t value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value >= kMostHeads) throw wrong();
    at = next;
    return static_cast<int64_t>(value);
  };
  for (;;) {
    const int64_t first = number();
    int64_t last = first;
    if (at != end && *at == '-') {
      ++at;
      last = number();
    }
    if (last < first) throw wrong();
    for (int64_t head = first; head <= last; ++head) heads.push_back(head);
    if (at == end) break;
    if (*at++ != ',' || heads.size() > 4 * static_cast<std::size_t>(kMostHeads)) throw wrong();
  }
  std::sort(heads.begin(), heads.end());
  heads.erase(std::unique(heads.begin(), heads.end()), heads.end());
  return heads;
}

void restore_head_numbers(ProbeResult& result, const std::vector<int64_t>& heads) {
  if (heads.empty()) return;
  const auto restore = [&](int64_t& head) {
    if (head >= 0) head = heads.at(static_cast<std::size_t>(head));
  };
  for (auto& [mode, whole] : result.modes) restore(whole.worst_head);
  for (HeadResult& head : result.heads) {
    restore(head.head);
    for (auto& [mode, one] : head.modes) restore(one.worst_head);
  }
  for (int64_t& head : result.nonfinite_heads) restore(head);
}

void check_head_dim(int64_t head_dim, Numerics numerics, const std::string& what) {
  const bool offered = numerics == Numerics::paper ? head_dim >= 1 && head_dim <= kLargestHeadDim
                                                   : head_dim == 64 || head_dim == 128 || head_dim == 256;
  if (!offered) {
    throw InvalidValue(fmt::format("{} must be {}, got {}", what,
                                   numerics == Numerics::paper
                                       ? "1 to 4096 in paper numerics"
                                       : "64, 128 or 256 in hopper numerics (--numerics paper takes any)",
                                   head_dim));
  }
}

}  // namespace dmattn
