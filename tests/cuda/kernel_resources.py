# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiles kernels and reads what they take of a GPU: kernel_resources.py NVCC INCLUDE_DIR [ARCHITECTURE ...].

Fails on a warning, on registers that do not fit (spills, a stack), on more kernels or registers than are allowed.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import time

NVCC, INCLUDE = sys.argv[1:3]
ARCHITECTURES = sys.argv[3:] or ["sm_80", "sm_90a", "sm_100"]
SOURCE = pathlib.Path(__file__).parent / "kernels.cu"
# Kernels a layout and quantizer may have: two of eight columns, two of sixteen, and the merge.
MOST_KERNELS = 5
# Of 65,536 registers a multiprocessor: three blocks of 128 threads must fit, two with sixteen columns or long heads.
MOST_REGISTERS = {"merge": 32, "1": 168, "2": 255}
CASES = [("Gqa<128>", "Identity<fp16>"), ("Gqa<128>", "Int8"), ("Gqa<128>", "Int4<32>"),
         ("Gqa<256>", "Identity<bf16>")]

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


for layout, quant in CASES:
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / "kernels.o"
            begin = time.monotonic()
            run = subprocess.run([NVCC, "-std=c++20", "-O3", f"-arch={architecture}", "-I", INCLUDE, "-Xptxas", "-v",
                                  "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra",
                                  f"-DKVF_TEST_LAYOUT={layout}", f"-DKVF_TEST_QUANT={quant}", "-c", "-o", target, SOURCE],
                                 capture_output=True, text=True, check=False)
            seconds = time.monotonic() - begin
            size = target.stat().st_size if run.returncode == 0 else 0
        print(f"{layout} {quant} {architecture}: {seconds:.1f} s, {size} bytes")
        if run.returncode != 0:
            fail(run.stdout + run.stderr)
            continue
        found = list(kernels(run.stderr + run.stdout))
        if not 0 < len(found) <= MOST_KERNELS:
            fail(f"{len(found)} kernels")
        for name, registers, spilled in found:
            match = re.search(r"Li(\d)ELb([01])", name)
            kind = match.group(1) if match else "merge"
            print(f"  {kind if match else ''} {'general' if match and match.group(2) == '1' else 'plain' if match else 'merge'}: {registers} registers")
            if spilled:
                fail(f"{spilled} bytes of stack and spills")
            most = MOST_REGISTERS["2" if kind == "1" and layout == "Gqa<256>" else kind]
            if registers > most:
                fail(f"more than {most} registers")
sys.exit(1 if failed else 0)
