// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What benchmarks on a GPU have in common: its memory, its clock, and what a copy gets out of it.

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

/// What copy_bandwidth() gave.
inline double copies_per_second = 0.0;

/// Measures launch(i), which says whether it could be done: so many launches between two events that the GPU does not
/// wait for the host.
template <class Launch>
void measure(benchmark::State& state, double bytes, const Launch& launch) {
  constexpr int launches = 50;
  const Events events;
  std::int64_t i = 0;
  if (!launch(i) || cudaDeviceSynchronize() != cudaSuccess) {
    state.SkipWithError("could not be launched");
    return;
  }
  for (auto _ : state) {
    const double seconds = events.seconds([&] {
      for (int n = 0; n < launches; ++n)
        if (!launch(++i)) std::exit(1);
    });
    state.SetIterationTime(seconds / launches);
  }
  state.counters["bytes"] = bytes;
  const double all = bytes * static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(all * 1e-9, benchmark::Counter::kIsRate);
  state.counters["of_copy"] = benchmark::Counter(all / copies_per_second, benchmark::Counter::kIsRate);
}

/// What these programs do: add_all() registers. 77 where there is no GPU.
template <class AddAll>
int run_benchmarks(int argc, char** argv, const AddAll& add_all) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("there is no GPU");
    return 77;
  }
  copies_per_second = copy_bandwidth();
  std::printf("a copy reads and writes %.0f GB/s\n", copies_per_second * 1e-9);
  add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
