// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// What the tests of the GGUF module share: a writer of small files and temporary files.

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/gguf.hpp"
#include "support/catch.hpp"

namespace kvfolia_examples::testing {

/// The bytes of a value, as they lie in a file.
template <class T>
std::string raw(T value) {
  static_assert(std::is_arithmetic_v<T>);
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

inline std::string raw_string(std::string_view text) {
  return raw(std::uint64_t{text.size()}) + std::string(text);
}

/// Collects metadata and tensors and writes them as a GGUF file. It checks nothing: the tests
/// write broken files with it.
struct GgufBuilder {
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;  ///< of the tensor data; does not write the key
  std::uint64_t keys = 0;
  std::uint64_t tensors = 0;
  std::string metadata;
  std::string tensor_list;
  std::string data;

  GgufBuilder& value(std::string_view key, std::uint32_t type, const std::string& bytes) {
    metadata += raw_string(key) + raw(type) + bytes;
    ++keys;
    return *this;
  }
  GgufBuilder& u32(std::string_view key, std::uint32_t v) { return value(key, 4, raw(v)); }
  GgufBuilder& text(std::string_view key, std::string_view v) { return value(key, 8, raw_string(v)); }
  GgufBuilder& texts(std::string_view key, const std::vector<std::string>& v) {
    std::string bytes = raw(std::uint32_t{8}) + raw(std::uint64_t{v.size()});
    for (const std::string& text : v) bytes += raw_string(text);
    return value(key, 9, bytes);
  }
  GgufBuilder& ints(std::string_view key, const std::vector<std::int32_t>& v) {
    std::string bytes = raw(std::uint32_t{5}) + raw(std::uint64_t{v.size()});
    for (const std::int32_t number : v) bytes += raw(number);
    return value(key, 9, bytes);
  }

  /// Appends the data at the next aligned offset, or announces it at `offset`.
  GgufBuilder& tensor(std::string_view name, const std::vector<std::uint64_t>& shape, std::uint32_t type,
                      const std::string& bytes, std::optional<std::uint64_t> offset = {}) {
    data.resize((data.size() + alignment - 1) / alignment * alignment);
    tensor_list += raw_string(name) + raw(static_cast<std::uint32_t>(shape.size()));
    for (const std::uint64_t extent : shape) tensor_list += raw(extent);
    tensor_list += raw(type) + raw(offset.value_or(data.size()));
    data += bytes;
    ++tensors;
    return *this;
  }

  /// Everything before the tensor data's padding.
  std::string header() const {
    return "GGUF" + raw(version) + raw(tensors) + raw(keys) + metadata + tensor_list;
  }
  std::string build() const {
    std::string file = header();
    file.resize((file.size() + alignment - 1) / alignment * alignment);
    return file + data;
  }
};

/// A file that lives as long as this object.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string_view bytes) {
    static int count = 0;
    path_ = (std::filesystem::temp_directory_path() /
             ("gguf_test_" + std::to_string(::getpid()) + "_" + std::to_string(count++)))
                .string();
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { std::filesystem::remove(path_); }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Opens a file with these bytes. The mapping outlives the file's name.
inline GgufFile open_bytes(std::string_view bytes) { return GgufFile::open(TemporaryFile(bytes).path()); }

/// The message of the error that `call` ends in; fails the test when it does not.
template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  FAIL("no error");
  return {};
}

inline void check_mentions(const std::string& message, std::string_view part) {
  INFO("the message is: " << message << "; it should have: " << part);
  CHECK(message.find(part) != std::string::npos);
}

/// The spelling of bytes in a byte-level vocabulary.
inline std::string spell(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const unsigned byte = static_cast<unsigned char>(c);
    unsigned point = byte;  // the 68 unprintable bytes are 256 and on: 0-32, 127-160, 173
    if (byte <= 32) point = 256 + byte;
    if (byte >= 127 && byte <= 160) point = 256 + 33 + byte - 127;
    if (byte == 173) point = 256 + 67;
    if (point >= 128) {
      text += static_cast<char>(0xc0u | point >> 6);
      point = 0x80u | (point & 0x3fu);
    }
    text += static_cast<char>(point);
  }
  return text;
}

/// A tokenizer's metadata. Ids 0-255 are bytes, then come the merges' results in order, then
/// `<|im_start|>` and `<|im_end|>`, the last token.
struct TinyVocabulary {
  std::string model = "gpt2";
  std::string pre = "smollm";
  std::vector<std::pair<std::string, std::string>> merges = {};  ///< of bytes, not spelled
  std::string without = {};  ///< bytes whose tokens hold three bytes instead, so are not the byte's

  std::int32_t end() const { return static_cast<std::int32_t>(256 + merges.size() + 1); }

  GgufBuilder builder() const {
    std::vector<std::string> tokens;
    std::vector<std::string> rules;
    for (int byte = 0; byte < 256; ++byte) {
      const std::string one(1, static_cast<char>(byte));
      const bool lacking = without.find(one) != std::string::npos;
      tokens.push_back(spell(lacking ? "??" + one : one));
    }
    for (const auto& [left, right] : merges) {
      tokens.push_back(spell(left + right));
      rules.push_back(spell(left) + " " + spell(right));
    }
    std::vector<std::int32_t> kinds(tokens.size(), 1);
    for (const char* special : {"<|im_start|>", "<|im_end|>"}) {
      tokens.emplace_back(special);
      kinds.push_back(3);
    }
    GgufBuilder b;
    b.text("tokenizer.ggml.model", model).text("tokenizer.ggml.pre", pre);
    b.texts("tokenizer.ggml.tokens", tokens).texts("tokenizer.ggml.merges", rules);
    b.ints("tokenizer.ggml.token_type", kinds);
    b.u32("tokenizer.ggml.eos_token_id", static_cast<std::uint32_t>(end()));
    return b;
  }
};

}  // namespace kvfolia_examples::testing
