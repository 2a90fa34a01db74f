// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What bookkeeping costs, and that it does not grow with the pool: the same sequences in a pool of
// 1,000 pages and in one of 1,000,000. Names: operation/tokens:T/pages:N, T tokens a sequence.

#ifndef NDEBUG
#error "benchmarks are built with optimisation and without assertions: use the release preset"
#endif

#include <benchmark/benchmark.h>

#include <vector>

#include "kvfolia/kvfolia.hpp"

namespace {

using namespace kvfolia;

// One layer of tiny pages: only bookkeeping is measured, never the bytes of keys.
using Cache = PagedCache<Gqa<8, 16>, Identity<fp16>>;

SeqId create(Cache& cache, std::int32_t tokens) {
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  if (!step.extend(id, tokens)) std::abort();
  step.commit();
  return id;
}

template <class F>
void in_step(Cache& cache, F&& f) {
  Step step = cache.begin_step();
  if (!f(step)) std::abort();
  benchmark::DoNotOptimize(step.commit());
}

/// A cache of which half of all pages are held by others, its free list no longer ascending.
struct Fragmented {
  std::int32_t tokens;
  Cache cache;

  explicit Fragmented(const benchmark::State& state)
      : tokens(static_cast<std::int32_t>(state.range(0))),
        cache({.shape = {1, 1, dynamic}, .pages = state.range(1)}) {
    std::vector<SeqId> others;
    const std::int64_t count = state.range(1) / 4 / ((tokens + 15) / 16);
    for (std::int64_t i = 0; i < 2 * count; ++i) others.push_back(create(cache, tokens));
    for (std::size_t i = 0; i < others.size(); i += 2)
      in_step(cache, [&](Step& step) { return step.release(others[i]); });
  }
};

/// Takes and gives back the pages of a sequence: one create, extend, release.
void allocate_free(benchmark::State& state) {
  auto [tokens, cache] = Fragmented(state);
  for (auto _ : state) {
    SeqId id;
    in_step(cache, [&, n = tokens](Step& step) { return id = *step.create(), step.extend(id, n); });
    in_step(cache, [&](Step& step) { return step.release(id); });
  }
}

/// One more token, as a decoder does it; a page every 16.
void extend_one(benchmark::State& state) {
  auto [tokens, cache] = Fragmented(state);
  const SeqId id = create(cache, tokens);
  std::int32_t length = tokens;
  for (auto _ : state) {
    in_step(cache, [&](Step& step) { return step.extend(id, 1); });
    if (++length == tokens + 64) {
      state.PauseTiming();
      length = tokens;
      in_step(cache, [&](Step& step) { return step.truncate(id, length); });
      state.ResumeTiming();
    }
  }
}

void fork_release(benchmark::State& state) {
  auto [tokens, cache] = Fragmented(state);
  const SeqId parent = create(cache, tokens);
  for (auto _ : state) {
    SeqId child;
    in_step(cache, [&](Step& step) {
      const auto id = step.fork(parent);
      if (id) child = *id;
      return id.has_value();
    });
    in_step(cache, [&](Step& step) { return step.release(child); });
  }
}

/// Half of the sequence is forgotten and made room for again.
void truncate_extend(benchmark::State& state) {
  auto [tokens, cache] = Fragmented(state);
  const SeqId id = create(cache, tokens);
  const std::int32_t half = tokens / 2, rest = tokens - half;
  for (auto _ : state) {
    in_step(cache, [&](Step& step) { return step.truncate(id, half); });
    in_step(cache, [&](Step& step) { return step.extend(id, rest); });
  }
}

void sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"tokens", "pages"});
  for (const std::int64_t tokens : {256, 2048})
    for (const std::int64_t pages : {1'000, 1'000'000}) b->Args({tokens, pages});
}

BENCHMARK(allocate_free)->Apply(sizes);
BENCHMARK(extend_one)->Apply(sizes);
BENCHMARK(fork_release)->Apply(sizes);
BENCHMARK(truncate_extend)->Apply(sizes);

}  // namespace
