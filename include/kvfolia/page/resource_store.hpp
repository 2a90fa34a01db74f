// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Pages in the memory of a resource: a device's, most often.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/memory_resource.hpp"
#include "kvfolia/core/store_view.hpp"
#include "kvfolia/page/store_spec.hpp"

namespace kvfolia::inline KVF_ABI {

/// Copies of pages, in memory that a device reads.
struct DeviceCopies {
  const PageCopy* data = nullptr;
  std::int32_t count = 0;
};

/// Owns memory of a resource, for all formats. Bytes start undefined. Move-only; the resource outlives it.
template <MemoryResource R>
class ResourceStore {
 public:
  using Resource = R;
  using Stream = typename R::Stream;

  /// Allocates for work on `stream` and behind it, where memory is freed, too: that must live as long. What
  /// the resource says when it has no memory. Throws contract_error as store_view() does.
  static Result<ResourceStore> make(const StoreSpec& spec, R& resource, Stream stream) {
    ResourceStore store(store_view(spec), resource, stream);
    for (int f = 0; f < TableEntry::max_formats; ++f) {
      const std::int64_t bytes = detail::store_bytes(store.view_, f);
      if (bytes == 0) continue;
      const auto memory = resource.allocate(static_cast<std::size_t>(bytes), stream);
      if (!memory) return memory.error();
      store.view_.formats[f].base = static_cast<std::byte*>(*memory);
    }
    return Result<ResourceStore>(std::move(store));
  }
  ResourceStore(ResourceStore&& other) noexcept
      : view_(std::exchange(other.view_, {})), resource_(other.resource_), stream_(other.stream_) {}
  ResourceStore& operator=(ResourceStore&& other) noexcept {
    std::swap(view_, other.view_);
    std::swap(resource_, other.resource_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~ResourceStore() {
    for (int f = 0; f < TableEntry::max_formats; ++f)
      if (std::byte* base = view_.formats[f].base)
        resource_->deallocate(base, static_cast<std::size_t>(detail::store_bytes(view_, f)), stream_);
  }

  /// Page 0 of one layer, on the device; null for a format without pages.
  std::byte* data(int format, int layer) const {
    const PageSlices& f = view_.formats[format];
    return f.base ? f.base + layer * f.layer_stride : nullptr;
  }
  /// Bytes between a layer's pages.
  std::int64_t page_stride(int format) const { return view_.formats[format].page_stride; }
  /// Bytes of one page over all layers.
  std::int64_t page_bytes(int format) const { return view_.formats[format].slice_bytes * view_.layers; }
  const StoreView& view() const { return view_; }

  /// Carries out the copies of a batch, in the stream's order; to be called before its tokens are appended.
  Result<> copy(DeviceCopies copies, Stream stream) noexcept {
    if (copies.count == 0) return {};
    return resource_->copy_pages(view_, copies.data, copies.count, stream);
  }

 private:
  ResourceStore(const StoreView& view, R& resource, Stream stream)
      : view_(view), resource_(&resource), stream_(stream) {}

  StoreView view_;
  R* resource_;
  Stream stream_;
};

}  // namespace kvfolia::inline KVF_ABI
