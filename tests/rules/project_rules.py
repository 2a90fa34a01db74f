# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rules of the house that a compiler does not check: project_rules.py ROOT."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(sys.argv[1])
INCLUDE = ROOT / "include" / "kvfolia"

# Which rooms a room's headers may include; a room may always include itself.
ROOMS = {
    "core": set(),
    "layout": {"core"},
    "quant": {"core"},
    "evict": {"core"},
    "select": {"core"},
    "sizing": {"core"},
    "page": {"core"},
    "cache": {"page", "core"},
    "ref": {"core"},
    "cpu": {"core", "layout", "quant"},
    "cuda": {"core", "layout", "quant"},
    "tier": {"cache", "page", "core"},
    "sched": {"cache", "page", "core"},
    "dist": {"cache", "page", "core"},
    "metrics": set(),
}
# Umbrellas, which belong to no room.
UMBRELLAS = {"kvfolia.hpp", "cpu.hpp", "cuda.cuh", "version.hpp"}
# The umbrella of what needs nothing but a compiler.
PLAIN_UMBRELLA = "kvfolia.hpp"
BACKENDS = {"cpu", "cuda"}
BANNED_HEADERS = {"format", "ranges", "source_location"}
INCLUDE_LINE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')

violations = []


def report(path, line, message):
    violations.append(f"{path.relative_to(ROOT)}:{line}: {message}")


def check_header(path):
    room = path.relative_to(INCLUDE).parts[0]
    text = path.read_text(encoding="utf-8")
    if "#pragma once" not in text.splitlines()[:3]:
        report(path, 3, "#pragma once must follow the licence lines")
    if room not in ROOMS and room not in UMBRELLAS:
        report(path, 1, f"'{room}' is not a room")
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE_LINE.match(line)
        if not match:
            continue
        kind, name = match.groups()
        if kind == '"':
            if not name.startswith("kvfolia/"):
                report(path, number, f"own headers are included by their full name, not '{name}'")
            else:
                target = name.split("/")[1]
                if room in ROOMS and target != room and target not in ROOMS[room]:
                    report(path, number, f"{room} must not include {target}")
                if room == PLAIN_UMBRELLA and target in BACKENDS:
                    report(path, number, f"{room} must not include {target}, which has dependencies")
            if name.endswith(".cuh") and path.suffix == ".hpp":
                report(path, number, "a .hpp never includes a .cuh")
        else:
            if re.match(r"cu(da|b/|blas)|thrust/|mma\.h", name) and path.suffix != ".cuh":
                report(path, number, "CUDA headers appear only in .cuh files")
            if name in BANNED_HEADERS:
                report(path, number, f"<{name}> is missing from a compiler that is supported")


def check_highway(path):
    """Kernels alone know Highway: no other header, program or test."""
    if path.suffix not in {".hpp", ".cuh", ".h", ".cpp", ".cu"} or path.parent == INCLUDE / "cpu":
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE_LINE.match(line)
        if match and match.group(2).startswith("hwy/"):
            report(path, number, "only include/kvfolia/cpu includes Highway")


def tracked_files():
    # A source archive has no repository: then every file counts that is not a build's.
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    return [p for p in ROOT.rglob("*") if p.is_file() and not {"build", ".git"} & set(p.relative_to(ROOT).parts)]


def check_licence(path):
    # JSON has no comments, the licence is its own, and data is only data.
    if path.suffix == ".json" or path.name == "LICENSE" or path.parent == ROOT / "tests" / "data":
        return
    head = path.read_text(encoding="utf-8")[:400]
    for tag in ("SPDX-FileCopyrightText: The kvfolia authors", "SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception"):
        if tag not in head:
            report(path, 1, f"no line '{tag}'")


headers = sorted(p for p in INCLUDE.rglob("*") if p.suffix in {".hpp", ".cuh"})
files = tracked_files()
for header in headers:
    check_header(header)
for file in files:
    check_licence(file)
    check_highway(file)
for violation in violations:
    print(violation)
print(f"{len(headers)} headers, {len(files)} files, {len(violations)} violations")
sys.exit(1 if violations or not headers else 0)
