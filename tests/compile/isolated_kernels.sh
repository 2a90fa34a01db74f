#!/bin/sh
# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# isolated_kernels.sh INCLUDE_DIR COMPILER: a unit with kernels for this machine's instruction set shares no
# function with units for older ones. Every weak function of the library's and Highway's must be in the target's
# namespace.
set -eu
include=$1
compiler=$2
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target='::cpu::[a-z0-9_]*_N_[A-Z0-9_]*::'
for level in -O1 -O3; do
  "$compiler" -std=c++20 $level -march=native -I "$include" -c "$here/isolated_kernels.cpp" -o "$work/unit.o"
  nm -C --defined-only "$work/unit.o" >"$work/symbols"
  grep -q " W .*kvfolia::.*$target" "$work/symbols" || { echo "no kernel was compiled"; exit 1; }
  if grep -E ' W .*(kvfolia|hwy)::' "$work/symbols" | grep -v "$target"; then
    echo "$compiler $level: these functions could be given to units for older processors"
    exit 1
  fi
done
echo "no function outside the target's namespace, $compiler"
