// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Which keys a query sees, in logical positions.

#include <cstdint>

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

/// A sliding window with sink tokens: the query at position i sees keys j with j < sink_tokens or
/// j >= i - left. `left` = -1 is unlimited. The right side is the causal mask's business.
struct Window {
  std::int32_t left = -1;
  std::int32_t sink_tokens = 0;

  KVF_HD constexpr bool sees(std::int64_t query, std::int64_t key) const {
    return left < 0 || key < sink_tokens || key >= query - left;
  }
  friend constexpr bool operator==(Window, Window) = default;
};

/// A visibility bit for every (query, key) of a row, for tree-shaped drafts. Of batch row r with n
/// queries that start at position p, query t sees key j when bit t * (p + n) + j is set, counted
/// from byte row_offset[r], least significant bit first. Keys from p + n on have no bit and are not
/// seen.
struct CustomMask {
  const std::uint8_t* bits = nullptr;
  const std::int64_t* row_offset = nullptr;  ///< [rows], in bytes

  KVF_HD bool sees(int row, std::int64_t query_in_row, std::int64_t key, std::int64_t row_keys) const {
    if (key >= row_keys) return false;
    const std::int64_t bit = query_in_row * row_keys + key;
    return (bits[row_offset[row] + bit / 8] >> (bit % 8)) & 1;
  }
};

}  // namespace kvfolia::inline KVF_ABI
