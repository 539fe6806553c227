#include "io/text.h"

#include <fmt/format.h>

#include <cstddef>

namespace dmattn {
namespace {

constexpr std::size_t kLongestQuote = 160;  // a path still fits; a megabyte-long tensor name does not

bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xc0u) == 0x80u; }

// Bytes of the UTF-8 character at the start of text, 0 where there is none. Strict enough for a terminal: C1 control
// characters and overlong forms are refused, surrogates too.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  const std::size_t length = lead < 0x80   ? 1
                             : lead < 0xc2 ? 0
                             : lead < 0xe0 ? 2
                             : lead < 0xf0 ? 3
                             : lead < 0xf5 ? 4
                                           : 0;
  if (length == 0 || length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(text[i])) return 0;
  }
  if (lead == 0xc2 && byte(1) < 0xa0) return 0;
  if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xed && byte(1) >= 0xa0)) return 0;
  if ((lead == 0xf0 && byte(1) < 0x90) || (lead == 0xf4 && byte(1) >= 0x90)) return 0;
  return length;
}

}  // namespace

std::string in_quotes(std::string_view text) {
  std::string out = "'";
  while (!text.empty()) {
    if (out.size() > kLongestQuote) return out + "...'";
    const unsigned char c = static_cast<unsigned char>(text.front());
    const std::size_t length = utf8_length(text);
    if (c < 0x20 || c == 0x7f || length == 0) {
      out += fmt::format("\\x{:02x}", c);
      text.remove_prefix(1);
    } else {
      out += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return out + "'";
}

std::string one_line(std::string_view text) {
  std::string out;
  bool blank = false;
  for (const char c : text) {
    if (c == '\n' || c == '\r' || c == '\t' || c == ' ') {
      blank = !out.empty();
    } else {
      if (blank) out += ' ';
      blank = false;
      out += c;
    }
  }
  return out;
}

}  // namespace dmattn
