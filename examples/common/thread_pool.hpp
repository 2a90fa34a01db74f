// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// An executor of an engine's own: threads that sleep between calls.

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace kvfolia_examples {

/// Kernels take anything with these two functions. The caller works too, as worker 0; it makes one call at a
/// time. Kernels never throw, so nothing has to come back from a thread.
class ThreadPool {
 public:
  explicit ThreadPool(int workers) : ThreadPool() {
    for (int w = 1; w < workers; ++w) threads_.emplace_back([this, w] { serve(w); });
  }
  ThreadPool(const ThreadPool&) = delete;
  ~ThreadPool() {
    stop_ = true;
    wake();
  }

  int concurrency() const { return static_cast<int>(threads_.size()) + 1; }

  template <class F>
  void parallel_for(std::int64_t n, F&& f) {
    using Function = std::remove_reference_t<F>;
    function_ = &f;
    call_ = [](const void* function, std::int64_t i, int worker) {
      (*static_cast<Function*>(const_cast<void*>(function)))(i, worker);
    };
    count_ = n;
    next_ = 0;
    busy_ = static_cast<int>(threads_.size());
    wake();
    take_items(0);
    for (int busy = busy_; busy != 0; busy = busy_) busy_.wait(busy);
  }

 private:
  ThreadPool() = default;

  void wake() {
    ++round_;
    round_.notify_all();
  }
  void take_items(int worker) {
    for (std::int64_t i = next_++; i < count_; i = next_++) call_(function_, i, worker);
  }
  void serve(int worker) {
    for (unsigned seen = 0;;) {
      round_.wait(seen);
      seen = round_;
      if (stop_) return;
      take_items(worker);
      if (--busy_ == 0) busy_.notify_one();
    }
  }

  // One call's work: written before its round begins, read until no thread is busy.
  const void* function_ = nullptr;
  void (*call_)(const void*, std::int64_t, int) = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_ = 0;
  std::atomic<int> busy_ = 0;
  std::atomic<unsigned> round_ = 0;
  std::atomic<bool> stop_ = false;
  std::vector<std::jthread> threads_;  // last: joined while all else is still there
};

}  // namespace kvfolia_examples
