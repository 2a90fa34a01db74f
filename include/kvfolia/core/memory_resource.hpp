// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What stores and uploads ask of a device: memory, copies, events.

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/store_view.hpp"

namespace kvfolia::inline KVF_ABI {

/// What memory of a resource begins at multiples of.
inline constexpr std::size_t resource_alignment = 256;

/// Memory of a device, or of whatever stands in for one; held by reference, and outlives what holds it.
///   Stream, Event             work in order; what tells that the work in front of it is done
///   allocate(bytes, stream)   the device's memory, for work on `stream` and behind it; deallocate likewise
///   allocate_staging(bytes)   the host's memory, which upload() reads while the host goes on
///   upload(to, from, bytes, stream)             from staging memory to the device's, in the stream's order
///   copy_pages(store, copies, count, stream)    the copies of a batch; the device reads the list
///   create_event, destroy_event, record(event, stream), has_passed(event), wait(event)
/// Only allocations, create_event and wait may block.
template <class R>
concept MemoryResource = requires(R& r, std::size_t bytes, void* memory, const void* from,
                                  typename R::Stream stream, typename R::Event event, const StoreView& store,
                                  const PageCopy* copies, std::int32_t count) {
  { r.allocate(bytes, stream) } -> std::same_as<Result<void*>>;
  { r.deallocate(memory, bytes, stream) }
  noexcept;
  { r.allocate_staging(bytes) } -> std::same_as<Result<void*>>;
  { r.deallocate_staging(memory, bytes) }
  noexcept;
  { r.upload(memory, from, bytes, stream) }
  noexcept->std::same_as<Result<>>;
  { r.copy_pages(store, copies, count, stream) }
  noexcept->std::same_as<Result<>>;
  { r.create_event() } -> std::same_as<Result<typename R::Event>>;
  { r.destroy_event(event) }
  noexcept;
  { r.record(event, stream) }
  noexcept->std::same_as<Result<>>;
  { r.has_passed(event) }
  noexcept->std::same_as<Result<bool>>;
  { r.wait(event) }
  noexcept->std::same_as<Result<>>;
};

}  // namespace kvfolia::inline KVF_ABI
