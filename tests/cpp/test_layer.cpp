// From a file to the layer that is measured: rounding to BF16, shapes, the scale, the choice of heads.
#include "io/layer.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "io/element.h"
#include "safetensors_bytes.h"

namespace dmattn {
namespace {

using safetensors::Archive;
using safetensors::Dtype;
using test::Bytes;
using test::bytes_of;
using test::FileBuilder;

struct Shapes {
  std::string q = "[2,4,1]", k = "[2,2,1]", v = "[2,2,1]", d_o = "[2,4,1]";
  std::size_t q_elements = 8, k_elements = 4;
};

// BF16 whose values count up, so that a gathered element says where it was.
Bytes counting(std::size_t elements) {
  std::vector<uint16_t> bits(elements);
  for (std::size_t i = 0; i < elements; ++i) {
    bits[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(i)) >> 16);
  }
  return bytes_of(bits);
}

Bytes file(const Shapes& shapes, const std::string& metadata = "{}") {
  return FileBuilder()
      .metadata(metadata)
      .tensor("q", "BF16", shapes.q, counting(shapes.q_elements))
      .tensor("k", "BF16", shapes.k, counting(shapes.k_elements))
      .tensor("v", "BF16", shapes.v, counting(shapes.k_elements))
      .tensor("d_o", "BF16", shapes.d_o, counting(shapes.q_elements))
      .bytes();
}

Layer read(const Bytes& bytes, const LayerOptions& options = {}) {
  return read_layer(Archive::from_bytes(bytes, "f"), options);
}

void expect_refused(const Bytes& bytes, const std::string& part, const LayerOptions& options = {}) {
  try {
    read(bytes, options);
    ADD_FAILURE() << "accepted, expected: " << part;
  } catch (const InvalidValue& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

std::vector<float> decoded(Dtype dtype, const Bytes& bytes, std::size_t count) {
  std::vector<float> out(count);
  decode_to_bf16(dtype, bytes, out.data());
  return out;
}

TEST(Layer, ReadsWhatTheFileHolds) {
  const Layer layer = read(file({}, R"({"softmax_scale":"0.25"})"));
  EXPECT_EQ(layer.batch, 1);
  EXPECT_EQ(layer.q_tokens, 2);
  EXPECT_EQ(layer.q_heads, 4);
  EXPECT_EQ(layer.kv_heads, 2);
  EXPECT_EQ(layer.softmax_scale, 0.25f);
  EXPECT_EQ(layer.q, (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(layer.k, (std::vector<float>{0, 1, 2, 3}));
}

TEST(Layer, ReadsBatchesAndNothing) {
  const Layer two = read(file({"[2,1,4,1]", "[2,1,2,1]", "[2,1,2,1]", "[2,1,4,1]"}));
  EXPECT_EQ(two.batch, 2);
  EXPECT_EQ(two.q_tokens, 1);
  const Layer none = read(file({"[0,4,1]", "[0,2,1]", "[0,2,1]", "[0,4,1]", 0, 0}));
  EXPECT_EQ(none.q_tokens, 0);
  EXPECT_TRUE(none.q.empty());
  const Layer no_batch = read(file({"[0,9,4,1]", "[0,9,2,1]", "[0,9,2,1]", "[0,9,4,1]", 0, 0}));
  EXPECT_EQ(no_batch.batch, 0);
}

TEST(Layer, SelectsHeadsAndKeepsThemGrouped) {
  LayerOptions options;
  options.heads = {2, 3};  // both of KV head 1
  const Layer group = read(file({}), options);
  EXPECT_EQ(group.q_heads, 2);
  EXPECT_EQ(group.kv_heads, 1);
  EXPECT_EQ(group.q, (std::vector<float>{2, 3, 6, 7}));
  EXPECT_EQ(group.k, (std::vector<float>{1, 3}));
  options.heads = {0, 2, 3};  // uneven: every query head brings its KV head
  const Layer uneven = read(file({}), options);
  EXPECT_EQ(uneven.kv_heads, 3);
  EXPECT_EQ(uneven.v, (std::vector<float>{0, 1, 1, 2, 3, 3}));
  options.heads = {4};
  expect_refused(file({}), "--heads: must be below 4", options);
}

TEST(Layer, RefusesMissingTensorsAndForeignDtypes) {
  const Bytes one = FileBuilder().tensor("q", "BF16", "[2,4,1]", counting(8)).bytes();
  expect_refused(one, "has no tensor 'k'");
  expect_refused(test::file_with_header("{}", 0), "the file holds none");
  const Bytes wrong = FileBuilder().tensor("q", "I16", "[2,4,1]", counting(8)).bytes();
  expect_refused(wrong, "tensor 'q': dtype must be BF16, F16 or F32, got I16");
}

TEST(Layer, RefusesShapesThatDisagree) {
  expect_refused(file({"[8]", "[2,2,1]", "[2,2,1]", "[8]"}), "[tokens, heads, head_dim]");
  expect_refused(file({"[1,1,2,4,1]", "[2,2,1]", "[2,2,1]", "[2,4,1]"}), "[tokens, heads, head_dim]");
  expect_refused(file({"[2,4,1]", "[2,2,1]", "[2,2,1]", "[4,2,1]"}), "'q' and 'd_o' must have the same shape");
  expect_refused(file({"[2,4,1]", "[2,2,1]", "[4,1,1]", "[2,4,1]"}), "'k' and 'v' must have the same shape");
  expect_refused(file({"[2,4,1]", "[2,1,2]", "[2,1,2]", "[2,4,1]"}), "must agree in batch and head_dim");
  expect_refused(file({"[2,1,4,1]", "[1,2,2,1]", "[1,2,2,1]", "[2,1,4,1]"}), "must agree in batch and head_dim");
  expect_refused(file({"[1,2,4,1]", "[2,2,1]", "[2,2,1]", "[1,2,4,1]"}), "must agree in batch and head_dim");
  expect_refused(file({"[2,4,1]", "[1,3,1]", "[1,3,1]", "[2,4,1]", 8, 3}), "must be a multiple");
  expect_refused(file({"[2,0,1]", "[2,2,1]", "[2,2,1]", "[2,0,1]", 0, 4}), "heads must be 1 to");
  expect_refused(file({"[2,4,0]", "[2,2,0]", "[2,2,0]", "[2,4,0]", 0, 0}), "head_dim must be 1 to");
  expect_refused(file({"[2,1,5000]", "[2,2,1]", "[2,2,1]", "[2,1,5000]", 10000, 4}), "head_dim must be 1 to");
}

// Sizes that nothing in the file pays for must not make anyone loop.
TEST(Layer, RefusesHugeSizesOfEmptyTensors) {
  expect_refused(file({"[0,1000000,64]", "[0,1,64]", "[0,1,64]", "[0,1000000,64]", 0, 0}), "heads must be 1 to");
  expect_refused(file({"[1000000,0,2,64]", "[1000000,0,2,64]", "[1000000,0,2,64]", "[1000000,0,2,64]", 0, 0}),
                 "batch x heads must be 0 to");
}

TEST(Layer, RefusesScalesThatAreNoScale) {
  for (const char* scale : {"", "x", "0", "-1", "nan", "inf", "1e999", "1e-300", "1.0 ", " 1", "1,0", "0x1p3"}) {
    expect_refused(file({}, std::string(R"({"softmax_scale":")") + scale + "\"}"), "softmax_scale must be");
  }
  LayerOptions given;
  given.softmax_scale = 2.0f;
  EXPECT_EQ(read(file({}, R"({"softmax_scale":"x"})"), given).softmax_scale, 2.0f);
  EXPECT_EQ(read(file({})).softmax_scale, 1.0f);  // 1 / sqrt(head_dim)
}

TEST(Layer, ParsesHeads) {
  EXPECT_EQ(parse_heads("3"), (std::vector<int64_t>{3}));
  EXPECT_EQ(parse_heads("6-8,0,7"), (std::vector<int64_t>{0, 6, 7, 8}));
  for (const char* text : {"", ",", "1,", "-1", "1-", "2-1", "a", "1 2", "0-65536", "99999999999", "1.5"}) {
    EXPECT_THROW(parse_heads(text), InvalidValue) << text;
  }
}

TEST(Layer, RestoresHeadNumbers) {
  ProbeResult result;
  result.modes[Mode::stale].worst_head = 1;
  result.modes[Mode::matched].worst_head = -1;
  result.heads.resize(2);
  result.heads[1].head = 1;
  result.nonfinite_heads = {0};
  restore_head_numbers(result, {4, 9});
  EXPECT_EQ(result.modes[Mode::stale].worst_head, 9);
  EXPECT_EQ(result.modes[Mode::matched].worst_head, -1);
  EXPECT_EQ(result.heads[0].head, 4);
  EXPECT_EQ(result.heads[1].head, 9);
  EXPECT_EQ(result.nonfinite_heads, (std::vector<int64_t>{4}));
}

TEST(Element, RoundsFloatsToNearestEven) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto out = decoded(
      Dtype::f32,
      bytes_of<float>({1.0f, 1.00390625f, 1.01171875f, -1.005f, 3.4e38f, infinity, -infinity, 1e-40f, -0.0f}), 9);
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], 1.0f);       // a tie, to even
  EXPECT_EQ(out[2], 1.015625f);  // a tie, to even
  EXPECT_EQ(out[3], -1.0078125f);
  EXPECT_EQ(out[4], infinity);  // past the largest BF16
  EXPECT_EQ(out[5], infinity);
  EXPECT_EQ(out[6], -infinity);
  EXPECT_GT(out[7], 0.0f);  // subnormals stay
  EXPECT_TRUE(std::signbit(out[8]));
  for (const uint32_t nan : {0x7f800001u, 0xffffffffu, 0x7fc00000u, 0x7f80ffffu}) {
    EXPECT_TRUE(std::isnan(decoded(Dtype::f32, bytes_of<uint32_t>({nan}), 1)[0])) << nan;
  }
}

// Every half against its definition.
TEST(Element, DecodesEveryHalf) {
  std::vector<uint16_t> bits(65536);
  std::iota(bits.begin(), bits.end(), uint16_t{0});
  const auto out = decoded(Dtype::f16, bytes_of(bits), bits.size());
  for (uint32_t i = 0; i < 65536; ++i) {
    const int exponent = static_cast<int>(i >> 10 & 31), fraction = static_cast<int>(i & 1023);
    if (exponent == 31 && fraction != 0) {
      ASSERT_TRUE(std::isnan(out[i])) << i;
      continue;
    }
    double value = exponent == 31  ? std::numeric_limits<double>::infinity()
                   : exponent == 0 ? std::ldexp(fraction, -24)
                                   : std::ldexp(1024 + fraction, exponent - 25);
    if (i >> 15 != 0) value = -value;
    const auto rounded = decoded(Dtype::f32, bytes_of<float>({static_cast<float>(value)}), 1)[0];
    ASSERT_EQ(out[i], rounded) << i;
  }
}

TEST(Element, TakesBf16AsItIs) {
  std::vector<uint16_t> bits(65536);
  std::iota(bits.begin(), bits.end(), uint16_t{0});
  const auto out = decoded(Dtype::bf16, bytes_of(bits), bits.size());
  for (uint32_t i = 0; i < 65536; ++i) ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), i << 16);
}

}  // namespace
}  // namespace dmattn
