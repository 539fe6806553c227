// Reader of safetensors files that nobody vouches for: 8 bytes of header length (little endian), a JSON header, the
// tensors' bytes. Every fault is an InvalidValue of one line that names the file, the tensor, what was expected and
// what came; a header that parses describes tensors that lie inside the file, without overlap and without holes.
// Format: https://github.com/huggingface/safetensors#format
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace dmattn::safetensors {

// The dtypes of the format whose elements are whole bytes.
enum class Dtype { boolean, u8, i8, f8_e4m3, f8_e5m2, f8_e8m0, u16, i16, f16, bf16, u32, i32, f32, u64, i64, f64, c64 };

std::string_view name(Dtype dtype);  // as in the file: "BF16"
int64_t element_bytes(Dtype dtype);

struct Tensor {
  std::string name;
  Dtype dtype = Dtype::bf16;
  std::vector<int64_t> shape;   // their product and its bytes fit an int64_t
  uint64_t begin = 0, end = 0;  // bytes, counted from the end of the header
};

struct Header {
  std::map<std::string, Tensor, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;
};

// An open file, or bytes in memory. Tensors are read when asked for, so a large checkpoint costs only its header.
class Archive {
 public:
  // Throws InvalidValue. `bytes` must outlive the archive; `origin` names it in messages.
  static Archive from_bytes(std::span<const std::byte> bytes, std::string origin);
  static Archive open(const std::string& path);

  const Header& header() const { return header_; }
  const std::string& origin() const { return origin_; }
  std::vector<std::byte> read(const Tensor& tensor) const;

 private:
  using ReadAt = std::function<void(uint64_t offset, std::span<std::byte> out)>;
  Archive(ReadAt read_at, uint64_t bytes, std::string origin);

  ReadAt read_at_;
  std::string origin_;
  Header header_;
  uint64_t data_start_ = 0;
};

// The JSON part alone; `data_bytes` is what follows it in the file.
Header parse_header(std::span<const std::byte> json, uint64_t data_bytes, const std::string& origin);

}  // namespace dmattn::safetensors
