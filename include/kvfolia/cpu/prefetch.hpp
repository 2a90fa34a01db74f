// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Asking memory for what is read next while the present is computed.

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

/// Walks over regions line by line. The regions must stay where they are.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const Region* regions, int count) : next_(regions), last_(regions + count) {}

  /// Asks for the next n cache lines, as far as there are any. Inlined into the innermost loops: spread
  /// over them, lines arrive while the arithmetic goes on.
  KVF_INLINE void lines(int n) {
    for (; n > 0; --n) {
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
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
