// Foreign text in messages: names that come from files and command lines, made safe for one line of a terminal.
#pragma once

#include <string>
#include <string_view>

namespace dmattn {

// 'text' in quotes: control characters and bytes outside ASCII's printable range that are not valid UTF-8 are
// written as \xNN, and a long text is cut in the middle of nowhere but never inside a character.
std::string in_quotes(std::string_view text);

// The text with every run of line breaks and blanks as one blank.
std::string one_line(std::string_view text);

}  // namespace dmattn
