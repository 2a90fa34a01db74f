// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// The tensor types of GGUF files and the decoding of their rows to fp32.

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvfolia_examples {

/// A tensor's type by its GGUF id. A file may hold other ids too: they are named in errors, and
/// only the ones listed here can be decoded.
enum class TensorType : std::uint32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q8_0 = 8,
  Q4_K = 12,
  Q6_K = 14,
  BF16 = 30,
};

/// "Q4_1" for any id that GGUF defines, "type 77" for one that it does not.
std::string type_name(TensorType type);

/// Whether `dequantize_row` can decode this type.
bool is_supported(TensorType type);

/// Bytes that a row of `cols` elements takes in the file. Throws std::runtime_error when the type
/// is unsupported, or when `cols` is negative or not a whole number of the type's blocks.
std::size_t row_bytes(TensorType type, std::int64_t cols);

/// Decodes one row of `cols` elements from `src` (`row_bytes(type, cols)` bytes, any alignment) to
/// `dst`; the two must not overlap. `cols` is trusted to be whole blocks: `row_bytes` checks that
/// once for the tensor. Throws std::runtime_error when the type is unsupported.
///
/// Each result is scale * code (+ minimum) rounded to fp32, and does not depend on how the
/// compiler contracts multiplications and additions: an fp16 scale has 11 significant bits and a
/// code, with the sub-block scale of the K types, at most 13 more, so every product fits fp32's 24
/// bits exactly and at most one rounding is left.
void dequantize_row(TensorType type, const std::byte* src, std::int64_t cols, float* dst);

}  // namespace kvfolia_examples
