#!/bin/sh
# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# From a fresh Debian 12 or Ubuntu 24.04 to a running demo or a tested build, in
# one command: see usage() below. Nothing is installed when nothing is missing,
# and a second run needs no network.

set -eu

# ---- what is run and what it needs ------------------------------------------

preset=release

run_demo() { # $1: the model
  show "$build_dir/examples/generate" --model "${1#"$root"/}" --tokens 64 \
    --chat "What is a cache? Answer in two sentences."
  # What some ways to store keys and values cost the model, on prose. Small images leave out what packages
  # have under /usr/share/doc: then the README will do.
  prose=/usr/share/doc/debian-handbook/html/en-US
  [ -d "$prose" ] || prose=README.md
  show "$build_dir/examples/evaluate" --model "${1#"$root"/}" --text "$prose" --tokens 512 --context 512 \
    --policies int8,int8+centered+sink:1,compact4+rotated/compact4+rotated+sink:1,nvfp4
  # Four continuations of one prompt: its full pages are stored once.
  show "$build_dir/examples/generate" --model "${1#"$root"/}" --tokens 24 --forks 4 --page-tokens 16 \
    --prompt "The lighthouse keeper had written in his book every evening for thirty years: the wind, the \
ships, the light. On the last page that he ever filled, in a hand that hardly shook, stood a sentence that nobody in \
the village could explain. It said that"
}

run_test() {
  ctest --preset "$preset" --no-tests=error || fail "some tests failed"
}

packages="g++ cmake ninja-build pkg-config python3 python3-pip git ca-certificates
libhwy-dev libeigen3-dev libpcre2-dev nlohmann-json3-dev libcli11-dev catch2 libbenchmark-dev
libboost-context-dev"
packages_demo="debian-handbook"
packages_test="clang clang-format g++-aarch64-linux-gnu"

needs="  a C++20 compiler (GCC 12 or later), CMake 3.25 or later, Ninja, pkg-config, Python 3 with pip, git;
  the development files of Highway, Eigen 3, PCRE2, nlohmann-json, CLI11, Catch2,
  Google Benchmark and Boost.Context; for 'test' also clang and clang-format, and
  for one test g++ for aarch64-linux-gnu."

# ---- plumbing ---------------------------------------------------------------

usage() {
  cat <<'USAGE'
usage: sh cmake/bootstrap.sh COMMAND

  demo    install what is missing, fetch the model, build, run the examples
  test    the same, then run the tests (all but the slow ones)
  deps    only install what is missing for both
  model   only fetch the model and print its path
  --help  print this

Environment:
  KVF_MODEL_DIR                where the model is kept (default: build/model), so that
                               several clones may share it
  CMAKE_BUILD_PARALLEL_LEVEL   how many compilers run at once (default: from the
                               number of processors and the memory)

Exit status: 0 done, 1 failed, 2 wrong usage.
USAGE
}

say() { printf '==> %s\n' "$*" >&2; }
fail() {
  printf 'bootstrap: error: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '%s\n' "$line" >&2; done
  exit 1
}

ticker=
stop_ticker() {
  if [ -n "$ticker" ]; then
    kill "$ticker" 2>/dev/null || :
    wait "$ticker" 2>/dev/null || :
    ticker=
    printf '\r\033[K' >&2
  fi
}
trap stop_ticker EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# The last line of a log, kept up to date on the terminal. It runs beside the
# command, which stays in the foreground and so gets the terminal's Ctrl-C.
tick() {
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    printf '\r\033[K    %s' "$(tail -n 1 "$1" 2>/dev/null | tr -d '\r\033' | cut -c 1-72)" >&2
  done
}

logged() { # logged LOG COMMAND...: quiet unless it fails
  log=$1
  shift
  (: >"$log") 2>/dev/null || fail "cannot write $root/$log"
  if [ -t 2 ]; then
    tick "$log" &
    ticker=$!
  fi
  rc=0
  "$@" >"$log" 2>&1 </dev/null || rc=$?
  stop_ticker
  return "$rc"
}

show_log() { # show_log LOG: its end, after a failure
  printf -- '---- the last lines of %s\n' "$1" >&2
  tail -n 60 "$1" >&2
  printf -- '----\n' >&2
}

show() { # show COMMAND...: prints it as one would type it, then runs it
  line=
  for word in "$@"; do
    case $word in *' '*) line="$line \"$word\"" ;; *) line="$line $word" ;; esac
  done
  say "running:$line"
  "$@" || fail "$1 failed with exit status $?"
}

# ---- packages ---------------------------------------------------------------

at_least() { # at_least HAVE WANT: two numbers with dots
  awk -v have="$1" -v want="$2" 'BEGIN {
    split(have, h, "."); split(want, w, ".")
    for (i = 1; i <= 2; ++i) if (h[i] + 0 != w[i] + 0) exit !(h[i] + 0 > w[i] + 0)
  }'
}

known_distribution() { # sets distribution
  file=${KVF_OS_RELEASE:-/etc/os-release} # set by tests/package/bootstrap.sh
  distribution="an unknown system"
  [ -r "$file" ] || return 1
  case $file in */*) ;; *) file=./$file ;; esac
  # shellcheck disable=SC1090
  distribution=$(. "$file" && printf '%s' "${PRETTY_NAME:-${ID:-an unknown system}}")
  # shellcheck disable=SC1090
  id=$(. "$file" && printf '%s %s' "${ID:-none}" "${VERSION_ID:-99}") # Debian testing has no number
  case $id in
    debian\ *) at_least "${id#* }" 12 ;;
    ubuntu\ *) at_least "${id#* }" 24.04 ;;
    *) return 1 ;;
  esac && command -v dpkg-query >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1
}

missing_packages() {
  for package in "$@"; do
    # One line for each architecture that has it.
    # shellcheck disable=SC2016
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
      printf '%s ' "$package"
  done
}

missing_tools() { # one line for each; nothing when all are there
  if ! printf '%s\n' '#include <concepts>' '#include <span>' \
    '#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12' '#error too old' '#endif' \
    'int main() {}' | ${CXX:-g++} -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1; then
    echo "  a C++20 compiler: ${CXX:-g++} is not there or too old (GCC 12 or later is needed)"
  fi
  have=$(cmake --version 2>/dev/null | sed -n '1s/.*version \([0-9.]*\).*/\1/p') || have=
  if [ -z "$have" ]; then
    echo "  cmake"
  elif ! at_least "$have" 3.25; then
    echo "  cmake 3.25 or later: $(command -v cmake) is $have"
  fi
  command -v ninja >/dev/null 2>&1 || echo "  ninja"
  command -v git >/dev/null 2>&1 || echo "  git"
  python3 -m pip --version >/dev/null 2>&1 || /usr/bin/python3 -m pip --version >/dev/null 2>&1 ||
    echo "  python3 with pip"
  if [ "$1" != demo ]; then
    command -v clang++ >/dev/null 2>&1 || echo "  clang"
    command -v clang-format >/dev/null 2>&1 || echo "  clang-format"
  fi
}

apt() { # apt LOG ARGUMENTS...
  log=$1
  shift
  # shellcheck disable=SC2086
  logged "$log" $sudo env LC_ALL=C DEBIAN_FRONTEND=noninteractive \
    ${http_proxy:+"http_proxy=$http_proxy"} ${https_proxy:+"https_proxy=$https_proxy"} \
    apt-get -q -o DPkg::Lock::Timeout=300 "$@"
}

install_packages() {
  by_hand="    apt-get update && apt-get install -y --no-install-recommends $*"
  sudo=
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n env true >/dev/null 2>&1; then
      sudo="sudo -n"
    elif command -v sudo >/dev/null 2>&1 && [ -t 0 ] && [ -t 2 ]; then
      say "packages are missing ($*): sudo may ask for your password"
      sudo=sudo
      sudo -v || sudo=none
    else
      sudo=none
    fi
    if [ "$sudo" = none ]; then
      fail "packages are missing, and installing them takes root or sudo" \
        "Have this run as root, then run this script again:" "$by_hand"
    fi
  fi
  say "installing: $*"
  # A third party's broken source need not stop us: the install below decides.
  apt "$logs/apt-update.log" update || :
  if ! apt "$logs/apt-install.log" install -y --no-install-recommends "$@"; then
    unreachable=$(grep -hE '^ *(W|E|Err).*(resolv|[Cc]ould not connect|[Cc]onnection (failed|timed out|refused)|Failed to fetch|unreachable|Unable to connect)' \
      "$logs/apt-update.log" "$logs/apt-install.log" | cut -c 1-160 | tail -n 2) || :
    if [ -n "$unreachable" ]; then
      fail "apt could not reach the package archive:" "$unreachable" \
        "Is there a network, and is apt's proxy (if any) right? When it works, run this script again, or as root:" \
        "$by_hand"
    fi
    show_log "$logs/apt-install.log"
    if grep -q 'Unable to locate package' "$logs/apt-install.log"; then
      fail "apt does not know some package" \
        "On Ubuntu the 'universe' component has to be on; see also $logs/apt-update.log. Then run as root:" \
        "$by_hand"
    fi
    fail "apt could not install the packages; run as root, to see why:" "$by_hand"
  fi
}

ensure_packages() { # ensure_packages demo|test
  case $1 in
    demo) wanted="$packages $packages_demo" ;;
    test) wanted="$packages $packages_test" ;;
    *) wanted="$packages $packages_demo $packages_test" ;;
  esac
  if known_distribution; then
    # shellcheck disable=SC2086
    missing=$(missing_packages $wanted)
    # shellcheck disable=SC2086
    if [ -n "$missing" ]; then install_packages $missing; fi
    missing=$(missing_tools "$1")
    [ -z "$missing" ] || fail "the packages are installed, but PATH or CXX leads to other tools:" "$missing"
  else
    missing=$(missing_tools "$1")
    [ -z "$missing" ] || fail "$distribution is not one that this script can install packages on" \
      "(Debian 12, Ubuntu 24.04 or later). Not found here:" "$missing" \
      "Install these by hand, then run this script again:" "$needs"
    say "$distribution is not one that this script can install packages on: going on with what is there"
  fi
}

# ---- building ---------------------------------------------------------------

jobs_at_once() { # the processors, but 2 GiB of memory for each compiler
  kib=$(sed -n 's/^MemTotal: *\([0-9]*\) kB$/\1/p' /proc/meminfo 2>/dev/null) || kib=
  gib=$(((${kib:-2097152} + 1048575) / 1048576))
  for file in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
    limit=$(cat "$file" 2>/dev/null) || limit=
    case $limit in
      '' | *[!0-9]*) ;; # "max"
      *) if [ $((limit / 1073741824)) -lt "$gib" ]; then gib=$((limit / 1073741824)); fi ;;
    esac
  done
  count=$(nproc 2>/dev/null) || count=1
  if [ $((gib / 2)) -lt "$count" ]; then count=$((gib / 2)); fi
  if [ "$count" -lt 1 ]; then count=1; fi
  echo "$count"
}

cached() { sed -n "s/^$1:[A-Z]*=//p" "$build_dir/CMakeCache.txt"; }

build() { # build [TARGET...]: all of it when none is named
  fresh=
  if [ -f "$build_dir/CMakeCache.txt" ]; then
    home=$(cached CMAKE_HOME_DIRECTORY)
    generator=$(cached CMAKE_GENERATOR)
    if [ "$(CDPATH='' cd -- "$home" 2>/dev/null && pwd -P)" != "$root" ]; then
      say "$build_dir was configured for ${home:-another folder}: configuring it afresh"
      fresh=--fresh
    elif [ "$generator" != Ninja ]; then
      say "$build_dir was configured for ${generator:-another generator}: configuring it afresh"
      fresh=--fresh
    fi
  fi
  say "configuring: $build_dir"
  # shellcheck disable=SC2086
  if ! logged "$logs/configure.log" cmake $fresh --preset "$preset"; then
    show_log "$logs/configure.log"
    fail "configuring failed" "If $build_dir is left from another set-up, remove it and run this script again." \
      "The project needs:" "$needs"
  fi
  count=${CMAKE_BUILD_PARALLEL_LEVEL:-$(jobs_at_once)}
  say "building: $build_dir, $count files at once (log: $logs/build.log)"
  if ! logged "$logs/build.log" cmake --build --preset "$preset" -j "$count" ${1:+--target "$@"}; then
    show_log "$logs/build.log"
    fail "building failed" "If a compiler was killed for lack of memory, set CMAKE_BUILD_PARALLEL_LEVEL=1."
  fi
}

fetch_model() {
  model=$(sh cmake/fetch_model.sh "$KVF_MODEL_DIR") || exit 1
}

# Where there is nvcc, a test reads what it makes of the kernels: with nvdisasm, which nvcc may come without.
fetch_disassembler() {
  nvcc=$(command -v nvcc) || nvcc=/usr/local/cuda/bin/nvcc
  [ -x "$nvcc" ] || return 0
  if command -v nvdisasm >/dev/null || [ -x "$(dirname "$nvcc")/nvdisasm" ] ||
    [ -x "$disassembler/nvidia/cu13/bin/nvdisasm" ]; then return 0; fi
  say "fetching nvdisasm: $disassembler"
  for python in python3 /usr/bin/python3; do
    if "$python" -m pip --version >/dev/null 2>&1; then
      if logged "$logs/disassembler.log" "$python" -m pip install --no-deps --target "$disassembler" \
        'nvidia-cuda-nvdisasm>=13,<14'; then return 0; fi
    fi
  done
  say "nvdisasm could not be fetched: going on without what its test reads (log: $logs/disassembler.log)"
}

# ---- main -------------------------------------------------------------------

case ${1-} in
  -h | --help) usage; exit 0 ;;
  demo | test | deps | model) ;;
  *) usage >&2; exit 2 ;;
esac
if [ $# -ne 1 ]; then usage >&2; exit 2; fi

start=$(pwd)
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
case ${KVF_MODEL_DIR:=$root/build/model} in
  /*) ;;
  *) KVF_MODEL_DIR=$start/$KVF_MODEL_DIR ;;
esac
export KVF_MODEL_DIR
cd -- "$root"
build_dir=build/$preset
logs=build/log
disassembler=build/disassembler
mkdir -p -- "$logs" || fail "cannot write to $root/build"

case $1 in
  deps) ensure_packages all ;;
  model) fetch_model; printf '%s\n' "$model" ;;
  demo) ensure_packages demo; fetch_model; build generate evaluate; run_demo "$model" ;;
  test) ensure_packages test; fetch_model; fetch_disassembler; build; run_test ;;
esac
