// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Rows of a task, taken so many at a time as registers hold.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Arrays of rows have a multiple of so many.
inline constexpr int row_block = 4;

/// Rows [first, first + count) of a task; arrays have room up to `end`, which completes the last block.
struct RowRange {
  std::int64_t first;
  std::int64_t count;
  std::int64_t end;
};

/// f(constant, first row) for blocks of 8, 4 and 1 rows. A block may reach behind the last row, where that
/// is cheaper than smaller ones, never behind rows.end.
template <class F>
KVF_INLINE void each_row_block(const RowRange& rows, F&& f) {
  const std::int64_t last = rows.first + rows.count;
  for (std::int64_t row = rows.first; row < last;) {
    const std::int64_t left = last - row;
    if (left > 5 && row + 8 <= rows.end) {
      f(std::integral_constant<int, 8>(), row);
      row += 8;
    } else if (left > 1 && row + 4 <= rows.end) {
      f(std::integral_constant<int, 4>(), row);
      row += 4;
    } else {
      f(std::integral_constant<int, 1>(), row);
      row += 1;
    }
  }
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
