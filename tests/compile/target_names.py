# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The name of the kernels' namespace tells instruction sets apart: target_names.py INCLUDE_DIR COMPILER...

Two sets of flags share a name only where Highway's static target and all macros that kernels or compilers
choose instructions by are the same.
"""

import itertools
import platform
import re
import subprocess
import sys

include, compilers = sys.argv[1], sys.argv[2:]
X86 = """; -DHWY_COMPILE_ONLY_SCALAR; -mssse3; -msse4.1; -march=x86-64-v2; -mavx; -mavx2; -mavx2 -mfma; -march=haswell
-march=x86-64-v3; -march=x86-64-v3 -DHWY_COMPILE_ONLY_SCALAR; -march=x86-64-v3 -maes -mpclmul
-march=x86-64-v3 -mavxvnni; -march=alderlake; -mavx512f; -march=x86-64-v4; -march=skylake-avx512
-march=cannonlake; -march=x86-64-v4 -mavx512vnni; -march=cascadelake; -march=cooperlake; -march=icelake-server
-march=sapphirerapids; -march=sapphirerapids -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
-march=sapphirerapids -mno-amx-int8 -mno-amx-bf16; -march=sapphirerapids -mno-avx512fp16
-march=sapphirerapids -mno-avxvnni; -march=sapphirerapids -mno-avx512bf16; -march=znver3; -march=native"""
ALL = "; -DHWY_COMPILE_ONLY_SCALAR; -march=native"
flag_sets = [flags.split() for flags in re.split("[;\n]", X86 if platform.machine() == "x86_64" else ALL)]

TELLING = re.compile(r"__(SSSE3|SSE4_[12]|AVX|AVX2|FMA|F16C|BMI2|AVX512(F|BW|DQ|VL|VBMI2?|VNNI|BF16|FP16)|AVXVNNI|"
                     r"AMX_\w+)__$|__ARM_(NEON|FEATURE_(SVE2?|DOTPROD|MATMUL_INT8|(BF|FP)16_VECTOR_ARITHMETIC))$")
PROGRAM = '#include "kvfolia/cpu/target.hpp"\nnames KVF_CPU_TARGET HWY_NAMESPACE\n'

failures = 0
for compiler in compilers:
    seen = {}
    for flags in flag_sets:
        def preprocess(text, *more):
            return subprocess.run([compiler, "-std=c++20", *flags, "-I", include, "-E", "-P", *more, "-x", "c++", "-"],
                                  input=text, capture_output=True, text=True, check=False)

        result = preprocess(PROGRAM)
        names = re.search(r"^names (\w+) (\w+)$", result.stdout, re.MULTILINE)
        if result.returncode != 0 or not names:
            print(f"{compiler} {' '.join(flags)}: no name\n{result.stderr}")
            failures += 1
            continue
        macros = {line.split()[1] for line in preprocess("", "-dM").stdout.splitlines()}
        seen[" ".join(flags)] = names[1], {names[2], *filter(TELLING.match, macros)}
    for (a, (name_a, set_a)), (b, (name_b, set_b)) in itertools.combinations(seen.items(), 2):
        if name_a == name_b and set_a != set_b:
            print(f"{compiler}: '{a}' and '{b}' are both {name_a}, but differ in {' '.join(set_a ^ set_b)}")
            failures += 1
    print(f"{compiler}: {len(seen)} sets of flags, {len({name for name, _ in seen.values()})} names")
sys.exit(1 if failures or not compilers else 0)
