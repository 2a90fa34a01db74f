// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Asking memory for what is read next while the present is computed.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

inline constexpr int cache_line = 64;

/// Contiguous bytes.
struct Region {
  const std::byte* begin;
  std::int64_t bytes;
};

/// Walks over regions line by line, a few lines a step. The regions must stay where they are.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const Region* regions, int count, std::int64_t lines)
      : next_(regions), last_(regions + count), lines_(lines) {}

  /// Spreads all lines over so many steps.
  void spread(std::int64_t steps) {
    pace_ = static_cast<int>((lines_ + steps - 1) / std::max<std::int64_t>(steps, 1));
  }

  /// Asks for some more cache lines, as far as there are any. Inlined into the innermost loops: lines arrive
  /// while the arithmetic goes on.
  KVF_INLINE void step() {
    for (int n = pace_; n > 0; --n) {
      if (at_ >= end_) {
        if (next_ == last_) return;
        at_ = next_->begin;
        end_ = at_ + next_->bytes;
        ++next_;
      }
      __builtin_prefetch(at_);
      at_ += cache_line;
    }
  }

 private:
  const std::byte* at_ = nullptr;
  const std::byte* end_ = nullptr;
  const Region* next_ = nullptr;
  const Region* last_ = nullptr;
  std::int64_t lines_ = 0;
  int pace_ = 0;  ///< lines a step
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
