// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The host's memory as a device's whose work takes time: copies are made and events pass, in order, when a
// test says so; calls are counted, and the next one of a kind can be made to fail.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#include "kvfolia/page/host_memory.hpp"

namespace kvfolia_tests {

using namespace kvfolia;

class DelayedMemory {
 public:
  using Stream = int;
  using Event = int;

  Result<void*> allocate(std::size_t bytes, Stream) {
    if (memory_fails) return Error{Errc::device_error, "allocate", 2};
    ++allocations, ++allocated;
    return host_.allocate(bytes, {});
  }
  void deallocate(void* memory, std::size_t bytes, Stream) noexcept {
    --allocated;
    host_.deallocate(memory, bytes, {});
  }
  Result<void*> allocate_staging(std::size_t bytes) { return allocate(bytes, 0); }
  void deallocate_staging(void* memory, std::size_t bytes) noexcept { deallocate(memory, bytes, 0); }
  Result<> upload(void* to, const void* from, std::size_t bytes, Stream) noexcept {
    if (upload_fails) return Error{Errc::device_error, "upload", 3};
    ++uploads;
    queue_.push_back({[=] { std::memcpy(to, from, bytes); }});
    return {};
  }
  Result<> copy_pages(const StoreView& store, const PageCopy* copies, std::int32_t count, Stream) noexcept {
    queue_.push_back({[=, this] { static_cast<void>(host_.copy_pages(store, copies, count, {})); }});
    return {};
  }

  Result<Event> create_event() {
    pending_.push_back(0);
    return static_cast<Event>(pending_.size() - 1);
  }
  void destroy_event(Event) noexcept {}
  Result<> record(Event event, Stream) noexcept {
    if (record_fails) return Error{Errc::device_error, "record", 4};
    ++pending(event);
    queue_.push_back({[this, event] { --pending(event), ++passed_; }, true});
    return {};
  }
  Result<bool> has_passed(Event event) noexcept { return pending(event) == 0; }
  Result<> wait(Event event) noexcept {
    ++waits;
    while (pending(event) > 0) work();
    return {};
  }

  /// Makes all copies, but lets no event pass: the device has done its work, and nobody has heard of it.
  void catch_up() {
    for (Work& work : queue_) {
      if (work.is_event || work.is_done) continue;
      work.is_done = true;
      work.act();
    }
  }
  /// The device gets to one more event, or to its work's end.
  void advance() {
    for (const int before = passed_; passed_ == before && !queue_.empty();) work();
  }
  void finish() {
    while (!queue_.empty()) work();
  }

  int allocations = 0, allocated = 0, uploads = 0, waits = 0;
  bool memory_fails = false, upload_fails = false, record_fails = false;

 private:
  struct Work {
    std::function<void()> act;
    bool is_event = false;
    bool is_done = false;
  };
  int& pending(Event event) { return pending_[static_cast<std::size_t>(event)]; }
  void work() {
    const Work next = queue_.front();
    queue_.pop_front();
    if (!next.is_done) next.act();
  }

  HostMemory host_;
  std::deque<Work> queue_;
  std::vector<int> pending_;  ///< of each event, how often it is in the queue
  int passed_ = 0;
};
static_assert(MemoryResource<DelayedMemory>);

}  // namespace kvfolia_tests
