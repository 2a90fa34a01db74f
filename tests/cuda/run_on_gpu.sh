#!/bin/sh
# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# All that needs a GPU, on a machine that has one: run_on_gpu.sh REPORT_FOLDER. Builds for the machine's own GPU, runs
# the tests, the example and short benchmarks, and leaves what they said in the folder. Some minutes on 16 cores.
set -eu
cd "$(dirname "$0")/../.."
report=$(mkdir -p "$1" && cd "$1" && pwd)
build=build/gpu
jobs=$(nproc)

nvidia-smi >"$report/machine.txt"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVFOLIA_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native \
  >"$report/configure.txt" 2>&1
cmake --build "$build" -j "$jobs" --target gpu_tests cuda_step append_cuda_bench attend_cuda_bench \
  >"$report/build.txt" 2>&1
failed=0
run() { # run NAME COMMAND...: its output goes into the report; what fails is said at the end
  name=$1
  shift
  if "$@" >"$report/$name.txt" 2>&1; then echo "$name: passed"; else
    echo "$name: FAILED"
    failed=1
  fi
}
run gpu_tests "$build/tests/gpu_tests" --durations yes
run cuda_step "$build/examples/cuda_step" --json
for room in append attend; do
  run "${room}_cuda_bench" "$build/bench/${room}_cuda_bench" --benchmark_min_time=0.2 \
    "--benchmark_out=$report/${room}_cuda_bench.json" --benchmark_out_format=json
done
exit "$failed"
