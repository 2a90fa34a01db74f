// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Compiler-facing switches: annotations, the ABI namespace, assertions.

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)
#error "kvfolia: -ffast-math changes the bytes that encode() writes and hides NaN; build without it"
#endif

/// Callable from host and device. Changes annotations only: a class is the same in .cpp and .cu.
#if defined(__CUDACC__)
#define KVF_HD __host__ __device__
#else
#define KVF_HD
#endif

/// Functions that kernels call, and that are not in a namespace of the kernels' target: inlined, they
/// leave no copy (at -O1 to -O3) that a linker could give to a unit for an older processor.
#if defined(__GNUC__)
#define KVF_INLINE __attribute__((always_inline)) inline
#define KVF_INLINE_LAMBDA __attribute__((always_inline))  // behind a lambda's parameters
#else
#define KVF_INLINE inline
#define KVF_INLINE_LAMBDA
#endif

/// 1 adds checks that cost time (ids, bounds, non-finite input). Two translation units may differ:
/// the setting names an inline namespace, so their functions are different functions.
#ifndef KVF_CHECKED
#define KVF_CHECKED 0
#endif

#if KVF_CHECKED
#define KVF_ABI checked
#else
#define KVF_ABI unchecked
#endif

#include <cstdio>
#include <cstdlib>

namespace kvfolia::inline KVF_ABI {

inline constexpr bool is_checked = KVF_CHECKED != 0;

namespace detail {

/// Says where a contract was broken and stops: a silent wrong answer is worse.
[[noreturn]] inline void assertion_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "kvfolia: %s:%d: assertion failed: %s\n", file, line, condition);
  std::abort();
}

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI

#if !KVF_CHECKED
#define KVF_ASSERT(condition) static_cast<void>(0)
#elif defined(__CUDA_ARCH__)
#define KVF_ASSERT(condition) ((condition) ? static_cast<void>(0) : __trap())
#else
#define KVF_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::kvfolia::detail::assertion_failed(#condition, __FILE__, __LINE__))
#endif
