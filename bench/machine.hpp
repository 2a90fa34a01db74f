// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What this machine can do, as rooflines: bytes read from memory and multiply-adds, with so many threads.

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "kvfolia/page/host_store.hpp"

namespace kvfolia_bench {

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Memory on 2 MiB pages where the system has them. Only grows, so that setting up a case seldom waits for
/// the system's pages.
class HugeMemory {
 public:
  /// Undefined bytes, aligned to 2 MiB; whatever was there before is gone.
  std::byte* take(std::int64_t bytes) {
    if (bytes > bytes_) {
      store_.reset();
      kvfolia::StoreSpec spec;
      spec.formats = {{bytes, 1}};
      spec.huge_pages = true;
      store_.emplace(spec);
      bytes_ = bytes;
    }
    return store_->data(0, 0);
  }

 private:
  std::optional<kvfolia::HostStore> store_;
  std::int64_t bytes_ = 0;
};

namespace detail {

using Longs [[gnu::vector_size(64)]] = std::uint64_t;
using Floats [[gnu::vector_size(64)]] = float;
inline constexpr std::int64_t line = 64;

/// Four streams, as keys and values of two pages are, each prefetched: the best of what was tried.
inline std::uint64_t sum(const std::byte* data, std::int64_t bytes) {
  constexpr int streams = 4, unroll = 4;
  constexpr std::int64_t ahead = 2048;
  const std::int64_t stream = bytes / streams / (unroll * line) * (unroll * line);
  Longs sums[unroll] = {};
  for (std::int64_t at = 0; at < stream; at += unroll * line)
    for (int s = 0; s < streams; ++s)
      for (int i = 0; i < unroll; ++i) {
        const std::byte* from = data + s * stream + at + i * line;
        __builtin_prefetch(from + ahead);
        Longs lanes;
        std::memcpy(&lanes, from, sizeof lanes);
        sums[i] += lanes;
      }
  std::uint64_t total = 0;
  for (const Longs& lanes : sums)
    for (int i = 0; i < 8; ++i) total += lanes[i];
  return total;
}

/// Independent chains, enough for two units of latency four.
inline float multiply_add(std::int64_t rounds) {
  Floats from[14] = {};
  for (int i = 0; i < 14; ++i) from[i] += 0.9f + 0.001f * static_cast<float>(i);
  asm volatile("" : "+m"(from));  // nothing is known about them, not even that they are different
  Floats a = from[0], b = from[1], c = from[2], d = from[3], e = from[4], f = from[5];
  Floats g = from[6], h = from[7], i = from[8], j = from[9], k = from[10], l = from[11];
  const Floats x = from[12], y = from[13];
  for (std::int64_t round = 0; round < rounds; ++round) {
    a = a * x + y, b = b * x + y, c = c * x + y, d = d * x + y, e = e * x + y, f = f * x + y;
    g = g * x + y, h = h * x + y, i = i * x + y, j = j * x + y, k = k * x + y, l = l * x + y;
  }
  const Floats total = a + b + c + d + e + f + g + h + i + j + k + l;
  return total[0] + total[15];
}
inline constexpr double multiply_add_flops = 2.0 * 16 * 12;

inline volatile std::uint64_t result;  // is not optimised away

}  // namespace detail

/// Reads through memory of its own, a slice at a time, so that no slice is in a cache when its turn comes.
class ReadProbe {
 public:
  static constexpr std::int64_t slice_bytes = std::int64_t{128} << 20;

  explicit ReadProbe(std::int64_t bytes)
      : slices_(std::max<std::int64_t>(2, bytes / slice_bytes)), data_(memory_.take(slices_ * slice_bytes)) {
    // Pages that nothing was written to would all be one page of zeros.
    std::memset(data_, 1, static_cast<std::size_t>(slices_ * slice_bytes));
  }

  void read_slice(int threads) {
    const std::byte* data = data_ + next_ * slice_bytes;
    next_ = (next_ + 1) % slices_;
    std::uint64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
      const std::int64_t share = slice_bytes / omp_get_num_threads() / detail::line * detail::line;
      total += detail::sum(data + omp_get_thread_num() * share, share);
    }
    detail::result = total;
  }

 private:
  std::int64_t slices_;
  HugeMemory memory_;
  std::byte* data_;
  std::int64_t next_ = 0;
};

/// Multiply-adds of floats as this unit's flags allow them, for some ten milliseconds.
struct MultiplyProbe {
  static constexpr std::int64_t rounds = 4'000'000;
  static constexpr double flops = detail::multiply_add_flops * rounds;  ///< of one thread

  static void run(int threads) {
    float total = 0.0f;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    total += detail::multiply_add(rounds);
    detail::result = static_cast<std::uint64_t>(total > 0.0f);
  }
};

/// What was measured beside a benchmark, a moment at a time: a machine's bandwidth changes within minutes.
class Roofline {
 public:
  Roofline(ReadProbe& probe, int threads) : probe_(probe), threads_(threads) {}

  /// Each returns how long it took.
  double read() {
    return add(static_cast<double>(ReadProbe::slice_bytes), [&] { probe_.read_slice(threads_); });
  }
  double multiply() {
    return add(MultiplyProbe::flops * threads_, [&] { MultiplyProbe::run(threads_); });
  }
  /// Bytes, or floating-point operations, a second.
  double per_second() const { return amount_ / seconds_; }

 private:
  template <class F>
  double add(double amount, F&& f) {
    const double begin = seconds();
    f();
    const double took = seconds() - begin;
    seconds_ += took;
    amount_ += amount;
    return took;
  }

  ReadProbe& probe_;
  int threads_;
  double seconds_ = 0.0;
  double amount_ = 0.0;
};

}  // namespace kvfolia_bench
