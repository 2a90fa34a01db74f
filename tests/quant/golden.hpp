// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What golden/encode.txt is made of: the values that are coded, and how bytes are written.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace kvfolia_tests {

/// Values whose bits come from integers alone: no library function, no rounding.
inline std::vector<float> golden_inputs(int count) {
  std::vector<float> values;
  std::uint64_t state = 1;
  for (int i = 0; i < count; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const auto mantissa = static_cast<std::uint32_t>(state >> 41);
    const std::uint32_t exponent = 115 + static_cast<std::uint32_t>(state >> 33) % 16;
    const std::uint32_t bits = (static_cast<std::uint32_t>(state >> 63) << 31) | (exponent << 23) | mantissa;
    float value;
    std::memcpy(&value, &bits, 4);
    values.push_back(value);
  }
  // Of the first tokens: one of zeros, one of tiny values, one with a NaN.
  for (int i = 0; i < 64; ++i) values[static_cast<std::size_t>(64 + i)] = 0.0f;
  for (int i = 128; i < 192; ++i) values[static_cast<std::size_t>(i)] *= 0x1p-40f;
  std::uint32_t nan = 0x7fc00000u;
  std::memcpy(&values[200], &nan, 4);
  return values;
}

inline std::string golden_hex(const std::vector<std::byte>& bytes) {
  std::string text;
  char digits[3];
  for (const std::byte b : bytes) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(b));
    text += digits;
  }
  return text;
}

}  // namespace kvfolia_tests
