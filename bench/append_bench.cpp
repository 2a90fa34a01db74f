// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// How fast one core writes new tokens into pages. Names: append/quantizer/order/tokens:T is a prompt's T
// tokens, which fill slots one after the other; .../rows:R one token of each of R sequences. GB/s are those
// of the fp16 that comes in; keys and values lie in memory, not in a cache. A prompt's calls write other
// pages each; those of single tokens fill 64 pages slot by slot, then the next. The roofline is `copy`:
// memcpy of the same rows into the same pages.

#ifndef NDEBUG
#error "benchmarks are built with optimisation and without assertions: use the release preset"
#endif

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kvfolia/cpu.hpp"
#include "kvfolia/kvfolia.hpp"

namespace {

using namespace kvfolia;

constexpr int heads = 8, dims = 128, page_tokens = 64;
constexpr std::int64_t all_tokens = 1 << 15;  // 64 MiB of keys, 64 of values
constexpr std::int64_t token_values = heads * dims;

/// Keys or values as an engine brings them, [token][head][dim].
const std::vector<fp16>& source(bool keys) {
  static const auto make = [](std::uint32_t state) {
    std::vector<fp16> values(static_cast<std::size_t>(all_tokens * token_values));
    for (fp16& value : values) {
      state = state * 1664525u + 1013904223u;
      value = fp16(static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-30f);
    }
    return values;
  };
  static const std::vector<fp16> k = make(1), v = make(2);
  return keys ? k : v;
}

/// Slots of one call: a prompt's, page after page; or one of each of `count` sequences' pages.
std::vector<std::int64_t> slots_of(std::int64_t first, std::int64_t count, bool rows) {
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t sequence_page = i * (all_tokens / page_tokens / count);
    slots.push_back(rows ? sequence_page * page_tokens + first / count : first + i);
  }
  return slots;
}

void report(benchmark::State& state, std::int64_t tokens) {
  const double bytes = static_cast<double>(state.iterations() * tokens * token_values) * 2 * sizeof(fp16);
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes));
  state.counters["bytes"] = benchmark::Counter(bytes / static_cast<double>(state.iterations()));
  state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsRate);
}

/// Calls write(first token, slots) for one part of all tokens after the other.
template <class F>
void each_call(benchmark::State& state, bool rows, F&& write) {
  const std::int64_t tokens = state.range(0), calls = all_tokens / tokens;
  std::vector<std::vector<std::int64_t>> slots;
  for (std::int64_t call = 0; call < calls; ++call) slots.push_back(slots_of(call * tokens, tokens, rows));
  std::int64_t call = 0;
  for (auto _ : state) {
    write(call * tokens, slots[static_cast<std::size_t>(call)].data());
    benchmark::ClobberMemory();
    call = call + 1 == calls ? 0 : call + 1;
  }
  report(state, tokens);
}

template <class Quant, class Order>
auto make_cache() {
  PagedCache<Gqa<dims, page_tokens, Order, Order>, Quant> cache(
      {.shape = {1, heads, dynamic}, .pages = all_tokens / page_tokens});
  std::memset(cache.store().data(0, 0), 1,
              static_cast<std::size_t>(cache.store().page_bytes(0) * cache.pool(0).pages()));
  return cache;
}

template <class Quant, class Order>
void append(benchmark::State& state, bool rows) {
  auto cache = make_cache<Quant, Order>();
  const auto view = cache.view(LayerId{0});
  const std::int32_t indptr[2] = {0, static_cast<std::int32_t>(state.range(0))};
  each_call(state, rows, [&](std::int64_t first, const std::int64_t* slots) {
    BatchView batch;
    batch.rows = 1;
    batch.query_indptr = indptr;
    batch.slots = slots;
    AppendArgs args;
    args.keys = {source(true).data() + first * token_values, token_values, dims};
    args.values = {source(false).data() + first * token_values, token_values, dims};
    if (!cpu::append(view, batch, args, cpu::serial)) std::abort();
  });
}

/// What memory allows: the rows as they are, into pages of fp16.
void copy(benchmark::State& state, bool rows) {
  auto cache = make_cache<Identity<fp16>, SlotMajor>();
  const auto view = cache.view(LayerId{0});
  each_call(state, rows, [&](std::int64_t first, const std::int64_t* slots) {
    for (std::int64_t i = 0; i < state.range(0); ++i) {
      const PhysSlot where{slots[i]};
      for (int head = 0; head < heads; ++head) {
        const auto entry = where.entry(page_tokens);
        const std::int64_t from = (first + i) * token_values + head * dims;
        const int slot = where.slot(page_tokens);
        std::memcpy(&view.key_tile(entry, head).template code<fp16>(slot, 0), source(true).data() + from,
                    dims * sizeof(fp16));
        std::memcpy(&view.value_tile(entry, head).template code<fp16>(slot, 0), source(false).data() + from,
                    dims * sizeof(fp16));
      }
    }
  });
}

template <class F>
void add(const std::string& name, F run) {
  for (const bool rows : {false, true})
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { run(state, rows); })
        ->ArgName(rows ? "rows" : "tokens")
        ->Arg(rows ? 64 : 512);
}
template <class Quant, class Order>
void add(const char* quant, const char* order) {
  add(std::string("append/") + quant + "/" + order,
      [](benchmark::State& state, bool rows) { append<Quant, Order>(state, rows); });
}

const bool added = [] {
  add("copy", copy);
  add<Identity<fp16>, SlotMajor>("fp16", "slot");
  add<Identity<fp16>, DimMajor<2>>("fp16", "dim2");
  add<Identity<fp16>, SlotPairs<2>>("fp16", "pairs2");
  add<Identity<bf16>, SlotMajor>("bf16", "slot");
  add<Int8, SlotMajor>("int8", "slot");
  add<Int8, DimMajor<4>>("int8", "dim4");
  add<Int8, SlotPairs<4>>("int8", "pairs4");
  add<Int8Groups<32>, SlotMajor>("int8-g32", "slot");
  add<Rotated<Int8>, SlotMajor>("int8+rotated", "slot");
  add<Int4<32>, SlotMajor>("int4-g32", "slot");
  add<Int4<32>, DimMajor<4>>("int4-g32", "dim4");
  add<Int4Symmetric<32>, SlotMajor>("int4-symmetric-g32", "slot");
  add<Fp8<>, SlotMajor>("fp8", "slot");
  return true;
}();

}  // namespace
