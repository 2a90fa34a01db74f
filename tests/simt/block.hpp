// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The threads of one block as fibers, resumed in an order that a seed chooses, and the places where they
// wait for one another.

#include <boost/context/fiber.hpp>
#include <boost/context/protected_fixedsize_stack.hpp>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvfolia/cuda/context.hpp"
#include "simt/memory_checks.hpp"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvfolia_tests::simt {

class Block {
 public:
  explicit Block(int threads)
      : threads_(static_cast<std::size_t>(threads)),
        warps_(static_cast<std::size_t>(threads / kvfolia::cuda::warp_size)) {}

  int threads() const { return static_cast<int>(threads_.size()); }
  std::uint64_t switches() const { return switches_; }

  /// Runs body(thread) for every thread. Gives what went wrong; then the fibers are left where they are:
  /// to unwind them would run code of the kernel in a state that it never has.
  std::string run(std::uint64_t seed, const std::function<void(int)>& body) {
    random_.seed(seed);
    fault_.clear();
    all_ = {};
    for (Rendezvous& warp : warps_) warp = {};
    ready_.clear();
    for (int i = 0; i < threads(); ++i) {
      start(i, body);
      ready_.push_back(i);
    }
    int left = threads();
    while (left > 0 && fault_.empty()) {
      if (ready_.empty()) {
        fault_ = "deadlock: " + who_waits_where();
        break;
      }
      const std::size_t pick = random_() % ready_.size();
      running_ = ready_[pick];
      ready_[pick] = ready_.back();
      ready_.pop_back();
      ++switches_;
      Thread& thread = threads_[static_cast<std::size_t>(running_)];
      enter_fiber(thread.stack->context);
      boost::context::fiber back = std::move(thread.fiber).resume();
      leave_fiber();
      if (back)
        thread.fiber = std::move(back);
      else
        --left;
    }
    if (!fault_.empty()) abandon();
    return fault_;
  }

  /// Stops the block from within a fiber.
  [[noreturn]] void fail(std::string fault) {
    fault_ = std::move(fault);
    wait();
    std::abort();  // nobody resumes it
  }

  /// Has a thread wait until all of its warp, or its block, are at the same call. The last one to come runs
  /// together(arguments), by lane; only of a warp.
  template <class Argument, class Together>
  void meet_warp(int thread, const char* operation, Site site, Argument* argument, const Together& together) {
    Rendezvous& warp = warps_[warp_of(thread)];
    warp.arguments[thread % kvfolia::cuda::warp_size] = argument;
    if (arrive(warp, thread, operation, site, kvfolia::cuda::warp_size)) together(warp.arguments);
    depart(warp);
  }
  void sync_warp(int thread, Site site) {
    Rendezvous& warp = warps_[warp_of(thread)];
    if (arrive(warp, thread, "sync_warp", site, kvfolia::cuda::warp_size)) ++warp.time;
    depart(warp);
  }
  void sync(int thread, Site site) {
    if (arrive(all_, thread, "sync", site, threads())) ++all_.time;
    depart(all_);
  }

  Access access(int thread, Site site) const {
    return {thread, all_.time, warps_[warp_of(thread)].time, site};
  }

 private:
  static constexpr std::size_t stack_bytes = std::size_t{64} << 10;

  /// A stack with a page in front that must not be touched; kept from run to run.
  struct Stack {
    boost::context::protected_fixedsize_stack memory{stack_bytes};
    boost::context::stack_context context = memory.allocate();
    Stack() = default;
    Stack(const Stack&) = delete;
    Stack& operator=(const Stack&) = delete;
    ~Stack() { memory.deallocate(context); }
  };
  struct Borrowed {
    boost::context::stack_context context;
    boost::context::stack_context allocate() { return context; }
    void deallocate(boost::context::stack_context&) {}
  };
  struct Thread {
    std::unique_ptr<Stack> stack = std::make_unique<Stack>();
    boost::context::fiber fiber{};
    const char* operation = "its start";  ///< where it waits; null: it has ended
    Site site{};
  };
  struct Rendezvous {
    int arrived = 0;
    std::uint32_t time = 1;
    const char* operation = "";
    Site site{};
    std::vector<int> waiting{};
    void* arguments[kvfolia::cuda::warp_size] = {};
  };

  static std::size_t warp_of(int thread) {
    return static_cast<std::size_t>(thread / kvfolia::cuda::warp_size);
  }

  void start(int i, const std::function<void(int)>& body) {
    Thread& thread = threads_[static_cast<std::size_t>(i)];
    thread.operation = "its start";
    const boost::context::stack_context at = thread.stack->context;
    forget(at);
    thread.fiber = boost::context::fiber(std::allocator_arg, boost::context::preallocated(at.sp, at.size, at),
                                         Borrowed{at}, [this, i, &body](boost::context::fiber&& scheduler) {
                                           finish_switch(nullptr, true);
                                           scheduler_ = std::move(scheduler);
                                           body(i);
                                           threads_[static_cast<std::size_t>(i)].operation = nullptr;
                                           start_switch(nullptr, host_stack_, host_stack_bytes_);
                                           return std::move(scheduler_);
                                         });
  }

  /// Whether this thread is the last of `count`.
  bool arrive(Rendezvous& meeting, int thread, const char* operation, Site site, int count) {
    Thread& self = threads_[static_cast<std::size_t>(thread)];
    self.operation = operation;
    self.site = site;
    if (meeting.arrived > 0 && !(meeting.operation == std::string(operation) && meeting.site == site))
      fail("divergence: " + who_waits_where());
    meeting.operation = operation;
    meeting.site = site;
    meeting.waiting.push_back(thread);
    return ++meeting.arrived == count;
  }
  void depart(Rendezvous& meeting) {
    const bool complete = meeting.arrived == (&meeting == &all_ ? threads() : kvfolia::cuda::warp_size);
    if (complete) {
      ready_.insert(ready_.end(), meeting.waiting.begin(), meeting.waiting.end());
      meeting.waiting.clear();
      meeting.arrived = 0;
    }
    wait();
  }

  /// Back to run(), until this thread is resumed.
  void wait() {
    void* fake = nullptr;
    start_switch(&fake, host_stack_, host_stack_bytes_);
    boost::context::fiber scheduler = std::move(scheduler_).resume();
    finish_switch(fake, false);
    scheduler_ = std::move(scheduler);
  }

  /// "threads 0-15 at sync (a.hpp:3), 16-31 have ended"
  std::string who_waits_where() const {
    std::string text;
    for (int first = 0; first < threads();) {
      const Thread& thread = threads_[static_cast<std::size_t>(first)];
      int end = first + 1;
      for (; end < threads(); ++end) {
        const Thread& other = threads_[static_cast<std::size_t>(end)];
        if (!thread.operation != !other.operation) break;
        if (thread.operation &&
            !(thread.operation == std::string(other.operation) && thread.site == other.site))
          break;
      }
      text += text.empty() ? "threads " : ", ";
      text += std::to_string(first);
      if (end - first > 1) text.append("-").append(std::to_string(end - 1));
      if (thread.operation)
        text.append(" at ").append(thread.operation).append(" (").append(thread.site.name()).append(")");
      else
        text += " have ended";
      first = end;
    }
    return text;
  }

  /// Leaves fibers, and the stacks that they are on, where they are.
  void abandon() {
    static auto& left_behind = *new std::vector<std::vector<Thread>>;
    const std::size_t count = threads_.size();
    left_behind.push_back(std::move(threads_));
    threads_ = std::vector<Thread>(count);
  }

  // The address sanitizer wants to know about stacks, and to be told that what a fiber had there is gone.
#if defined(__SANITIZE_ADDRESS__)
  static void forget(const boost::context::stack_context& stack) {
    __asan_unpoison_memory_region(static_cast<const char*>(stack.sp) - stack.size, stack.size);
  }
  static void start_switch(void** fake, const void* bottom, std::size_t bytes) {
    __sanitizer_start_switch_fiber(fake, bottom, bytes);
  }
  void finish_switch(void* fake, bool from_host) {
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake, &bottom, &bytes);
    if (from_host) {
      host_stack_ = bottom;
      host_stack_bytes_ = bytes;
    }
  }
#else
  static void forget(const boost::context::stack_context&) {}
  static void start_switch(void**, const void*, std::size_t) {}
  static void finish_switch(void*, bool) {}
#endif
  void enter_fiber(const boost::context::stack_context& stack) {
    start_switch(&host_fake_, static_cast<const char*>(stack.sp) - stack.size, stack.size);
  }
  void leave_fiber() { finish_switch(host_fake_, false); }

  std::vector<Thread> threads_;
  std::vector<Rendezvous> warps_;
  Rendezvous all_{};
  std::vector<int> ready_;
  std::mt19937_64 random_;
  boost::context::fiber scheduler_{};
  std::string fault_;
  int running_ = 0;
  std::uint64_t switches_ = 0;
  [[maybe_unused]] const void* host_stack_ = nullptr;
  [[maybe_unused]] std::size_t host_stack_bytes_ = 0;
  [[maybe_unused]] void* host_fake_ = nullptr;
};

}  // namespace kvfolia_tests::simt
