#!/bin/sh
# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# headers.sh INCLUDE_DIR COMPILER: every header compiles alone, without exceptions and without warnings.
set -u
include=$1
compiler=$2
case $(basename "$compiler") in
  nvcc) # What the device's compiler says of kernels, and of what they are made with.
    headers=$(cd "$include" && find kvfolia/cuda* kvfolia/layout kvfolia/quant -name '*.hpp' -o -name '*.cuh')
    flags="-x cu -std=c++20 -Werror all-warnings -arch=sm_80 -ptx -o /dev/null" ;;
  *)
    headers=$(cd "$include" && find kvfolia -name '*.hpp')
    flags="-x c++ -std=c++20 -fsyntax-only -fno-exceptions -Wall -Wextra -Wconversion -Wshadow -Werror" ;;
esac
source=$(mktemp)
trap 'rm -f "$source"' EXIT
count=0
failed=0
for header in $headers; do
  # Twice: a guard must be there.
  printf '#include "%s"\n#include "%s"\n' "$header" "$header" >"$source"
  # shellcheck disable=SC2086
  if ! "$compiler" $flags -I "$include" "$source"; then
    echo "$header does not compile alone with $compiler"
    failed=1
  fi
  count=$((count + 1))
done
echo "$count headers, $compiler"
[ "$count" -gt 0 ] && [ "$failed" -eq 0 ]
