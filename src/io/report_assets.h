// The pieces of the report page (src/io/report), embedded at build time.
#pragma once

#include <string_view>

namespace dmattn {

std::string_view report_asset(std::string_view name);  // "style.css"; empty if there is no such piece

}  // namespace dmattn
