// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// A GPU's memory for stores and uploads: allocated by the runtime, in the order of a stream, or an engine's own.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/memory_resource.hpp"
#include "kvfolia/core/store_view.hpp"
#include "kvfolia/cuda/launch.cuh"
#include "kvfolia/cuda/page_operations.cuh"

namespace kvfolia::inline KVF_ABI::cuda {

namespace detail {

/// What all of them share: staging memory, copies and events of the current device.
class DeviceQueue {
 public:
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;

  /// Pinned.
  Result<void*> allocate_staging(std::size_t bytes) {
    void* memory = nullptr;
    if (auto ok = launched(cudaMallocHost(&memory, bytes), "cudaMallocHost"); !ok) return ok.error();
    return memory;
  }
  void deallocate_staging(void* memory, std::size_t) noexcept { cudaFreeHost(memory); }

  Result<> upload(void* to, const void* from, std::size_t bytes, Stream stream) noexcept {
    return launched(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  }
  Result<> copy_pages(const StoreView& store, const PageCopy* copies, std::int32_t count,
                      Stream stream) noexcept {
    return cuda::copy_pages(store, copies, count, stream);
  }

  Result<Event> create_event() {
    Event event = nullptr;
    if (auto ok = launched(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"); !ok)
      return ok.error();
    return event;
  }
  void destroy_event(Event event) noexcept { cudaEventDestroy(event); }
  Result<> record(Event event, Stream stream) noexcept {
    return launched(cudaEventRecord(event, stream), "cudaEventRecord");
  }
  Result<bool> has_passed(Event event) noexcept {
    const cudaError_t state = cudaEventQuery(event);
    if (state == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // which it is none of
      return false;
    }
    if (auto ok = launched(state, "cudaEventQuery"); !ok) return ok.error();
    return true;
  }
  Result<> wait(Event event) noexcept { return launched(cudaEventSynchronize(event), "cudaEventSynchronize"); }
};

}  // namespace detail

/// By cudaMalloc and cudaFree, which may wait for the device.
class DeviceMemory : public detail::DeviceQueue {
 public:
  Result<void*> allocate(std::size_t bytes, Stream) {
    void* memory = nullptr;
    if (auto ok = detail::launched(cudaMalloc(&memory, bytes), "cudaMalloc"); !ok) return ok.error();
    return memory;
  }
  void deallocate(void* memory, std::size_t, Stream) noexcept { cudaFree(memory); }
};
static_assert(MemoryResource<DeviceMemory>);

/// From a pool, the device's own unless another is given, in the order of the stream.
class StreamOrderedMemory : public detail::DeviceQueue {
 public:
  explicit StreamOrderedMemory(cudaMemPool_t pool = nullptr) : pool_(pool) {}

  Result<void*> allocate(std::size_t bytes, Stream stream) {
    void* memory = nullptr;
    const cudaError_t error = pool_ ? cudaMallocFromPoolAsync(&memory, bytes, pool_, stream)
                                    : cudaMallocAsync(&memory, bytes, stream);
    if (auto ok = detail::launched(error, "cudaMallocAsync"); !ok) return ok.error();
    return memory;
  }
  void deallocate(void* memory, std::size_t, Stream stream) noexcept { cudaFreeAsync(memory, stream); }

 private:
  cudaMemPool_t pool_;
};
static_assert(MemoryResource<StreamOrderedMemory>);

/// A buffer that the engine has, from its beginning on. What is given back is not used again.
class EngineMemory : public detail::DeviceQueue {
 public:
  explicit EngineMemory(std::span<std::byte> buffer) : buffer_(buffer) {}

  Result<void*> allocate(std::size_t bytes, Stream) {
    const auto address = reinterpret_cast<std::uintptr_t>(buffer_.data()) + used_;
    const std::size_t begin = used_ + (resource_alignment - address % resource_alignment) % resource_alignment;
    if (begin > buffer_.size() || bytes > buffer_.size() - begin)
      return Error{Errc::workspace_too_small, "EngineMemory", static_cast<std::int64_t>(begin + bytes),
                   static_cast<std::int64_t>(buffer_.size())};
    used_ = begin + bytes;
    return buffer_.data() + begin;
  }
  void deallocate(void*, std::size_t, Stream) noexcept {}

 private:
  std::span<std::byte> buffer_;
  std::size_t used_ = 0;
};
static_assert(MemoryResource<EngineMemory>);

}  // namespace kvfolia::inline KVF_ABI::cuda
