// Names of modes, numerics and ablations: the one table that the ABI, the command line and the reports share.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace dmattn {

// Order of reports: from the shortcut to the repairs, then the ablations.
enum class Mode { stale, consistent, matched, onepass, bf16_dp, max_shift, per_tensor };

inline constexpr std::array kModes{Mode::stale, Mode::consistent, Mode::matched, Mode::onepass};
inline constexpr std::array kAblations{Mode::bf16_dp, Mode::max_shift, Mode::per_tensor};

enum class Numerics { hopper, paper };
enum class Centre { none, k, qk };
enum class Accumulator { tensor_core, fp32 };

std::string_view name(Mode mode);
std::string_view name(Numerics numerics);
std::string_view name(Centre centre);
std::optional<Mode> mode_from_name(std::string_view text);      // the four modes
std::optional<Mode> ablation_from_name(std::string_view text);  // the three ablations
std::optional<Numerics> numerics_from_name(std::string_view text);
std::optional<Centre> centre_from_name(std::string_view text);
std::string mode_names();      // "stale, consistent, matched, onepass"
std::string ablation_names();  // "bf16_dp, max_shift, per_tensor"

constexpr Centre default_centre(Numerics numerics) { return numerics == Numerics::paper ? Centre::k : Centre::qk; }

}  // namespace dmattn
