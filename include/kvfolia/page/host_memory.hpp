// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The host's memory as a resource: what is written for a device runs without one.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/memory_resource.hpp"
#include "kvfolia/core/store_view.hpp"
#include "kvfolia/page/resource_store.hpp"
#include "kvfolia/page/store_spec.hpp"

namespace kvfolia::inline KVF_ABI {

/// Everything is done when it is asked for, so events have passed when they are recorded.
class HostMemory {
 public:
  struct Stream {};
  struct Event {};

  Result<void*> allocate(std::size_t bytes, Stream) {
    if (void* memory = ::operator new(bytes, alignment, std::nothrow)) return memory;
    return Error{Errc::device_error, "HostMemory::allocate"};
  }
  void deallocate(void* memory, std::size_t, Stream) noexcept { ::operator delete(memory, alignment); }
  Result<void*> allocate_staging(std::size_t bytes) { return allocate(bytes, {}); }
  void deallocate_staging(void* memory, std::size_t bytes) noexcept { deallocate(memory, bytes, {}); }

  Result<> upload(void* to, const void* from, std::size_t bytes, Stream) noexcept {
    std::memcpy(to, from, bytes);
    return {};
  }
  Result<> copy_pages(const StoreView& store, const PageCopy* copies, std::int32_t count, Stream) noexcept {
    for (std::int32_t i = 0; i < count; ++i)
      if (copies[i].format >= 0) detail::copy_page(store, copies[i]);
    return {};
  }

  Result<Event> create_event() { return Event{}; }
  void destroy_event(Event) noexcept {}
  Result<> record(Event, Stream) noexcept { return {}; }
  Result<bool> has_passed(Event) noexcept { return true; }
  Result<> wait(Event) noexcept { return {}; }

 private:
  static constexpr std::align_val_t alignment{resource_alignment};
};
static_assert(MemoryResource<HostMemory>);
static_assert(PageStore<ResourceStore<HostMemory>>);

}  // namespace kvfolia::inline KVF_ABI
