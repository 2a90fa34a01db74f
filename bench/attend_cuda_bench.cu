// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Decode attention on a GPU: time, the pages' bytes a second, and the part that is of what a copy within the
// device's memory reads and writes a second in the same run. Every launch reads pages that no cache holds.

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "attend_cuda_case.hpp"
#include "cuda_device.cuh"
#include "kvfolia/cuda.cuh"
#include "kvfolia/layout/gqa.hpp"
#include "kvfolia/quant/key_value.hpp"

#ifndef NDEBUG
#error "benchmarks are built with NDEBUG"
#endif

using namespace kvfolia;

namespace {

using Layout = Gqa<CudaCase::dims, dynamic>;
using Kivi = KeyValue<Int4Channels<32>, Int4<0>>;

/// Pages for several tables, each of all of a case's rows, in an order of no use to anybody.
template <class Quant>
class Pages {
 public:
  Pages(int rows, int length, int group, int page_tokens) {
    const int kv_heads = 8;
    const PageFormat format = page_format<Layout, Quant>(kv_heads, page_tokens);
    const int row_pages = (length + page_tokens - 1) / page_tokens;
    table_pages_ = std::int64_t{rows} * row_pages;
    bytes_ = table_pages_ * format.slice_bytes();
    constexpr std::int64_t beyond_caches = std::int64_t{512} << 20;
    tables_ = static_cast<int>(std::max<std::int64_t>(2, (beyond_caches + bytes_ - 1) / bytes_));
    const std::int64_t pages = tables_ * table_pages_;
    pool_ = allocate<std::byte>(static_cast<std::size_t>(pages * format.slice_bytes()));
    // Numbers of a magnitude in every type that codes and scales have.
    check(cudaMemset(pool_.get(), 0x2b, static_cast<std::size_t>(pages * format.slice_bytes())));
    std::vector<std::int32_t> table(static_cast<std::size_t>(pages)), last(static_cast<std::size_t>(rows));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    table_ = copy_of(table);
    for (int row = 0; row <= rows; ++row) c.indptr.push_back(row * row_pages);
    std::fill(last.begin(), last.end(), length - (row_pages - 1) * page_tokens);
    indptr_ = copy_of(c.indptr);
    last_ = copy_of(last);
    const std::size_t outputs = static_cast<std::size_t>(rows) * kv_heads * group * CudaCase::dims;
    queries_ = copy_of(std::vector<fp16>(outputs, fp16(0.25f)));
    out_ = allocate<fp16>(outputs);

    c.rows = rows;
    c.length = length;
    c.query_heads = kv_heads * group;
    c.kv_heads = kv_heads;
    c.page_tokens = page_tokens;
    c.pages = pool_.get();
    c.page_bytes = format.slice_bytes();
    c.value_offset = format.value_offset();
    c.device_indptr = indptr_.get();
    c.last_page_tokens = last_.get();
    c.queries = queries_.get();
    c.out = out_.get();

    const auto plane = [&](std::int64_t offset, const PlaneFormat& p) {
      return PlaneView{pool_.get() + offset, format.slice_bytes(), p.tile_bytes, p.slot_stride};
    };
    view.kv_heads = kv_heads;
    view.page_tokens = page_tokens;
    view.formats[0] = {plane(format.key_offset(), format.keys), plane(format.value_offset(), format.values),
                       plane(format.key_param_offset(), format.key_params),
                       plane(format.value_param_offset(), format.value_params),
                       static_cast<std::int32_t>(pages)};
  }

  double bytes() const { return static_cast<double>(bytes_); }
  const std::int32_t* table(std::int64_t i) const { return table_.get() + i % tables_ * table_pages_; }

  CudaCase c;
  PagedView<Layout, Quant> view{};

 private:
  std::int64_t table_pages_ = 0;
  std::int64_t bytes_ = 0;
  int tables_ = 0;
  DeviceArray<std::byte> pool_;
  DeviceArray<std::int32_t> table_, indptr_, last_;
  DeviceArray<fp16> queries_, out_;
};

template <class Quant>
CudaDecode our_decode(const Pages<Quant>& pages) {
  const CudaCase& c = pages.c;
  const auto plan = cuda::plan_attend(
      pages.view, {.query_heads = c.query_heads, .rows = c.rows, .queries = c.rows, .row_slots = c.length});
  if (!plan) return [](const std::int32_t*, cudaStream_t) { return cudaErrorNotSupported; };
  std::shared_ptr<std::byte[]> workspace = allocate<std::byte>(plan->workspace_bytes());
  return [=, &pages](const std::int32_t* table, cudaStream_t stream) {
    BatchView batch;
    batch.rows = c.rows;
    batch.table = {table, c.device_indptr};
    batch.last_page_tokens = c.last_page_tokens;
    AttendArgs args;
    args.queries = {static_cast<const fp16*>(c.queries), c.query_heads * CudaCase::dims, CudaCase::dims};
    args.out = {static_cast<fp16*>(c.out), c.query_heads * CudaCase::dims, CudaCase::dims};
    const auto ok =
        cuda::attend(pages.view, batch, args, *plan, {workspace.get(), plan->workspace_bytes()}, stream);
    return ok ? cudaSuccess : cudaErrorUnknown;
  };
}

template <class Quant, class Make>
void run(benchmark::State& state, const Make& make) {
  const int page_tokens = std::max(16, kvfolia::detail::largest_block<Quant>);
  const Pages<Quant> pages(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)),
                           static_cast<int>(state.range(2)), page_tokens);
  const CudaDecode decode = make(pages);
  measure(state, pages.bytes(),
          [&](std::int64_t i) { return decode(pages.table(i), nullptr) == cudaSuccess; });
}

template <class Quant>
void add(const char* pages) {
  const auto bench = [](const std::string& name, auto make) {
    auto* b =
        benchmark::RegisterBenchmark(name.c_str(), [make](benchmark::State& s) { run<Quant>(s, make); });
    b->ArgNames({"rows", "tokens", "group"})->UseManualTime()->Unit(benchmark::kMicrosecond);
    for (const int group : {1, 4, 8})
      b->Args({1, 65536, group})->Args({16, 4096, group})->Args({64, 4096, group});
  };
  bench(std::string("kvfolia/") + pages, [](const Pages<Quant>& p) { return our_decode(p); });
#if defined(KVF_BENCH_FLASHINFER)
  if constexpr (std::is_same_v<Quant, Identity<fp16>>)
    bench(std::string("flashinfer/") + pages, [](const Pages<Quant>& p) { return flashinfer_decode(p.c); });
#endif
}

}  // namespace

int main(int argc, char** argv) {
  return run_benchmarks(argc, argv, [] {
    add<Identity<fp16>>("fp16");
    add<Int8>("int8");
    add<Int4<0>>("int4");
    add<Int4<32>>("int4-g32");
    add<Kivi>("kivi4");
    add<Nvfp4>("nvfp4");
  });
}
