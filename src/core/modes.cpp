#include "core/modes.h"

namespace dmattn {
namespace {

template <class Enum>
struct Named {
  Enum value;
  std::string_view name;
};

constexpr Named<Mode> kModeNames[] = {{Mode::stale, "stale"},          {Mode::consistent, "consistent"},
                                      {Mode::matched, "matched"},      {Mode::onepass, "onepass"},
                                      {Mode::bf16_dp, "bf16_dp"},      {Mode::max_shift, "max_shift"},
                                      {Mode::per_tensor, "per_tensor"}};
constexpr Named<Numerics> kNumericsNames[] = {{Numerics::hopper, "hopper"}, {Numerics::paper, "paper"}};
constexpr Named<Centre> kCentreNames[] = {{Centre::none, "none"}, {Centre::k, "k"}, {Centre::qk, "qk"}};

template <class Enum, size_t N>
std::string_view name_of(const Named<Enum> (&table)[N], Enum value) {
  for (const auto& entry : table)
    if (entry.value == value) return entry.name;
  return "unknown";
}

template <class Enum, size_t N>
std::optional<Enum> find(const Named<Enum> (&table)[N], std::string_view text) {
  for (const auto& entry : table)
    if (entry.name == text) return entry.value;
  return std::nullopt;
}

bool is_ablation(Mode mode) { return mode > Mode::onepass; }

template <class List>
std::string joined(const List& modes) {
  std::string text;
  for (const Mode mode : modes) {
    if (!text.empty()) text += ", ";
    text += name(mode);
  }
  return text;
}

}  // namespace

std::string_view name(Mode mode) { return name_of(kModeNames, mode); }
std::string_view name(Numerics numerics) { return name_of(kNumericsNames, numerics); }
std::string_view name(Centre centre) { return name_of(kCentreNames, centre); }

std::optional<Mode> mode_from_name(std::string_view text) {
  const auto mode = find(kModeNames, text);
  return mode && !is_ablation(*mode) ? mode : std::nullopt;
}

std::optional<Mode> ablation_from_name(std::string_view text) {
  const auto mode = find(kModeNames, text);
  return mode && is_ablation(*mode) ? mode : std::nullopt;
}

std::optional<Numerics> numerics_from_name(std::string_view text) { return find(kNumericsNames, text); }
std::optional<Centre> centre_from_name(std::string_view text) { return find(kCentreNames, text); }
std::string mode_names() { return joined(kModes); }
std::string ablation_names() { return joined(kAblations); }

}  // namespace dmattn
