// Builds safetensors files in memory for tests, sound ones and broken ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace dmattn::test {

using Bytes = std::vector<std::byte>;

inline Bytes file_with_header(const std::string& header, std::size_t data_bytes, std::size_t claimed) {
  Bytes bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<std::byte>(claimed >> (8 * i) & 0xff));
  for (const char c : header) bytes.push_back(static_cast<std::byte>(c));
  bytes.resize(bytes.size() + data_bytes);
  return bytes;
}

inline Bytes file_with_header(const std::string& header, std::size_t data_bytes) {
  return file_with_header(header, data_bytes, header.size());
}

// A file of tensors given one after the other; `shape` as JSON.
class FileBuilder {
 public:
  FileBuilder& metadata(const std::string& json) {
    add("\"__metadata__\":" + json);
    return *this;
  }

  FileBuilder& tensor(const std::string& name, const std::string& dtype, const std::string& shape, const Bytes& data) {
    add("\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
        std::to_string(data_.size()) + "," + std::to_string(data_.size() + data.size()) + "]}");
    data_.insert(data_.end(), data.begin(), data.end());
    return *this;
  }

  Bytes bytes() const {
    Bytes file = file_with_header("{" + entries_ + "}", data_.size());
    if (!data_.empty()) std::memcpy(file.data() + file.size() - data_.size(), data_.data(), data_.size());
    return file;
  }

 private:
  void add(const std::string& entry) { entries_ += (entries_.empty() ? "" : ",") + entry; }

  std::string entries_;
  Bytes data_;
};

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace dmattn::test
