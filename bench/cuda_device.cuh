// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What benchmarks on a GPU have in common: its memory, its clock, and what a copy gets out of it.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
struct Freed {
  void operator()(T* memory) const { cudaFree(memory); }
};
template <class T>
using DeviceArray = std::unique_ptr<T[], Freed<T>>;

template <class T>
DeviceArray<T> allocate(std::size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)));
  return DeviceArray<T>(static_cast<T*>(memory));
}
template <class T>
DeviceArray<T> copy_of(const std::vector<T>& host) {
  auto memory = allocate<T>(host.size());
  check(cudaMemcpy(memory.get(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

struct Events {
  cudaEvent_t begin{}, end{};
  Events() {
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
  }
  ~Events() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
  template <class F>
  double seconds(F&& f) const {
    check(cudaEventRecord(begin));
    f();
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float milliseconds = 0.0f;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    return milliseconds * 1e-3;
  }
};

/// Bytes a second of a copy, those read and those written, at best of ten.
inline double copy_bandwidth() {
  constexpr std::size_t bytes = std::size_t{1} << 30;
  const auto from = allocate<std::byte>(bytes), to = allocate<std::byte>(bytes);
  const Events events;
  double best = 0.0;
  for (int i = 0; i < 10; ++i) {
    const double seconds = events.seconds(
        [&] { check(cudaMemcpyAsync(to.get(), from.get(), bytes, cudaMemcpyDeviceToDevice)); });
    best = std::max(best, 2.0 * static_cast<double>(bytes) / seconds);
  }
  return best;
}
