#!/bin/sh
# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# bootstrap.sh SOURCE_DIR WORK_DIR: what cmake/bootstrap.sh says when it cannot go on. Nothing is installed.
set -eu
source=$1
work=$2
rm -rf "$work"
mkdir -p "$work/cmake" "$work/bin"
cp "$source"/cmake/*.sh "$work/cmake"

expect() { # expect STATUS WORDS COMMAND...
  status=$1
  words=$2
  shift 2
  rc=0
  "$@" >"$work/out" 2>&1 || rc=$?
  if [ "$rc" -ne "$status" ] || ! grep -q "$words" "$work/out"; then
    cat "$work/out"
    echo "FAILED: exit status $rc, not $status with '$words': $*"
    exit 1
  fi
  echo "ok: $words"
}

expect 0 "usage: sh cmake/bootstrap.sh COMMAND" sh "$work/cmake/bootstrap.sh" --help
expect 2 "usage: sh cmake/bootstrap.sh COMMAND" sh "$work/cmake/bootstrap.sh"
expect 2 "usage: sh cmake/bootstrap.sh COMMAND" sh "$work/cmake/bootstrap.sh" everything
expect 2 "usage: sh cmake/fetch_model.sh DEST_DIR" sh "$work/cmake/fetch_model.sh"

# A system that it does not know, with nothing but a shell's own tools: all that is missing is named.
printf 'ID=void\nPRETTY_NAME="Void Linux"\n' >"$work/os-release"
for tool in sh dirname mkdir awk sed grep cat printf tail cut tr; do
  ln -s "$(command -v "$tool")" "$work/bin/$tool" 2>/dev/null || :
done
expect 1 "Void Linux is not one that this script can install packages on" \
  env PATH="$work/bin" CXX=no-such-compiler KVF_OS_RELEASE="$work/os-release" sh "$work/cmake/bootstrap.sh" deps
grep -q "cmake" "$work/out" && grep -q "ninja" "$work/out" && grep -q "no-such-compiler" "$work/out" &&
  grep -q "Highway" "$work/out" || {
  cat "$work/out"
  exit 1
}

# A damaged model is not taken for the real one, and without an index there is a clear message.
mkdir "$work/model"
echo damaged >"$work/model/SmolLM2-135M-Instruct.Q4_1.gguf"
expect 1 "could not download" env PIP_CONFIG_FILE=/dev/null PIP_NO_CACHE_DIR=1 PIP_RETRIES=0 PIP_NO_INDEX=1 \
  PIP_FIND_LINKS= sh "$work/cmake/fetch_model.sh" "$work/model"
grep -q "damaged or incomplete" "$work/out"
[ "$(cat "$work/model/SmolLM2-135M-Instruct.Q4_1.gguf")" = damaged ]
