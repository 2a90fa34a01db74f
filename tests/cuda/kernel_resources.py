# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiles kernels and reads what they take of a GPU: kernel_resources.py NVCC INCLUDE_DIR.

Fails on a warning, on registers that do not fit (spills, a stack), on more kernels or registers than are allowed, and
on a main loop of more instructions than bench/README.md grants. KVF_NVDISASM: where nvdisasm is; main loops are not
read without.
"""

import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import main_loop

NVCC, INCLUDE = sys.argv[1:]
NVDISASM = os.environ.get("KVF_NVDISASM", "")
SOURCE = pathlib.Path(__file__).parent / "kernels.cu"
# Kernels of attention that a layout and quantizer may have: with one coded format a plain and a general one of eight
# columns, with two a general one each; the same of sixteen, but no plain one; and the merge.
MOST_KERNELS = 5
# Bytes of an object that has all of a layout and quantizer, with the code of one architecture and no PTX.
MOST_BYTES = 600_000
# Of 65,536 registers a multiprocessor: three blocks of 128 threads must fit, two with sixteen columns or long heads.
MOST_REGISTERS = {"merge": 32, "1": 168, "2": 255, "write": 80, "move": 64, "compact": 80, "key_stats": 80}

Case = collections.namedtuple("Case", "layout quant code_bytes param_bytes most_slots architectures")
# Bytes of a token's codes and parameters, of keys and values together. Architectures are spread over what differs.
CASES = [
    Case("Gqa<128>", "Identity<fp16>", 512, 0, 0.15, ["sm_80", "sm_90a"]),
    Case("Gqa<128>", "Int8", 256, 4, 0.40, ["sm_80", "sm_90a", "sm_100"]),
    Case("Gqa<128>", "Int4<0>", 128, 8, 0.65, ["sm_90a"]),
    Case("Gqa<128>", "Int4<32>", 128, 32, None, ["sm_90a"]),
    Case("Gqa<128>", "KeyValue<Int4Channels<32>, Int4<0>>", 128, 4 + 512 / 32, None, ["sm_90a"]),
    Case("Gqa<128>", "Rotated<Compact4Channels<32>>", 128, 8.25, None, ["sm_90a"]),
    Case("Gqa<128>", "Nvfp4", 128, 16, None, ["sm_90a"]),
    Case("Gqa<128>", "Mixed<Int8, Int4<0>>", 256, 4, None, ["sm_90a"]),
    Case("Gqa<256>", "Identity<bf16>", 1024, 0, None, ["sm_90a"]),
]
# An H200: bytes a second that decoding may hope for, and instructions that its schedulers issue.
BANDWIDTH = 4.0e12
ISSUE_SLOTS = 132 * 4 * 1.755e9

failed = False


def fail(what):
    global failed
    failed = True
    print("  " + what)


def kernels(log):
    """(name, registers, bytes of stack and spills) of every entry function."""
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        spilled = [int(n) for n in re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups()]
        yield name, int(re.search(r"Used (\d+) registers", part).group(1)), sum(spilled)


def variant(name):
    """Tiles of eight columns and whether it is the general kernel; of others their name."""
    match = re.search(r"Li(\d)ELb([01])", name)
    if match:
        return match.group(1), "general" if match.group(2) == "1" else "plain"
    return re.search(r"detail\d+(\w+?)_kernel", name).group(1), ""


def read_main_loops(case, cubin):
    listing = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout
    for name, blocks in main_loop.kernels(listing):
        tiles, kind = variant(name)
        if tiles != "1":
            continue
        counts = main_loop.full_tile(blocks)
        # ldmatrix reads 512 bytes of codes.
        tokens = counts["LDSM"] * 512 / case.code_bytes
        bytes_read = tokens * (case.code_bytes + case.param_bytes)
        slots = sum(counts.values()) / bytes_read * BANDWIDTH / ISSUE_SLOTS
        print(f"  {kind}, a full tile of {tokens:.0f} tokens: {sum(counts.values())} instructions for {bytes_read:.0f} bytes, "
              f"{100 * slots:.1f}% of issue slots at 4 TB/s")
        print("    " + ", ".join(f"{n} {op}" for op, n in counts.most_common(12)))
        if counts["LDL"] or counts["STL"]:
            fail("local memory")
        if kind == "plain" and case.most_slots and slots > case.most_slots:
            fail(f"more than {100 * case.most_slots:.0f}%")


def check(case, architecture):
    with tempfile.TemporaryDirectory() as folder:
        target = pathlib.Path(folder) / "kernels.o"
        (pathlib.Path(folder) / "case.hpp").write_text(
            f"#define KVF_TEST_LAYOUT {case.layout}\n#define KVF_TEST_QUANT {case.quant}\n")
        begin = time.monotonic()
        virtual = architecture.replace("sm_", "compute_")
        run = subprocess.run([NVCC, "-std=c++20", "-O3", "-gencode", f"arch={virtual},code={architecture}",
                              "-I", INCLUDE, "-I", folder, "-Xptxas", "-v", "-Werror", "all-warnings", "-Xcompiler",
                              "-Wall,-Wextra", "--keep", "--keep-dir", folder, "-c", "-o", target, SOURCE],
                             capture_output=True, text=True, check=False)
        seconds = time.monotonic() - begin
        if run.returncode != 0:
            print(f"{case.layout} {case.quant} {architecture}")
            fail(run.stdout + run.stderr)
            return
        print(f"{case.layout} {case.quant} {architecture}: {seconds:.1f} s, {target.stat().st_size} bytes")
        found = list(kernels(run.stderr + run.stdout))
        attending = [name for name, _, _ in found if variant(name)[0] in ("1", "2", "merge")]
        if not 0 < len(attending) <= MOST_KERNELS:
            fail(f"{len(attending)} kernels of attention")
        if target.stat().st_size > MOST_BYTES:
            fail(f"more than {MOST_BYTES} bytes")
        for name, registers, spilled in found:
            tiles, kind = variant(name)
            print(f"  {tiles} {kind}: {registers} registers")
            if spilled:
                fail(f"{spilled} bytes of stack and spills")
            most = MOST_REGISTERS["2" if tiles == "1" and case.layout == "Gqa<256>" else tiles]
            if registers > most:
                fail(f"more than {most} registers")
        if NVDISASM and architecture == "sm_90a":
            read_main_loops(case, next(pathlib.Path(folder).glob("*.cubin")))


if not NVDISASM:
    print("no nvdisasm: main loops are not read")
for one in CASES:
    for arch in one.architectures:
        check(one, arch)
sys.exit(1 if failed else 0)
