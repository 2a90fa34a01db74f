// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// How fast attention reads a cache that lies in memory: copies of it, 1 GiB or more together, are taken in
// turn, so that no key is in a processor's cache when it is read. GB/s are those of all keys, values and
// parameters. `roofline` is the fraction of what the machine did beside it with as many threads: for one
// query, of the bytes that it read (`read`); for many, of the multiply-adds of floats that it carried out
// (`multiply_add`; products of shorter numbers may go beyond it). `error` is the output's, relative L2
// against double precision over the same pages.
// Names: attend/quantizer/keys/heads:QxKV/dims/batch/queries/threads/pages/placing/order of the keys (+ of
// the values). Where ggml is found, ggml/type/... are its flash attention over the same numbers,
// [head][key][dim]. For figures to keep, take medians of cases in turns, chosen with --benchmark_filter:
//   --benchmark_enable_random_interleaving=true --benchmark_repetitions=5
//   --benchmark_report_aggregates_only=true
// --cold_mib=N changes how many MiB the copies have together.

#ifndef NDEBUG
#error "benchmarks are built with optimisation and without assertions: use the release preset"
#endif

#include "attend_measure.hpp"
#include "attend_parts.hpp"

int main(int argc, char** argv) {
  return kvfolia_bench::bench_main(argc, argv, [](kvfolia_bench::Bench& bench) {
    kvfolia_bench::add_floats(bench);
    kvfolia_bench::add_integers(bench);
#ifdef KVF_BENCH_GGML
    kvfolia_bench::add_ggml(bench);
#endif
  });
}
