#!/bin/sh
# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# neon.sh INCLUDE_DIR COMPILER HIGHWAY_INCLUDE_DIR CATCH_INCLUDE_DIR SOURCE...: the tests of the CPU kernels compile
# for another architecture. They are not run.
set -eu
include=$1
compiler=$2
highway=$3
catch=$4
shift 4
tests=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The host's folder has headers of the host's C library too: only these two may come from it.
ln -s "$highway/hwy" "$work/hwy"
ln -s "$catch/catch2" "$work/catch2"
for source in "$@"; do
  # Highway 1.0 takes NEON to include AES. GCC notes that it passes empty structs as it did not before version 10.
  "$compiler" -std=c++20 -O0 -march=armv8-a+crypto -Wall -Wextra -Wconversion -Wshadow -Werror -Wno-psabi -I "$include" -I "$tests" \
    -isystem "$work" -c "$tests/$source" -o "$work/unit.o"
  echo "ok: $source"
done
