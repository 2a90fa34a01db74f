#!/bin/sh
# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# package.sh SOURCE_DIR WORK_DIR: installs the library and uses it from other projects, in every way
# that the README promises.
set -eu
source=$1
work=$2
here=$source/tests/package
rm -rf "$work"
mkdir -p "$work"

quiet() { # quiet NAME COMMAND...: output only on failure
  name=$1
  shift
  "$@" >"$work/log" 2>&1 || { cat "$work/log"; echo "FAILED: $name"; exit 1; }
  echo "ok: $name"
}

consume() { # consume WAY [CMAKE_ARGUMENT...]
  way=$1
  shift
  rm -rf "$work/consumer"
  quiet "configure by $way $*" cmake -S "$here/consumer" -B "$work/consumer" -G Ninja -DKVFOLIA_BY="$way" "$@"
  quiet "build by $way" cmake --build "$work/consumer"
  quiet "run by $way" "$work/consumer/consumer"
}

# Headers in a folder of their own, as distributions like them. A package made without CUDA serves CUDA users.
quiet "configure the package" cmake -S "$source" -B "$work/package" -G Ninja -DKVFOLIA_BUILD_TESTS=OFF \
  -DKVFOLIA_BUILD_BENCH=OFF -DKVFOLIA_BUILD_EXAMPLES=OFF -DKVFOLIA_CUDA=OFF \
  -DCMAKE_INSTALL_INCLUDEDIR=include/kvfolia-0
quiet "install the package" cmake --install "$work/package" --prefix "$work/prefix"
# Installed headers only: the package must work when it is moved, and without the source.
mv "$work/prefix" "$work/moved"

consume find_package -DCMAKE_PREFIX_PATH="$work/moved"
if command -v clang++ >/dev/null 2>&1; then
  consume find_package -DCMAKE_PREFIX_PATH="$work/moved" -DCMAKE_CXX_COMPILER=clang++
fi
consume add_subdirectory -DKVFOLIA_SOURCE="$source"
consume FetchContent -DKVFOLIA_SOURCE="$source"

if cmake -S "$here/consumer" -B "$work/unknown" -G Ninja -DKVFOLIA_BY="unknown component" \
  -DCMAKE_PREFIX_PATH="$work/moved" >"$work/log" 2>&1; then
  echo "FAILED: an unknown component was found"
  exit 1
fi
grep -q "kvfolia has no component gpu: there are cpu and cuda" "$work/log" || { cat "$work/log"; exit 1; }
echo "ok: an unknown component is refused by name"

if command -v nvcc >/dev/null 2>&1; then
  consume cuda -DCMAKE_PREFIX_PATH="$work/moved"
fi

# The examples are programs that a user would start from.
quiet "configure the examples alone" cmake -S "$source/examples" -B "$work/examples" -G Ninja \
  -DCMAKE_PREFIX_PATH="$work/moved" -DCMAKE_BUILD_TYPE=Release
quiet "build the examples alone" cmake --build "$work/examples"
quiet "run an example" "$work/examples/generate" --help
