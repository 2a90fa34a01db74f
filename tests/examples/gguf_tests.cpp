// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// Tests of the GGUF reader over small files, whole and broken.

#include <limits>
#include <stdexcept>

#include "common/gguf.hpp"
#include "examples/gguf_builder.hpp"

using namespace kvfolia_examples;
using namespace kvfolia_examples::testing;

namespace {

/// The message of the error that opening these bytes ends in; fails the test without one.
std::string open_error(std::string_view bytes) {
  const TemporaryFile file(bytes);
  const std::string message = error_of([&] { GgufFile::open(file.path()); });
  CHECK(message.starts_with(file.path() + ": "));
  CHECK(message.find('\n') == std::string::npos);
  return message;
}

std::string floats(std::initializer_list<float> values) {
  std::string bytes;
  for (const float v : values) bytes += raw(v);
  return bytes;
}

/// Every value type, an array of arrays, and two tensors; the last byte belongs to a tensor.
GgufBuilder sample() {
  GgufBuilder b;
  b.value("u8", 0, raw(std::uint8_t{200}));
  b.value("i8", 1, raw(std::int8_t{-5}));
  b.value("u16", 2, raw(std::uint16_t{60000}));
  b.value("i16", 3, raw(std::int16_t{300}));
  b.u32("u32", 4000000000u);
  b.value("i32", 5, raw(std::int32_t{7}));
  b.value("f32", 6, raw(0.25f));
  b.value("yes", 7, raw(std::uint8_t{1}));
  b.text("text", "a\nb");
  b.value("u64", 10, raw(std::uint64_t{1} << 40));
  b.value("i64", 11, raw(std::int64_t{9}));
  b.value("f64", 12, raw(0.5));
  b.texts("names", {"x", "", "yz"});
  b.ints("numbers", {3, -4});
  b.value("bytes", 9, raw(std::uint32_t{0}) + raw(std::uint64_t{2}) + "\x01\xff");
  b.value(
      "nested", 9,
      raw(std::uint32_t{9}) + raw(std::uint64_t{1}) + raw(std::uint32_t{0}) + raw(std::uint64_t{1}) + "k");
  b.tensor("first", {3, 2}, 0, floats({1, 2, 3, 4, 5, 6}));
  b.tensor("second", {32}, 8, raw(std::uint16_t{0x3c00}) + std::string(32, '\x02'));
  return b;
}

}  // namespace

TEST_CASE("metadata of every type is read back") {
  const GgufFile file = open_bytes(sample().build());
  CHECK(file.get_u32("u8") == 200);
  CHECK(file.get_u32("u16") == 60000);
  CHECK(file.get_u32("i16") == 300);
  CHECK(file.get_u32("u32") == 4000000000u);
  CHECK(file.get_u32("i32") == 7);
  CHECK(file.get_u32("i64") == 9);
  CHECK(file.get_f32("f32") == 0.25f);
  CHECK(file.get_bool("yes", false));
  CHECK(file.get_bool("absent", true));
  CHECK_FALSE(file.get_bool("absent", false));
  CHECK(file.get_string("text") == "a\nb");
  CHECK(file.strings("names") == std::vector<std::string_view>{"x", "", "yz"});
  CHECK(file.ints("numbers") == std::vector<std::int64_t>{3, -4});
  CHECK(file.ints("bytes") == std::vector<std::int64_t>{1, 255});
  CHECK(file.has("nested"));
  CHECK_FALSE(file.has("absent"));
}

TEST_CASE("a missing or wrongly typed key is named") {
  const GgufFile file = open_bytes(sample().build());
  check_mentions(error_of([&] { file.get_u32("absent"); }), "'absent' is missing");
  check_mentions(error_of([&] { file.get_u32("i8"); }), "'i8' is not");  // negative
  check_mentions(error_of([&] { file.get_u32("u64"); }), "'u64' is not");
  check_mentions(error_of([&] { file.get_u32("text"); }), "'text' is not");
  check_mentions(error_of([&] { file.get_f32("f64"); }), "'f64' is not");
  check_mentions(error_of([&] { file.get_string("u8"); }), "'u8' is not");
  check_mentions(error_of([&] { file.get_bool("u8", true); }), "'u8' is not");
  check_mentions(error_of([&] { file.strings("numbers"); }), "'numbers' is not");
  check_mentions(error_of([&] { file.strings("nested"); }), "'nested' is not");
  check_mentions(error_of([&] { file.ints("names"); }), "'names' is not");
  check_mentions(error_of([&] { file.ints("nested"); }), "'nested' is not");
  check_mentions(error_of([&] { file.ints("u8"); }), "'u8' is not");
}

TEST_CASE("tensors have their shape and data, also after the file object has moved") {
  GgufFile opened = open_bytes(sample().build());
  const GgufFile file = std::move(opened);
  const GgufTensor& first = file.tensor("first");
  CHECK(first.shape == std::vector<std::int64_t>{3, 2});
  CHECK(first.cols() == 3);
  CHECK(first.rows() == 2);
  CHECK(first.bytes == 24);
  std::vector<float> row(3);
  first.dequantize(1, row.data());
  CHECK(row == std::vector<float>{4, 5, 6});

  const GgufTensor* second = file.find_tensor("second");
  REQUIRE(second != nullptr);
  CHECK(second->rows() == 1);
  row.assign(32, 0);
  second->dequantize(0, row.data());
  CHECK(row == std::vector<float>(32, 2.0f));

  CHECK(file.find_tensor("third") == nullptr);
  check_mentions(error_of([&] { file.tensor("third"); }), "'third' is missing");
  CHECK(file.tensors().size() == 2);
}

TEST_CASE("an own alignment is honoured") {
  GgufBuilder b;
  b.alignment = 64;
  b.u32("general.alignment", 64);
  b.tensor("a", {1}, 0, floats({1}));
  b.tensor("b", {}, 0, floats({2}));
  const GgufFile file = open_bytes(b.build());
  float value = 0;
  file.tensor("b").dequantize(0, &value);
  CHECK(value == 2.0f);
  CHECK(file.tensor("b").data - file.tensor("a").data == 64);

  check_mentions(open_error(GgufBuilder().u32("general.alignment", 0).build()), "alignment 0");
  check_mentions(open_error(GgufBuilder().u32("general.alignment", 12).build()), "alignment 12");
  check_mentions(open_error(GgufBuilder().text("general.alignment", "32").build()), "alignment");
}

TEST_CASE("a file that is not GGUF, or of another version or byte order, is refused") {
  check_mentions(error_of([] { GgufFile::open("/nonexistent/model.gguf"); }), "/nonexistent/model.gguf");
  check_mentions(error_of([] { GgufFile::open("/"); }), "not a regular file");
  check_mentions(open_error(""), "empty");
  check_mentions(open_error("GG"), "magic");
  check_mentions(open_error("GGML1234567890"), "magic");
  GgufBuilder b;
  for (const std::uint32_t version : {0u, 1u, 4u}) {
    b.version = version;
    check_mentions(open_error(b.build()), "version " + std::to_string(version));
  }
  b.version = 3u << 24;
  check_mentions(open_error(b.build()), "big-endian");
  b.version = 2;
  CHECK_NOTHROW(open_bytes(b.build()));
}

TEST_CASE("a file cut short at any byte is an error") {
  const std::string whole = sample().build();
  CHECK_NOTHROW(open_bytes(whole));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    INFO("size " << size);
    open_error(std::string_view(whole).substr(0, size));
  }
}

TEST_CASE("a file with any bit or byte of its header changed is read safely or refused") {
  const std::size_t header = sample().header().size();
  const std::string whole = sample().build();
  std::vector<float> row;
  const auto probe = [&](const std::string& bytes) {
    try {
      const GgufFile file = open_bytes(bytes);
      for (const char* key : {"names", "numbers", "nested", "text"}) {
        try {
          for (const std::string_view text : file.strings(key)) CHECK(text.size() < whole.size());
        } catch (const std::runtime_error&) {
        }
        try {
          file.ints(key);
        } catch (const std::runtime_error&) {
        }
      }
      for (const auto& [name, tensor] : file.tensors()) {
        if (tensor.bytes == 0) continue;
        row.resize(static_cast<std::size_t>(tensor.cols()));
        for (std::int64_t r = 0; r < tensor.rows(); ++r) tensor.dequantize(r, row.data());
      }
    } catch (const std::runtime_error&) {
    }
  };
  for (std::size_t i = 0; i < header; ++i) {
    for (const unsigned flip : {1u, 2u, 4u, 8u, 16u, 32u, 64u, 128u, 255u}) {
      std::string changed = whole;
      changed[i] = static_cast<char>(static_cast<unsigned char>(changed[i]) ^ flip);
      probe(changed);
    }
  }
}

TEST_CASE("absurd counts and lengths are refused without being believed") {
  for (const std::uint64_t absurd :
       {std::uint64_t{1} << 40, std::uint64_t{1} << 61, std::numeric_limits<std::uint64_t>::max()}) {
    const std::string number = raw(absurd);
    GgufBuilder keys;
    keys.keys = absurd;
    check_mentions(open_error(keys.build()), "metadata keys");
    GgufBuilder tensors;
    tensors.tensors = absurd;
    check_mentions(open_error(tensors.build()), "tensors");
    check_mentions(open_error(GgufBuilder().value("k", 8, number).build()), "'k'");
    for (const std::uint32_t element : {0u, 4u, 8u, 9u, 10u}) {
      check_mentions(open_error(GgufBuilder().value("k", 9, raw(element) + number).build()), "'k'");
    }
    check_mentions(open_error(GgufBuilder().tensor("t", {absurd}, 0, "").build()), "'t'");
    check_mentions(open_error(GgufBuilder().tensor("t", {absurd, absurd}, 0, "").build()), "'t'");
    check_mentions(open_error(GgufBuilder().tensor("t", {32, absurd}, 2, "").build()), "'t'");
    check_mentions(open_error(GgufBuilder().tensor("t", {1}, 0, "1234", absurd).build()), "'t'");
  }
  std::string nested;
  for (int depth = 0; depth < 100; ++depth) {
    nested += raw(std::uint32_t{9}) + raw(std::uint64_t{1});
  }
  check_mentions(open_error(GgufBuilder().value("k", 9, nested).build()), "too deeply");
}

TEST_CASE("inconsistent metadata and tensors are refused") {
  check_mentions(open_error(GgufBuilder().u32("k", 1).u32("k", 2).build()), "'k' appears twice");
  check_mentions(open_error(GgufBuilder().value("k", 13, "").build()), "unknown value type 13");
  check_mentions(open_error(GgufBuilder().value("k", 7, "\x02").build()), "neither 0 nor 1");
  check_mentions(open_error(GgufBuilder().u32("a\nb", 1).u32("a\nb", 1).build()), "'a?b'");

  const std::string four = floats({1});
  GgufBuilder twice;
  twice.tensor("t", {1}, 0, four).tensor("t", {1}, 0, four);
  check_mentions(open_error(twice.build()), "'t' appears twice");
  check_mentions(open_error(GgufBuilder().tensor("t", {1, 1, 1, 1, 1}, 0, four).build()), "5 dimensions");
  check_mentions(open_error(GgufBuilder().tensor("t", {1, 0}, 0, four).build()), "dimension of 0");
  check_mentions(open_error(GgufBuilder().tensor("t", {2}, 0, four).build()), "outside the file");
  check_mentions(open_error(GgufBuilder().tensor("t", {1}, 0, four, 32).build()), "outside the file");
  check_mentions(open_error(GgufBuilder().tensor("t", {1}, 0, four, 8).build()), "not aligned");
  check_mentions(open_error(GgufBuilder().tensor("t", {33}, 3, std::string(40, ' ')).build()), "blocks");
}

TEST_CASE("a tensor of an unsupported type is an error only when it is asked for") {
  GgufBuilder b;
  b.tensor("odd", {32}, 23, "1234").tensor("odder", {32}, 77, "1234").tensor("t", {1}, 0, "1234");
  const GgufFile file = open_bytes(b.build());
  CHECK(file.tensor("t").bytes == 4);
  check_mentions(error_of([&] { file.tensor("odd"); }), "'odd' has the unsupported type IQ4_XS");
  check_mentions(error_of([&] { file.find_tensor("odder"); }), "type 77");
}
