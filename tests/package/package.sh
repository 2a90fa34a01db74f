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

refused() { # refused WORDS CMAKE_ARGUMENT...: configuring the consumer fails and says so, on one line
  words=$1
  shift
  if cmake -S "$here/consumer" -B "$work/refused" --fresh -G Ninja "$@" >"$work/log" 2>&1; then
    echo "FAILED: configured with $*"
    exit 1
  fi
  # CMake breaks the lines.
  tr -s '\n ' '  ' <"$work/log" | grep -q "$words" || { cat "$work/log"; echo "FAILED: not said: $words"; exit 1; }
  echo "ok: $words"
}

# Headers in a folder of their own, as distributions like them. A package made without CUDA serves CUDA users,
# one made without Highway serves those who have it.
quiet "configure the package" cmake -S "$source" -B "$work/package" -G Ninja -DKVFOLIA_BUILD_TESTS=OFF \
  -DKVFOLIA_BUILD_BENCH=OFF -DKVFOLIA_BUILD_EXAMPLES=OFF -DKVFOLIA_CUDA=OFF -DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON \
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

# Without Highway: all but the kernels.
without="-DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON"
consume find_package -DCMAKE_PREFIX_PATH="$work/moved" -DKVFOLIA_ALONE=ON $without
consume add_subdirectory -DKVFOLIA_SOURCE="$source" -DKVFOLIA_ALONE=ON $without
refused "kvfolia's component cpu needs Highway 1.0.3 or later" -DKVFOLIA_BY=find_package \
  -DCMAKE_PREFIX_PATH="$work/moved" $without
refused "no kvfolia::cpu; it needs Highway 1.0.3 or later" -DKVFOLIA_BY=add_subdirectory \
  -DKVFOLIA_SOURCE="$source" $without
quiet "configure with cpu wished for only" cmake -S "$here/consumer" -B "$work/refused" --fresh -G Ninja \
  -DKVFOLIA_BY="optional component" -DKVFOLIA_ALONE=ON -DCMAKE_PREFIX_PATH="$work/moved" $without

refused "kvfolia has no component gpu: there are cpu and cuda" -DKVFOLIA_BY="unknown component" \
  -DCMAKE_PREFIX_PATH="$work/moved"

if command -v nvcc >/dev/null 2>&1; then
  consume cuda -DCMAKE_PREFIX_PATH="$work/moved"
fi

# The examples are programs that a user would start from; without optimisation, for they are only to start.
quiet "configure the examples alone" cmake -S "$source/examples" -B "$work/examples" -G Ninja \
  -DCMAKE_PREFIX_PATH="$work/moved" -DCMAKE_BUILD_TYPE=Debug
quiet "build the examples alone" cmake --build "$work/examples"
quiet "run an example" "$work/examples/generate" --help
