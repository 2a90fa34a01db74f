// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The host's memory as a device's whose work takes time: events pass when a test says so, calls are counted,
// and the next one of a kind can be made to fail.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
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
    std::memcpy(to, from, bytes);
    return {};
  }
  Result<> copy_pages(const StoreView& store, const PageCopy* copies, std::int32_t count, Stream) noexcept {
    return host_.copy_pages(store, copies, count, {});
  }

  Result<Event> create_event() {
    recorded_.push_back(-1);
    return static_cast<Event>(recorded_.size() - 1);
  }
  void destroy_event(Event) noexcept {}
  Result<> record(Event event, Stream) noexcept {
    if (record_fails) return Error{Errc::device_error, "record", 4};
    recorded_[static_cast<std::size_t>(event)] = ++now_;
    return {};
  }
  Result<bool> has_passed(Event event) noexcept {
    return recorded_[static_cast<std::size_t>(event)] <= passed_;
  }
  Result<> wait(Event event) noexcept {
    ++waits;
    if (passed_ < recorded_[static_cast<std::size_t>(event)])
      passed_ = recorded_[static_cast<std::size_t>(event)];
    return {};
  }

  /// The device gets to one more event, or to all.
  void advance() { passed_ += passed_ < now_ ? 1 : 0; }
  void finish() { passed_ = now_; }

  int allocations = 0, allocated = 0, uploads = 0, waits = 0;
  bool memory_fails = false, upload_fails = false, record_fails = false;

 private:
  HostMemory host_;
  std::vector<int> recorded_;
  int now_ = 0;
  int passed_ = 0;
};
static_assert(MemoryResource<DelayedMemory>);

}  // namespace kvfolia_tests
