// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Timing attention over caches that no processor's cache holds, beside what the machine can do at that
// moment. Decoding is held against reading memory, prefill against multiply-adds of floats.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "attend_case.hpp"
#include "machine.hpp"

namespace kvfolia_bench {

/// A case that is set up: equal copies of a cache, and one attention over each.
class Attention {
 public:
  virtual ~Attention() = default;
  virtual std::int64_t copies() const = 0;
  virtual bool run(std::int64_t copy) = 0;
  /// Of all keys, values and parameters of one copy.
  virtual std::int64_t bytes() const = 0;
  /// Of the last run's output, relative L2 over some queries and heads against double precision.
  virtual double error() = 0;
};

/// How many copies it takes until none of them is in a cache when its turn comes.
inline std::int64_t cold_copies(std::int64_t bytes, std::int64_t cold_bytes) {
  return std::max<std::int64_t>(1, (cold_bytes + bytes - 1) / bytes);
}

/// Makes a case's Attention, of at least so many bytes in all, in memory that cases share.
using MakeAttention = std::function<std::unique_ptr<Attention>(HugeMemory& memory, std::int64_t cold_bytes)>;

/// What the benchmarks of a program share.
class Bench {
 public:
  explicit Bench(std::int64_t cold_mib) : cold_bytes_(cold_mib << 20) {}

  /// Adds a benchmark. An output further off than `allowed` is an error: then a time says nothing.
  void add(const std::string& name, const AttendCase& c, int dims, double allowed, MakeAttention make) {
    benchmark::RegisterBenchmark(name.c_str(), [this, name, c, dims, allowed,
                                                make = std::move(make)](benchmark::State& state) {
      if (name != current_) {
        attention_.reset();
        attention_ = make(memory_, cold_bytes_);
        current_ = name;
        if (!attention_ || !attention_->run(0)) return fail(state, "attention failed");
        error_ = attention_->error();
      }
      if (!attention_) return fail(state, "attention failed");
      if (!(error_ <= allowed)) return fail(state, "the output is wrong");
      measure(state, c, dims);
    })->UseManualTime();
  }

  /// The machine itself, by the same clock.
  void add_machine(int threads) {
    const std::string suffix = "/threads:" + std::to_string(threads);
    benchmark::RegisterBenchmark(("read" + suffix).c_str(), [this, threads](benchmark::State& state) {
      Roofline machine(probe(), threads);
      for (auto _ : state) state.SetIterationTime(machine.read());
      state.counters["bytes"] = static_cast<double>(ReadProbe::slice_bytes);
      state.counters["GB/s"] = machine.per_second() * 1e-9;
    })->UseManualTime();
    benchmark::RegisterBenchmark(("multiply_add" + suffix).c_str(), [this, threads](benchmark::State& state) {
      Roofline machine(probe(), threads);
      for (auto _ : state) state.SetIterationTime(machine.multiply());
      state.counters["GFLOP/s"] = machine.per_second() * 1e-9;
    })->UseManualTime();
  }

 private:
  void fail(benchmark::State& state, const char* message) {
    attention_.reset();
    state.SkipWithError(message);
  }

  ReadProbe& probe() {
    if (!probe_) probe_ = std::make_unique<ReadProbe>(cold_bytes_);
    return *probe_;
  }

  void measure(benchmark::State& state, const AttendCase& c, int dims) {
    constexpr double probe_every = 0.05;
    const bool prefill = c.queries > 1;
    Roofline machine(probe(), c.threads);
    const auto look = [&] { prefill ? machine.multiply() : machine.read(); };
    double total = 0.0, next_probe = 0.0;
    for (auto _ : state) {
      if (total >= next_probe) {
        look();
        next_probe = total + probe_every;
      }
      const double begin = seconds();
      const bool ok = attention_->run(copy_++ % attention_->copies());
      const double took = seconds() - begin;
      if (!ok) return fail(state, "attention failed");
      state.SetIterationTime(took);
      total += took;
    }
    look();
    const auto runs = static_cast<double>(state.iterations());
    const auto bytes = static_cast<double>(attention_->bytes());
    const double flops = c.flops(dims);
    state.counters["bytes"] = bytes;
    state.counters["GB/s"] = runs * bytes / total * 1e-9;
    if (prefill) state.counters["GFLOP/s"] = runs * flops / total * 1e-9;
    state.counters["roofline"] = runs * (prefill ? flops : bytes) / total / machine.per_second();
    state.counters["error"] = error_;
  }

  std::int64_t cold_bytes_;
  HugeMemory memory_;
  std::unique_ptr<ReadProbe> probe_;
  std::unique_ptr<Attention> attention_;  ///< of the case that was measured last
  std::string current_;
  double error_ = 0.0;
  std::int64_t copy_ = 0;
};

/// Takes `--cold_mib=N` out of the arguments; 1024 when it is not there.
inline std::int64_t take_cold_mib(int& argc, char** argv) {
  std::int64_t mib = 1024;
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    constexpr char option[] = "--cold_mib=";
    if (std::strncmp(argv[i], option, sizeof option - 1) == 0)
      mib = std::max<std::int64_t>(1, std::strtoll(argv[i] + sizeof option - 1, nullptr, 10));
    else
      argv[kept++] = argv[i];
  }
  argc = kept;
  return mib;
}

/// A program's main: `add` registers its benchmarks.
template <class Add>
int bench_main(int argc, char** argv, Add&& add) {
  benchmark::Initialize(&argc, argv);
  Bench bench(take_cold_mib(argc, argv));
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  for (const int threads : {1, 2}) bench.add_machine(threads);
  add(bench);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

}  // namespace kvfolia_bench
