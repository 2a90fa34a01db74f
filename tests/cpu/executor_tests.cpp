// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "kvfolia/cpu/executor.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "common/thread_pool.hpp"
#include "support/catch.hpp"

using namespace kvfolia;

namespace {

/// What kernels rely on: every item once, workers in range, none of them busy twice at a time, and all of it
/// over and visible when the call returns.
template <class Exec>
void check_executor(Exec& exec, int expected_concurrency) {
  static_assert(cpu::Executor<Exec>);
  const int concurrency = exec.concurrency();
  CHECK(concurrency == expected_concurrency);
  for (const std::int64_t n : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<int> runs(static_cast<std::size_t>(n), 0);  // not atomic: an item has one runner
    std::vector<std::int64_t> items_of(static_cast<std::size_t>(concurrency), 0);
    std::vector<std::atomic<bool>> busy(static_cast<std::size_t>(concurrency));
    std::atomic<int> faults = 0;
    exec.parallel_for(n, [&](std::int64_t i, int worker) {
      if (i < 0 || i >= n || worker < 0 || worker >= concurrency) {
        ++faults;
        return;
      }
      const auto w = static_cast<std::size_t>(worker);
      if (busy[w].exchange(true)) ++faults;
      ++runs[static_cast<std::size_t>(i)];
      ++items_of[w];  // not atomic: a worker's scratch is its own
      if (i % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (!busy[w].exchange(false)) ++faults;
    });
    CHECK(faults == 0);
    std::int64_t items = 0;
    for (const std::int64_t count : items_of) items += count;
    CHECK(items == n);
    for (const int count : runs) CHECK(count == 1);
  }
}

}  // namespace

TEST_CASE("the serial executor runs all items in order on the caller's thread") {
  check_executor(cpu::serial, 1);
  const auto caller = std::this_thread::get_id();
  std::int64_t next = 0;
  bool same_thread = true;
  cpu::serial.parallel_for(5, [&](std::int64_t i, int) {
    CHECK(i == next++);
    same_thread = same_thread && std::this_thread::get_id() == caller;
  });
  CHECK(next == 5);
  CHECK(same_thread);
}

#if defined(_OPENMP)
TEST_CASE("OpenMP's workers are as many as asked for and never shared") {
  for (const int threads : {1, 2, 5}) {
    const cpu::OpenMp exec{threads};
    for (int call = 0; call < 20; ++call) check_executor(exec, threads);
  }
}

TEST_CASE("OpenMP's executor may be called by several threads") {
  std::vector<std::thread> callers;
  std::atomic<std::int64_t> items = 0;
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([&] { cpu::OpenMp{2}.parallel_for(100, [&](std::int64_t, int) { ++items; }); });
  for (std::thread& caller : callers) caller.join();
  CHECK(items == 300);
}
#endif

TEST_CASE("the workers of an engine's own pool are as many as asked for and never shared") {
  for (const int threads : {1, 2, 5}) {
    kvfolia_examples::ThreadPool pool(threads);
    for (int call = 0; call < 20; ++call) check_executor(pool, threads);
  }
}

TEST_CASE("two workers are at work at the same time") {
  const auto overlaps = [](auto& exec) {
    // Each waits for the other, for a while.
    std::atomic<int> arrived = 0;
    std::atomic<bool> met = false;
    exec.parallel_for(2, [&](std::int64_t, int) {
      ++arrived;
      for (int wait = 0; wait < 10000 && !met; ++wait) {
        if (arrived == 2) met = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    return met.load();
  };
  kvfolia_examples::ThreadPool pool(2);
  CHECK(overlaps(pool));
#if defined(_OPENMP)
  const cpu::OpenMp open_mp{2};
  CHECK(overlaps(open_mp));
#endif
}
