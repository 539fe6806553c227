#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace dmattn::cli {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr int kBar = 24;

}  // namespace

Progress::Progress() : terminal_(isatty(fileno(stderr)) != 0) {}

Progress::~Progress() {
  if (shown_) fmt::print(stderr, "\r\x1b[K");
}

std::function<void(double, const std::string&)> Progress::callback() {
  if (!terminal_) return {};
  return [this](double fraction, const std::string& what) { show(fraction, what); };
}

void Progress::show(double fraction, const std::string& what) {
  const auto now = std::chrono::steady_clock::now();
  if (shown_ && now - last_ < kInterval) return;
  last_ = now;
  shown_ = true;
  const double part = std::clamp(fraction, 0.0, 1.0);
  const int filled = static_cast<int>(part * kBar);
  fmt::print(stderr, "\r\x1b[K[{:#<{}}{:.<{}}] {:3.0f} %  {}", "", filled, "", kBar - filled, 100 * part,
             what.substr(0, 40));
  std::fflush(stderr);
}

}  // namespace dmattn::cli
