# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A policy that does not fit gives one error, with a line that names what is missing.

expected_errors.py INCLUDE_DIR COMPILER...: every tests/compile/errors/*.cpp must fail with each compiler.
A line `// expect: WORDS` in it gives what one line of the output must contain; `// flags: FLAG` what is wrong
with the command rather than with the file.
"""

import pathlib
import re
import subprocess
import sys

include, compilers = sys.argv[1], sys.argv[2:]
cases = sorted((pathlib.Path(__file__).parent / "errors").glob("*.cpp"))
failures = 0
for case in cases:
    text = case.read_text(encoding="utf-8")
    expected = re.findall(r"// expect: (.+)", text)
    flags = re.findall(r"// flags: (\S+)", text)
    assert expected, f"{case}: nothing is expected"
    for compiler in compilers:
        def run(*flags):
            return subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-I", include, *flags, str(case)],
                                  capture_output=True, text=True, check=False)

        # The same file is fine once the fault is mended: it fails for that reason and no other.
        mended = run("-DMENDED")
        broken = run(*flags)
        # GCC says once more that what it has refused names no type.
        errors = [line for line in broken.stderr.splitlines()
                  if re.search(r"\berror:", line) and "<expression error>" not in line]
        problems = []
        if mended.returncode != 0:
            problems.append("does not compile when mended:\n" + mended.stderr)
        if broken.returncode == 0:
            problems.append("compiles")
        elif len(errors) != 1:
            problems.append(f"gives {len(errors)} errors:\n" + broken.stderr)
        for words in expected:
            if not any(words in line for line in broken.stderr.splitlines()):
                problems.append(f"no line has '{words}':\n" + broken.stderr)
        for problem in problems:
            print(f"{case.name} with {compiler}: {problem}")
        failures += len(problems)
print(f"{len(cases)} cases, {len(compilers)} compilers, {failures} failures")
sys.exit(1 if failures or not cases or not compilers else 0)
