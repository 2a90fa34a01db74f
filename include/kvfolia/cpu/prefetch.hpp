// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Asking memory for what is read next while the present is computed.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/attend_plan.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Contiguous bytes.
struct Region {
  const std::byte* begin;
  std::int64_t bytes;
};

/// Asks for cache lines evenly while something else is computed, some at a time. Each is asked for twice
/// over: the first of every few, `lines_ahead` before its turn, for the second cache, upon which processors
/// fetch its neighbours there by themselves; then all for the first cache, which alone has too few requests
/// under way to keep memory busy.
class Prefetch {
 public:
  static constexpr int lines_ahead = 192;

  Prefetch() = default;

  /// Of regions that must stay where they are: `lines` of them, and those behind them ahead only.
  Prefetch(const Region* regions, int count, std::int64_t lines)
      : near_{.next = regions, .last = regions + count},
        far_{near_},
        lines_(std::max<std::int64_t>(lines, 0)) {
    for (int skipped = 0; skipped < lines_ahead && far_.enter(); skipped += lines_at_once) far_.at += bytes;
  }

  /// Spreads all lines over so many steps.
  void spread(std::int64_t steps) {
    pace_ = static_cast<std::uint32_t>((lines_ << 16) / lines_at_once / std::max<std::int64_t>(steps, 1));
  }

  /// Inlined into the innermost loops: lines arrive while the arithmetic goes on.
  KVF_INLINE void step() {
    due_ += pace_;
    if (due_ < 1 << 16) return;
    due_ -= 1 << 16;
    if (far_.enter()) __builtin_prefetch(far_.at, 0, 2);
    far_.at += bytes;
    if (near_.enter())
      for (int i = 0; i < lines_at_once; ++i)
        if (near_.at + i * cache_line < near_.end) __builtin_prefetch(near_.at + i * cache_line, 0, 3);
    near_.at += bytes;
  }

 private:
  static constexpr int lines_at_once = 4, bytes = lines_at_once * cache_line;

  struct Walk {
    const std::byte* at = nullptr;
    const std::byte* end = nullptr;
    const Region* next = nullptr;
    const Region* last = nullptr;

    /// Goes to the next region behind the end of one; false behind the last.
    KVF_INLINE bool enter() {
      if (at < end) return true;
      if (next == last) return false;
      at = next->begin;
      end = at + next->bytes;
      ++next;
      return true;
    }
  };

  Walk near_;
  Walk far_;
  std::int64_t lines_ = 0;
  std::uint32_t pace_ = 0;  ///< times lines_at_once a step, in units of 2^-16
  std::uint32_t due_ = 0;
};

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
