// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// How fast one core encodes a page's tile, and decodes it, with the quantizers' own scalar code. GB/s are
// those of the values as fp16, in and out of a tile that stays in the cache: what bounds it is
// arithmetic, so the roofline is `fp16`, which only rounds and widens.

#ifndef NDEBUG
#error "benchmarks are built with optimisation and without assertions: use the release preset"
#endif

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvfolia/kvfolia.hpp"

namespace {

using namespace kvfolia;

constexpr int dims = 128;
constexpr int page_tokens = 64;

/// A page's values as an engine brings them, and a tile for them.
template <class Quant>
struct Page {
  std::vector<fp16> values;
  std::vector<std::byte> codes, params;
  Tile<SlotMajor, std::byte> tile;

  Page()
      : values(dims * page_tokens),
        codes(static_cast<std::size_t>(code_bytes<Quant>(dims) * page_tokens)),
        params(static_cast<std::size_t>(Quant::param_bytes(dims, page_tokens)) + 1),
        tile{codes.data(), params.data(),           dims,
             page_tokens,  code_bytes<Quant>(dims), Quant::param_bytes(dims, page_tokens) / page_tokens} {
    std::uint32_t state = 1;
    for (fp16& value : values) {
      state = state * 1664525u + 1013904223u;
      value = fp16(static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-30f);
    }
  }
  void encode(const Quant& quant) {
    float rows[Quant::seal_tokens * dims];
    for (int slot = 0; slot < page_tokens; slot += Quant::seal_tokens) {
      for (int t = 0; t < Quant::seal_tokens; ++t) {
        float* row = rows + t * dims;
        for (int d = 0; d < dims; ++d)
          row[d] = static_cast<float>(values[static_cast<std::size_t>((slot + t) * dims + d)]);
        to_stored(quant, row, dims);
      }
      quant.encode(tile, slot, Quant::seal_tokens, Rows{rows, dims});
    }
  }
};

void report(benchmark::State& state) {
  const double bytes = static_cast<double>(state.iterations()) * page_tokens * dims * sizeof(fp16);
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes));
  state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsRate);
}

template <class Quant>
void encode(benchmark::State& state) {
  Page<Quant> page;
  for (auto _ : state) {
    page.encode(Quant{});
    benchmark::ClobberMemory();
  }
  report(state);
}

template <class Quant>
void decode(benchmark::State& state) {
  Page<Quant> page;
  page.encode(Quant{});
  for (auto _ : state)
    for (int slot = 0; slot < page_tokens; ++slot) {
      float row[dims];
      Quant{}.decode(page.tile, slot, row);
      from_stored(Quant{}, row, dims);
      benchmark::DoNotOptimize(row);
    }
  report(state);
}

template <class Quant>
void add(const char* name) {
  const std::string rest = std::string("/") + name + "/dims:128";
  benchmark::RegisterBenchmark(("encode" + rest).c_str(), encode<Quant>);
  benchmark::RegisterBenchmark(("decode" + rest).c_str(), decode<Quant>);
}

const bool added = [] {
  add<Identity<fp16>>("fp16");
  add<Int8>("int8");
  add<Int8Groups<32>>("int8-g32");
  add<Centered<Int8>>("int8+centered");
  add<Rotated<Int8>>("int8+rotated");
  add<Int4<32>>("int4-g32");
  add<Rotated<Centered<Int4<32>>>>("int4-g32+centered+rotated");
  add<Int4Channels<32>>("kivi4");
  add<Rotated<Compact4Channels<32>>>("compact4+rotated");
  add<Fp8<>>("fp8");
  add<Fp8<fp8_e5m2>>("fp8-e5m2");
  add<Fp8Tensor<>>("fp8-tensor");
  add<Fp8Blocks<>>("fp8-blocks");
  add<Nvfp4>("nvfp4");
  add<Centered<Nvfp4>>("nvfp4+centered");
  add<Mxfp4>("mxfp4");
  add<Q8_0>("q8_0");
  add<Q4_0>("q4_0");
  return true;
}();

}  // namespace
