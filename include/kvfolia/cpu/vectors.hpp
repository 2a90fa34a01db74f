// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Loops over vectors, and where vectors give the bits that scalars give.

#include <bit>
#include <cstddef>

#include "kvfolia/core/config.hpp"
#include "kvfolia/cpu/target.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

namespace hn = hwy::HWY_NAMESPACE;

/// Whether there are vectors of a known size whose arithmetic is that of scalars. Elsewhere the plain code
/// serves, which compilers make vectors of as they can.
inline constexpr bool has_exact_vectors =
#if HWY_ARCH_X86
    HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128;
#elif HWY_ARCH_ARM_A64 && defined(__ARM_FEATURE_AES)  // what Highway's functions for NEON are made for
    HWY_TARGET == HWY_NEON;
#else
    false;
#endif

/// Whether there are instructions that widen fp16 and round to it.
inline constexpr bool has_half_instructions =
#if HWY_ARCH_X86 && !defined(HWY_DISABLE_F16C)
    HWY_TARGET <= HWY_AVX2;
#else
    HWY_ARCH_ARM_A64 != 0 && HWY_TARGET == HWY_NEON;
#endif

/// Calls f(tag, i) for vectors at i that cover [0, Count). Where Count is no multiple of their size, the
/// last one begins earlier, over elements that another one has covered too.
template <class T, int Count, class F>
void each_vector(F&& f) {
  static_assert(Count > 0);
  const hn::CappedTag<T, std::bit_floor(static_cast<std::size_t>(Count))> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  for (int i = 0; i + lanes <= Count; i += lanes) f(d, i);
  if (Count % lanes != 0) f(d, Count - lanes);
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
