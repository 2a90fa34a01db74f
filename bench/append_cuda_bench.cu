// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Writing pages on a GPU: new tokens of a step, prompts, and copies of pages. Bytes are those of the rows
// that are read and of the pages that are written; beside them the part that is of what a copy reads and
// writes a second.

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda_device.cuh"
#include "kvfolia/cuda.cuh"
#include "kvfolia/kvfolia.hpp"

#ifndef NDEBUG
#error "benchmarks are built with NDEBUG"
#endif

using namespace kvfolia;

namespace {

constexpr int dims = 128, kv_heads = 8, page_tokens = 64;
using Layout = Gqa<dims, page_tokens>;
using Store = ResourceStore<cuda::DeviceMemory>;

/// state.range(0) sequences get state.range(1) tokens each, every time other pages'.
template <class Quant>
void append(benchmark::State& state) {
  using Cache = PagedCache<Layout, Quant, KeepAll, All, Store>;
  const auto rows = static_cast<int>(state.range(0)), tokens = static_cast<int>(state.range(1));
  constexpr int layers = 16;  // more memory than caches hold
  const std::int64_t pages = std::int64_t{rows} * ((tokens + page_tokens - 1) / page_tokens) + 1;
  const CacheConfig config{.shape = {layers, kv_heads, dynamic},
                           .pages = pages,
                           .exact_pages = exact_format<Quant> == 0 ? 0 : pages};
  cuda::DeviceMemory memory;
  Cache cache(config, *Store::make(Cache::store_spec(config), memory, nullptr));
  auto uploads = *Uploads<cuda::DeviceMemory>::make({.rows = rows,
                                                     .tokens = rows * tokens,
                                                     .entries = static_cast<std::int32_t>(pages),
                                                     .copies = 0,
                                                     .recodes = static_cast<std::int32_t>(pages)},
                                                    memory, nullptr);
  Step step = cache.begin_step();
  for (int row = 0; row < rows; ++row)
    if (!step.extend(*step.create(), tokens)) return state.SkipWithError("out of pages");
  const auto batch = *uploads.upload(step.commit(), nullptr);
  const auto count = static_cast<std::size_t>(batch.tokens()) * kv_heads * dims;
  const auto keys = copy_of(std::vector<fp16>(count, fp16(0.25f))),
             values = copy_of(std::vector<fp16>(count, fp16(-1.5f)));
  const AppendArgs args{{keys.get(), kv_heads * dims, dims}, {values.get(), kv_heads * dims, dims}, {}};
  // Tokens of an unfinished page stay exact where quantizers need several at once.
  const bool sealed = Quant::seal_tokens == 1 || tokens % page_tokens == 0;
  const double bits = sealed ? bits_per_value<Layout, Quant>(page_tokens) : 16.0;
  const double written = bits / 8.0 * 2.0 * static_cast<double>(count);
  measure(state, 4.0 * static_cast<double>(count) + written, [&](std::int64_t i) {
    return cuda::append(cache.view(LayerId{static_cast<std::int32_t>(i % layers)}), batch, args,
                        {.tokens = batch.tokens()}, nullptr)
        .has_value();
  });
}

/// state.range(0) pages of 64 KiB, in 32 layers, are copied in an order of no use to anybody.
void copy(benchmark::State& state) {
  constexpr std::int64_t slice = 64 << 10, layers = 32;
  const auto pages = static_cast<std::int32_t>(state.range(0));
  const auto pool = allocate<std::byte>(static_cast<std::size_t>(2 * pages * slice * layers));
  StoreView store;
  store.layers = layers;
  store.formats[0] = {pool.get(), 2 * pages * slice, slice, slice, 2 * pages};
  std::vector<std::int32_t> order(static_cast<std::size_t>(2 * pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  std::vector<PageCopy> copies;
  for (std::int32_t i = 0; i < pages; ++i)
    copies.push_back(
        {0, PageId{order[static_cast<std::size_t>(i)]}, PageId{order[static_cast<std::size_t>(pages + i)]}});
  const auto list = copy_of(copies);
  measure(state, 2.0 * static_cast<double>(pages * slice * layers),
          [&](std::int64_t) { return cuda::copy_pages(store, list.get(), pages, nullptr).has_value(); });
}

template <class Quant>
void add(const char* name) {
  benchmark::RegisterBenchmark((std::string("append/") + name).c_str(), append<Quant>)
      ->ArgNames({"rows", "tokens"})
      ->Args({256, 1})
      ->Args({1, 8192})
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

}  // namespace

int main(int argc, char** argv) {
  return run_benchmarks(argc, argv, [] {
    add<Identity<fp16>>("fp16");
    add<Int8>("int8");
    add<Int4<0>>("int4");
    add<KeyValue<Int4Channels<32>, Int4<32>>>("kivi4");
    add<Rotated<Compact4Channels<32>>>("compact4+rotated");
    add<Nvfp4>("nvfp4");
    benchmark::RegisterBenchmark("copy_pages", copy)
        ->Arg(4)
        ->Arg(64)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  });
}
