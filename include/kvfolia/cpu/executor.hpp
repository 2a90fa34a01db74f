// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Who runs a kernel's work items. Threads belong to the engine.

#include <concepts>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI::cpu {

/// parallel_for(n, f) calls f(i, worker) once for every i in [0, n) and returns when all are done;
/// 0 <= worker < concurrency(), and no two calls at a time have the same worker. Results never
/// depend on which worker did what.
template <class E>
concept Executor = requires(E& exec, std::int64_t n, void (*f)(std::int64_t, int)) {
  { exec.concurrency() } -> std::convertible_to<int>;
  exec.parallel_for(n, f);
};

/// Runs everything on the calling thread.
struct Serial {
  int concurrency() const { return 1; }
  template <class F>
  void parallel_for(std::int64_t n, F&& f) const {
    for (std::int64_t i = 0; i < n; ++i) f(i, 0);
  }
};
static_assert(Executor<const Serial>);
inline constexpr Serial serial{};

#if defined(_OPENMP)
/// OpenMP's threads; work items are handed out one at a time.
struct OpenMp {
  int threads = 1;

  int concurrency() const { return threads; }
  template <class F>
  void parallel_for(std::int64_t n, F&& f) const {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (std::int64_t i = 0; i < n; ++i) f(i, omp_get_thread_num());
  }
};
static_assert(Executor<const OpenMp>);
#endif

}  // namespace kvfolia::inline KVF_ABI::cpu
