#include "output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "core/error.h"
#include "io/text.h"

namespace dmattn::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& option, const std::string& path, const std::string& why) {
  throw InvalidValue(fmt::format("{}: cannot write {}: {}", option, in_quotes(path), why));
}

// A new file beside the target, on the same file system so that the move is atomic; gone unless moved.
class Temporary {
 public:
  Temporary(const std::string& target, const std::string& option)
      : target_(target), option_(option), name_(fmt::format("{}.{}.tmp", target, getpid())) {
    errno = 0;
    file_ = std::fopen(name_.c_str(), "wbx");
    if (file_ == nullptr) fail(option_, target_, std::strerror(errno));
  }
  ~Temporary() {
    if (file_ != nullptr) std::fclose(file_);
    if (!moved_) std::remove(name_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  void write(std::string_view content) {
    errno = 0;
    const bool written = std::fwrite(content.data(), 1, content.size(), file_) == content.size();
    const bool closed = std::fclose(file_) == 0;
    file_ = nullptr;
    if (!written || !closed) fail(option_, target_, std::strerror(errno));
    if (std::rename(name_.c_str(), target_.c_str()) != 0) fail(option_, target_, std::strerror(errno));
    moved_ = true;
  }

 private:
  const std::string &target_, &option_;
  std::string name_;
  std::FILE* file_ = nullptr;
  bool moved_ = false;
};

}  // namespace

OutputFile::OutputFile(const std::string& path, const std::string& option) : path_(path), option_(option) {
  if (path.empty()) return;
  std::error_code error;
  const auto status = fs::status(path, error);
  if (fs::is_directory(status)) fail(option_, path, "is a directory");
  if (fs::exists(status)) {
    // A move onto a device would replace it.
    if (!fs::is_regular_file(status)) fail(option_, path, "is not a regular file");
    if (access(path.c_str(), W_OK) != 0) fail(option_, path, std::strerror(errno));
    const fs::path real = fs::canonical(path, error);
    if (!error) path_ = real.string();
  }
  Temporary trial(path_, option_);
}

void OutputFile::write(std::string_view content) const {
  if (!path_.empty()) Temporary(path_, option_).write(content);
}

bool OutputFile::is(const std::string& other) const {
  std::error_code error;
  return !path_.empty() && fs::equivalent(path_, other, error);
}

void print_out(std::string_view text) {
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!written || std::fflush(stdout) != 0) {
    throw InvalidValue(std::string("cannot write to standard output: ") + std::strerror(errno));
  }
}

void say_on_stderr(const std::string& text) { (void)std::fwrite(text.data(), 1, text.size(), stderr); }

}  // namespace dmattn::cli
