// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What attention keeps of keys that it has read: a softmax state and the weighted sum of values, a row each.

#include <algorithm>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Softmax states of several queries and heads, each with its accumulator of values.
template <int Dims>
struct Accumulators {
  float* data;  ///< [rows][max, sum, values]

  static constexpr std::int64_t floats = Dims + 2;

  float* values(std::int64_t row) const { return data + row * floats + 2; }
  SoftmaxState state(std::int64_t row) const { return {data[row * floats], data[row * floats + 1]}; }
  void set(std::int64_t row, SoftmaxState state) const {
    data[row * floats] = state.max;
    data[row * floats + 1] = state.sum;
  }
  void clear_row(std::int64_t row) const {
    set(row, {});
    std::fill_n(values(row), Dims, 0.0f);
  }
  void clear(std::int64_t rows) const {
    for (std::int64_t row = 0; row < rows; ++row) clear_row(row);
  }
  /// Adds another set of keys' results, row by row: add(to, old_part, from, new_part) does values.
  template <class Add>
  void merge(const Accumulators& other, std::int64_t rows, Add&& add) const {
    for (std::int64_t row = 0; row < rows; ++row) {
      SoftmaxState merged = state(row);
      const auto [old_part, new_part] = merged.merge(other.state(row));
      set(row, merged);
      add(values(row), old_part, other.values(row), new_part);
    }
  }
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
