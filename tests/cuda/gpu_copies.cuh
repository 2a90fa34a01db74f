// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The host's arrays on a GPU, for one call.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvfolia/core/error.hpp"
#include "kvfolia/core/page_format.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "support/arrays.hpp"

namespace kvfolia_tests::gpu {

using namespace kvfolia;

struct Freed {
  void operator()(void* memory) const { cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<void, Freed>;

/// Copies of the host's arrays on the device, and what of them comes back.
class Copies {
 public:
  /// A device's copy; the first error stays.
  void* bring(const void* from, std::size_t bytes, bool written) {
    void* memory = nullptr;
    note(cudaMalloc(&memory, bytes > 0 ? bytes : 1));
    if (memory && bytes > 0) note(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
    owned_.emplace_back(memory);
    if (written) written_.push_back({const_cast<void*>(from), memory, bytes});
    return memory;
  }
  void bring(const Arrays& arrays) {
    for (const Array& array : arrays)
      moved_.push_back({static_cast<const std::byte*>(array.data), array.bytes,
                        static_cast<std::byte*>(bring(array.data, array.bytes, array.written))});
  }
  /// Has a pointer into an array that was brought point to the device's copy; others stay.
  template <class T>
  void redirect(T*& pointer) const {
    const auto* there = reinterpret_cast<const std::byte*>(pointer);
    for (const Moved& m : moved_)
      if (m.host <= there && there < m.host + m.bytes)
        return static_cast<void>(pointer = reinterpret_cast<T*>(m.device + (there - m.host)));
  }
  /// The same for all of a view's pages.
  template <class Layout, class Quant>
  void redirect(PagedView<Layout, Quant>& view) const {
    for (FormatView& format : view.formats)
      for (PlaneView* plane : {&format.keys, &format.values, &format.key_params, &format.value_params})
        redirect(plane->base);
  }
  /// Runs what is launched on the null stream, between the ways there and back.
  template <class Launch>
  Result<> run(const Launch& launch) {
    if (auto ok = result(); !ok) return ok;
    if (auto ok = launch(); !ok) return ok;
    note(cudaDeviceSynchronize());
    bring_back();
    return result();
  }
  void bring_back() {
    for (const Written& w : written_) note(cudaMemcpy(w.host, w.device, w.bytes, cudaMemcpyDeviceToHost));
  }
  void note(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }
  Result<> result() const {
    if (error_ == cudaSuccess) return {};
    return Error{Errc::device_error, cudaGetErrorString(error_), static_cast<std::int64_t>(error_)};
  }

 private:
  struct Written {
    void* host;
    void* device;
    std::size_t bytes;
  };
  struct Moved {
    const std::byte* host;
    std::size_t bytes;
    std::byte* device;
  };
  std::vector<Moved> moved_;
  std::vector<DeviceMemory> owned_;
  std::vector<Written> written_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace kvfolia_tests::gpu
