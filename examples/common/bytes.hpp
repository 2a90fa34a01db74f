// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Reading values out of raw bytes.

#include <bit>
#include <cstddef>
#include <cstring>

namespace kvfolia_examples {

static_assert(std::endian::native == std::endian::little, "GGUF data is used in place");

/// The T whose bytes lie at `from`, which need not be aligned.
template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace kvfolia_examples
