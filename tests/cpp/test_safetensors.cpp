// The reader of safetensors: what it accepts, and that every broken file is refused in one line that names the fault.
#include "io/safetensors.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "io/text.h"
#include "safetensors_bytes.h"

namespace dmattn {
namespace {

using safetensors::Archive;
using test::Bytes;
using test::file_with_header;
using test::FileBuilder;

// The message of the refusal, "" if the file is accepted.
std::string refusal(const Bytes& bytes) {
  try {
    Archive::from_bytes(bytes, "layer.safetensors");
  } catch (const InvalidValue& error) {
    return error.what();
  }
  return {};
}

void expect_refused(const Bytes& bytes, const std::string& part) {
  const std::string message = refusal(bytes);
  EXPECT_NE(message.find(part), std::string::npos) << "expected '" << part << "' in: " << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  EXPECT_EQ(message.find("'layer.safetensors': "), 0u) << message;
}

// One tensor t of four bytes, its entry replaced.
Bytes with_entry(const std::string& entry) { return file_with_header("{\"t\":" + entry + "}", 4); }

TEST(Safetensors, ReadsTensorsAndMetadata) {
  const Bytes file = FileBuilder()
                         .metadata(R"({"softmax_scale":"0.5"})")
                         .tensor("a", "U8", "[3]", test::bytes_of<uint8_t>({1, 2, 3}))
                         .tensor("none", "F32", "[0,7]", {})
                         .tensor("b", "BF16", "[1,2]", test::bytes_of<uint16_t>({0x3f80, 0x4000}))
                         .bytes();
  const Archive archive = Archive::from_bytes(file, "f");
  ASSERT_EQ(archive.header().tensors.size(), 3u);
  EXPECT_EQ(archive.header().metadata.at("softmax_scale"), "0.5");
  const auto& b = archive.header().tensors.at("b");
  EXPECT_EQ(b.shape, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(archive.read(b), test::bytes_of<uint16_t>({0x3f80, 0x4000}));
  EXPECT_TRUE(archive.read(archive.header().tensors.at("none")).empty());
}

TEST(Safetensors, AcceptsPaddingAfterTheHeaderAndNoTensors) {
  EXPECT_EQ(refusal(file_with_header("{}   ", 0)), "");
  EXPECT_EQ(refusal(with_entry(R"({"dtype":"F32","shape":[],"data_offsets":[0,4],"more":"is ignored"})")), "");
}

TEST(Safetensors, RefusesWhatIsTooShort) {
  expect_refused({}, "is empty");
  for (std::size_t size = 1; size < 8; ++size) expect_refused(Bytes(size), "expected at least 8");
  expect_refused(file_with_header("{}", 0, 3), "truncated");
  expect_refused(file_with_header("{}", 0, 100'000'001), "header length must be at most");
  expect_refused(file_with_header("{}", 0, ~std::size_t{0}), "header length must be at most");
}

TEST(Safetensors, RefusesHeadersThatAreNoJsonObject) {
  expect_refused(file_with_header("", 0), "JSON object");
  for (const char* header : {"[]", "null", " {}", "\xef\xbb\xbf{}", "PK"}) {
    expect_refused(file_with_header(header, 0), "JSON object");
  }
  for (const char* header : {"{", "{\"t\"}", "{} x", "{\"t\":\x01}", "{\"\xff\":1}", "{\"t\":1e999}", "{\"t\":nan}"}) {
    expect_refused(file_with_header(header, 0), "not valid JSON");
  }
  expect_refused(file_with_header(std::string("{}\0", 3), 0), "not valid JSON at byte 3");
  expect_refused(file_with_header(std::string("{}\0 anything", 12), 0), "not valid JSON at byte 3");
}

TEST(Safetensors, RefusesDeepAndEndlessHeadersBeforeTheyCostMemory) {
  expect_refused(file_with_header("{\"t\":" + std::string(1'000'000, '['), 0), "nest at most");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  expect_refused(file_with_header(objects, 0), "nest at most");
  std::string many = "1";
  for (int i = 0; i < 100'000; ++i) many += ",1";
  expect_refused(with_entry("{\"dtype\":\"U8\",\"data_offsets\":[0,4],\"shape\":[" + many + "]}"), "more than 32");
}

TEST(Safetensors, RefusesNamesGivenTwice) {
  const std::string entry = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  expect_refused(file_with_header("{\"q\":" + entry + ",\"q\":" + entry + "}", 0), "'q' twice");
  expect_refused(with_entry(R"({"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]})"), "'dtype' twice");
  expect_refused(file_with_header(R"({"__metadata__":{"a":"1","a":"2"}})", 0), "'a' twice");
}

TEST(Safetensors, RefusesEntriesOfTheWrongType) {
  expect_refused(with_entry("3"), "must be an object");
  expect_refused(with_entry("[1]"), "must be an object");
  expect_refused(with_entry(R"({"shape":[4],"data_offsets":[0,4]})"), "has no dtype");
  expect_refused(with_entry(R"({"dtype":"U8","data_offsets":[0,4]})"), "has no shape");
  expect_refused(with_entry(R"({"dtype":"U8","shape":[4]})"), "has no data_offsets");
  expect_refused(with_entry(R"({"dtype":8,"shape":[4],"data_offsets":[0,4]})"), "dtype must be a string");
  expect_refused(with_entry(R"({"dtype":"F7","shape":[4],"data_offsets":[0,4]})"), "dtype 'F7' is not known");
  expect_refused(with_entry(R"({"dtype":"U8","shape":{},"data_offsets":[0,4]})"), "shape must be a list");
  for (const char* size : {"-4", "4.0", "\"4\"", "null", "1e1", "9223372036854775808", "18446744073709551616", "-0"}) {
    expect_refused(with_entry(std::string(R"({"dtype":"U8","shape":[)") + size + R"(],"data_offsets":[0,4]})"),
                   "shape entries must be whole numbers");
    expect_refused(with_entry(std::string(R"({"dtype":"U8","shape":[4],"data_offsets":[0,)") + size + "]}"),
                   "data_offsets must be whole numbers");
  }
  for (const char* offsets : {"[]", "[0]", "[0,4,4]", "4", "{\"a\":0}"}) {
    expect_refused(with_entry(std::string(R"({"dtype":"U8","shape":[4],"data_offsets":)") + offsets + "}"),
                   "data_offsets must be [begin, end]");
  }
  expect_refused(file_with_header(R"({"__metadata__":[]})", 0), "__metadata__ must be an object");
  expect_refused(file_with_header(R"({"__metadata__":{"a":1}})", 0), "__metadata__ 'a' must be a string");
}

TEST(Safetensors, RefusesRangesThatDoNotFit) {
  expect_refused(with_entry(R"({"dtype":"U8","shape":[4],"data_offsets":[4,0]})"), "must not fall");
  expect_refused(with_entry(R"({"dtype":"U8","shape":[5],"data_offsets":[0,5]})"), "past the file");
  expect_refused(with_entry(R"({"dtype":"U8","shape":[4],"data_offsets":[9223372036854775800,9223372036854775804]})"),
                 "past the file");
  expect_refused(with_entry(R"({"dtype":"F32","shape":[4],"data_offsets":[0,4]})"), "needs 16 bytes");
  expect_refused(with_entry(R"({"dtype":"U8","shape":[3],"data_offsets":[0,4]})"), "needs 3 bytes");
}

TEST(Safetensors, RefusesShapesWhoseSizeOverflows) {
  for (const char* shape :
       {"[4294967296,4294967296]", "[9223372036854775807,2]", "[3,6148914691236517206]", "[4294967296,4294967296,0]"}) {
    expect_refused(with_entry(std::string(R"({"dtype":"U8","shape":)") + shape + R"(,"data_offsets":[0,4]})"),
                   "must fit 63 bits");
  }
  expect_refused(with_entry(R"({"dtype":"F64","shape":[1152921504606846976],"data_offsets":[0,4]})"),
                 "must fit 63 bits");
}

TEST(Safetensors, RefusesOverlapsHolesAndTails) {
  const auto two = [](const char* a, const char* b, std::size_t data) {
    return file_with_header(std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + a +
                                R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
                            data);
  };
  EXPECT_EQ(refusal(two("[4,8]", "[0,4]", 8)), "");  // the order in the header is free
  expect_refused(two("[0,4]", "[0,4]", 4), "'a' and 'b' overlap");
  expect_refused(two("[0,4]", "[2,6]", 6), "overlap");
  expect_refused(two("[0,4]", "[5,9]", 9), "belong to no tensor");
  expect_refused(two("[1,5]", "[5,9]", 9), "belong to no tensor");
  expect_refused(two("[0,4]", "[4,8]", 9), "after the last tensor");
  expect_refused(file_with_header("{}", 1), "after the last tensor");
}

TEST(Safetensors, EveryPrefixOfAFileIsRefused) {
  const Bytes file = FileBuilder().tensor("q", "BF16", "[2,2]", Bytes(8)).tensor("k", "F32", "[1]", Bytes(4)).bytes();
  ASSERT_EQ(refusal(file), "");
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_NE(refusal(Bytes(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size))), "") << size;
  }
}

TEST(Safetensors, RefusesPathsThatAreNoFiles) {
  const auto message = [](const std::string& path) {
    try {
      Archive::open(path);
    } catch (const InvalidValue& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message("/nonexistent/layer").find("no such file"), std::string::npos);
  EXPECT_NE(message("/").find("is a directory"), std::string::npos);
  EXPECT_NE(message("/dev/null").find("not a regular file"), std::string::npos);
  EXPECT_NE(message(std::string("/nonexistent/new\nline")).find("new\\x0aline"), std::string::npos);
}

TEST(Text, QuotesForeignBytes) {
  EXPECT_EQ(in_quotes("plain \xce\xb4"), "'plain \xce\xb4'");
  EXPECT_EQ(in_quotes("a\nb\x1b[0m"), "'a\\x0ab\\x1b[0m'");
  EXPECT_EQ(in_quotes("\xff\xc0\x80"), "'\\xff\\xc0\\x80'");
  EXPECT_EQ(in_quotes("\xe2\x82"), "'\\xe2\\x82'");           // cut short
  EXPECT_EQ(in_quotes("\xc2\x9b"), "'\\xc2\\x9b'");           // C1: a terminal would obey it
  EXPECT_EQ(in_quotes("\xed\xa0\x80"), "'\\xed\\xa0\\x80'");  // a surrogate
  EXPECT_LT(in_quotes(std::string(1'000'000, 'x')).size(), 200u);
  EXPECT_EQ(one_line(" a\r\n\tb  c\n"), "a b c");
}

}  // namespace
}  // namespace dmattn
