#include "io/safetensors.h"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "io/text.h"

namespace dmattn::safetensors {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // the reference implementation's limit

[[noreturn]] void fail(const std::string& origin, const std::string& what) {
  throw InvalidValue(in_quotes(origin) + ": " + what);
}

uint64_t little_endian(const std::array<std::byte, kLengthBytes>& bytes) {
  uint64_t value = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  return value;
}

void check_header_length(uint64_t length, uint64_t file_bytes, const std::string& origin) {
  if (length > kLongestHeader) {
    fail(origin,
         fmt::format("not a safetensors file: header length must be at most {} bytes, got {}", kLongestHeader, length));
  }
  if (length > file_bytes - kLengthBytes) {
    fail(origin, fmt::format("truncated or not a safetensors file: header of {} bytes expected, {} bytes follow its "
                             "length",
                             length, file_bytes - kLengthBytes));
  }
}

// A path worth opening: FIFOs would block and directories open on some systems.
void check_regular(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  switch (status.type()) {
    case std::filesystem::file_type::regular: return;
    case std::filesystem::file_type::not_found: fail(path, "no such file");
    case std::filesystem::file_type::directory: fail(path, "is a directory, expected a safetensors file");
    case std::filesystem::file_type::none: fail(path, "cannot be opened: " + one_line(error.message()));
    default: fail(path, "is not a regular file, expected a safetensors file");
  }
}

}  // namespace

Archive::Archive(ReadAt read_at, uint64_t bytes, std::string origin)
    : read_at_(std::move(read_at)), origin_(std::move(origin)) {
  if (bytes == 0) fail(origin_, "is empty, expected a safetensors file");
  if (bytes < kLengthBytes) {
    fail(origin_, fmt::format("not a safetensors file: {} bytes, expected at least {}", bytes, kLengthBytes));
  }
  std::array<std::byte, kLengthBytes> prefix{};
  read_at_(0, prefix);
  const uint64_t length = little_endian(prefix);
  check_header_length(length, bytes, origin_);
  std::vector<std::byte> json(static_cast<std::size_t>(length));
  read_at_(kLengthBytes, json);
  data_start_ = kLengthBytes + length;
  header_ = parse_header(json, bytes - data_start_, origin_);
}

Archive Archive::from_bytes(std::span<const std::byte> bytes, std::string origin) {
  // The header check keeps every request inside the span.
  const auto read_at = [bytes](uint64_t offset, std::span<std::byte> out) {
    const auto from = bytes.subspan(static_cast<std::size_t>(offset), out.size());
    if (!out.empty()) std::memcpy(out.data(), from.data(), out.size());
  };
  return Archive(read_at, bytes.size(), std::move(origin));
}

Archive Archive::open(const std::string& path) {
  check_regular(path);
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(path, error);
  if (error) fail(path, "cannot be opened: " + one_line(error.message()));
  auto file = std::make_shared<std::ifstream>(path, std::ios::binary);
  if (!*file) fail(path, std::string("cannot be opened: ") + std::strerror(errno));
  const auto read_at = [file, path](uint64_t offset, std::span<std::byte> out) {
    file->clear();
    file->seekg(static_cast<std::streamoff>(offset));
    file->read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size()));
    if (!*file) fail(path, fmt::format("cannot be read: {} bytes expected at offset {}", out.size(), offset));
  };
  return Archive(read_at, bytes, path);
}

std::vector<std::byte> Archive::read(const Tensor& tensor) const {
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.end - tensor.begin));
  read_at_(data_start_ + tensor.begin, bytes);
  return bytes;
}

}  // namespace dmattn::safetensors
