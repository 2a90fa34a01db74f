// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// Look-ups in a GGUF file that `open` has checked: here only types can be wrong.

#include "common/gguf.hpp"

#include <sys/mman.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "common/bytes.hpp"

namespace kvfolia_examples {

void GgufFile::Unmap::operator()(const std::byte* mapping) const {
  ::munmap(const_cast<std::byte*>(mapping), size);
}

void GgufFile::fail(const std::string& problem) const { throw std::runtime_error(path_ + ": " + problem); }

void GgufFile::fail_type(std::string_view key, std::string_view wanted) const {
  fail("the key '" + std::string(key) + "' is not " + std::string(wanted));
}

std::size_t GgufFile::scalar_bytes(ValueType type) {
  switch (type) {
    case ValueType::u8:
    case ValueType::i8:
    case ValueType::boolean: return 1;
    case ValueType::u16:
    case ValueType::i16: return 2;
    case ValueType::u32:
    case ValueType::i32:
    case ValueType::f32: return 4;
    case ValueType::u64:
    case ValueType::i64:
    case ValueType::f64: return 8;
    case ValueType::string:
    case ValueType::array: break;
  }
  return 0;
}

std::optional<std::int64_t> GgufFile::read_integer(ValueType type, const std::byte* data) {
  switch (type) {
    case ValueType::u8: return load<std::uint8_t>(data);
    case ValueType::i8: return load<std::int8_t>(data);
    case ValueType::u16: return load<std::uint16_t>(data);
    case ValueType::i16: return load<std::int16_t>(data);
    case ValueType::u32: return load<std::uint32_t>(data);
    case ValueType::i32: return load<std::int32_t>(data);
    case ValueType::i64: return load<std::int64_t>(data);
    case ValueType::u64:
      if (const auto value = load<std::uint64_t>(data); std::in_range<std::int64_t>(value)) {
        return static_cast<std::int64_t>(value);
      }
      return std::nullopt;
    case ValueType::f32:
    case ValueType::f64:
    case ValueType::boolean:
    case ValueType::string:
    case ValueType::array: break;
  }
  return std::nullopt;
}

const GgufFile::Value& GgufFile::value(std::string_view key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) fail("the key '" + std::string(key) + "' is missing");
  return found->second;
}

std::uint32_t GgufFile::get_u32(std::string_view key) const {
  const Value& found = value(key);
  const auto integer = read_integer(found.type, found.data);
  if (!integer || !std::in_range<std::uint32_t>(*integer)) {
    fail_type(key, "an unsigned 32-bit integer");
  }
  return static_cast<std::uint32_t>(*integer);
}

float GgufFile::get_f32(std::string_view key) const {
  const Value& found = value(key);
  if (found.type != ValueType::f32) fail_type(key, "a 32-bit float");
  return load<float>(found.data);
}

std::string_view GgufFile::get_string(std::string_view key) const {
  const Value& found = value(key);
  if (found.type != ValueType::string) fail_type(key, "a string");
  return {reinterpret_cast<const char*>(found.data), static_cast<std::size_t>(found.count)};
}

bool GgufFile::get_bool(std::string_view key, bool absent) const {
  if (!has(key)) return absent;
  const Value& found = value(key);
  if (found.type != ValueType::boolean) fail_type(key, "a bool");
  return load<std::uint8_t>(found.data) != 0;
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  const Value& found = value(key);
  if (found.type != ValueType::array || found.element != ValueType::string) {
    fail_type(key, "an array of strings");
  }
  std::vector<std::string_view> texts;
  texts.reserve(static_cast<std::size_t>(found.count));
  const std::byte* at = found.data;
  for (std::uint64_t i = 0; i < found.count; ++i) {
    const auto size = static_cast<std::size_t>(load<std::uint64_t>(at));
    at += sizeof(std::uint64_t);
    texts.emplace_back(reinterpret_cast<const char*>(at), size);
    at += size;
  }
  return texts;
}

std::vector<std::int64_t> GgufFile::ints(std::string_view key) const {
  const Value& found = value(key);
  if (found.type != ValueType::array) fail_type(key, "an array of integers");
  std::vector<std::int64_t> integers;
  const std::size_t each = scalar_bytes(found.element);
  for (std::uint64_t i = 0; i < found.count; ++i) {
    const auto integer = read_integer(found.element, found.data + i * each);
    if (!integer) fail_type(key, "an array of integers");
    integers.push_back(*integer);
  }
  return integers;
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return nullptr;
  if (const GgufTensor& tensor = found->second; !is_supported(tensor.type)) {
    fail("the tensor '" + tensor.name + "' has the unsupported type " + type_name(tensor.type));
  }
  return &found->second;
}

const GgufTensor& GgufFile::tensor(std::string_view name) const {
  const GgufTensor* found = find_tensor(name);
  if (found == nullptr) fail("the tensor '" + std::string(name) + "' is missing");
  return *found;
}

}  // namespace kvfolia_examples
