// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// A read-only view of a GGUF model file: its metadata and its tensors, used in place.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/dequantize.hpp"

namespace kvfolia_examples {

/// A tensor in an open file. `data` points into the GgufFile that gave it.
struct GgufTensor {
  std::string name;
  std::vector<std::int64_t> shape;  ///< fastest-varying dimension first; empty for a scalar
  TensorType type{};
  const std::byte* data = nullptr;
  std::size_t bytes = 0;       ///< of all rows; 0 where `type` is not supported
  std::size_t row_stride = 0;  ///< bytes from one row to the next; likewise

  std::int64_t cols() const { return shape.empty() ? 1 : shape.front(); }

  /// Product of all dimensions but the first.
  std::int64_t rows() const {
    std::int64_t product = 1;
    for (std::size_t i = 1; i < shape.size(); ++i) product *= shape[i];
    return product;
  }

  /// The encoded row `index`, which is trusted.
  const std::byte* row(std::int64_t index) const {
    return data + static_cast<std::size_t>(index) * row_stride;
  }

  /// Decodes row `index` to `cols()` floats at `dst`.
  void dequantize(std::int64_t index, float* dst) const { dequantize_row(type, row(index), cols(), dst); }
};

/// Owns the mapping of one GGUF file (version 2 or 3, little-endian). Everything that the file says
/// about lengths, counts and offsets is checked against its size by `open`, so reading afterwards
/// stays inside the mapping unless another program shortens the file meanwhile.
///
/// Every failure is a std::runtime_error with a one-line message that starts with the path.
class GgufFile {
 public:
  using TensorMap = std::map<std::string, GgufTensor, std::less<>>;

  static GgufFile open(const std::string& path);

  const std::string& path() const { return path_; }

  /// Whether the metadata has this key, with whatever type.
  bool has(std::string_view key) const { return values_.find(key) != values_.end(); }

  /// Any integer type is accepted as long as the value fits.
  std::uint32_t get_u32(std::string_view key) const;
  float get_f32(std::string_view key) const;
  std::string_view get_string(std::string_view key) const;
  /// `absent` is the answer for a missing key; a key of another type is an error.
  bool get_bool(std::string_view key, bool absent) const;

  /// An array of strings. The views point into the mapping.
  std::vector<std::string_view> strings(std::string_view key) const;
  /// An array of any integer type whose values fit in 64 signed bits.
  std::vector<std::int64_t> ints(std::string_view key) const;

  /// Errors when the file has no such tensor, or has it in a type that `dequantize_row` lacks.
  const GgufTensor& tensor(std::string_view name) const;
  /// Null when the file has no such tensor; still an error when its type is not supported.
  const GgufTensor* find_tensor(std::string_view name) const;
  /// All tensors by name, those of unsupported types too.
  const TensorMap& tensors() const { return tensors_; }

 private:
  enum class ValueType : std::uint32_t {
    u8 = 0,
    i8 = 1,
    u16 = 2,
    i16 = 3,
    u32 = 4,
    i32 = 5,
    f32 = 6,
    boolean = 7,
    string = 8,
    array = 9,
    u64 = 10,
    i64 = 11,
    f64 = 12,
  };

  struct Value {
    ValueType type{};
    ValueType element{};              ///< of an array
    std::uint64_t count = 0;          ///< a string's bytes, or an array's elements
    const std::byte* data = nullptr;  ///< a scalar, a string's bytes, or an array's first element
  };

  struct Unmap {
    std::size_t size;
    void operator()(const std::byte* mapping) const;
  };

  class Parser;

  GgufFile(std::string path, const std::byte* mapping, std::size_t size)
      : path_(std::move(path)), mapping_(mapping, Unmap{size}) {}

  [[noreturn]] void fail(const std::string& problem) const;
  const Value& value(std::string_view key) const;
  [[noreturn]] void fail_type(std::string_view key, std::string_view wanted) const;
  static std::size_t scalar_bytes(ValueType type);
  static std::optional<std::int64_t> read_integer(ValueType type, const std::byte* data);

  std::string path_;
  std::unique_ptr<const std::byte, Unmap> mapping_;
  std::map<std::string, Value, std::less<>> values_;
  TensorMap tensors_;
};
static_assert(!std::is_copy_constructible_v<GgufFile>);
static_assert(std::is_nothrow_move_constructible_v<GgufFile>);

}  // namespace kvfolia_examples
