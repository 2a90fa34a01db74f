// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The memory that a kernel uses: to watch over it, or to bring it elsewhere.

#include <cstddef>
#include <new>
#include <vector>

namespace kvfolia_tests {

/// Begins where a store's pages may, too.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  static constexpr std::align_val_t alignment{128};
  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), alignment)); }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, alignment); }
  bool operator==(const AlignedAllocator&) const = default;
};
template <class T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;

/// Memory of the host, and whether kernels write there.
struct Array {
  const void* data;
  std::size_t bytes;
  const char* name;
  bool written;
};
using Arrays = std::vector<Array>;

template <class Vector>
Array read_array(const Vector& values, const char* name) {
  return {values.data(), values.size() * sizeof(values[0]), name, false};
}
template <class Vector>
Array written_array(Vector& values, const char* name) {
  return {values.data(), values.size() * sizeof(values[0]), name, true};
}

}  // namespace kvfolia_tests
