# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the own_threads program promises on its command line: own_threads_cli.py PROGRAM."""

import json
import subprocess
import sys
import unittest

PROGRAM = sys.argv[1]
SMALL = ("--sequences", "3", "--context", "700", "--steps", "4")


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False)


class OwnThreads(unittest.TestCase):
    def check_error(self, result, status, *words):
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertTrue(result.stderr.startswith("own_threads: "))
        for word in words:
            self.assertIn(word, result.stderr)

    def test_help(self):
        result = run("--help")
        self.assertEqual(result.returncode, 0)
        for word in ("--threads", "--sequences", "--context", "--steps", "--json"):
            self.assertIn(word, result.stdout)

    def test_text(self):
        result = run(*SMALL)
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in ("3 sequences of 704 tokens", "ms a step", "the same bits"):
            self.assertIn(word, result.stdout)

    def test_any_number_of_threads_gives_the_same_bits(self):
        for threads in (1, 2, 3, 9):
            result = run(*SMALL, "--json", "--threads", str(threads))
            self.assertEqual(result.returncode, 0, result.stderr)
            figures = json.loads(result.stdout)
            self.assertIs(figures["same_bits"], True)
            self.assertEqual((figures["threads"], figures["steps"], figures["sequences"]), (threads, 4, 3))
            self.assertGreater(figures["serial_seconds_per_step"], 0)
            self.assertGreater(figures["seconds_per_step"], 0)
            self.assertEqual(figures["cache_bytes"] % (3 * 22), 0)  # pages of 32 tokens

    def test_wrong_usage(self):
        self.check_error(run("--threads", "0"), 2, "--threads")
        self.check_error(run("--context", "many"), 2, "--context")
        self.check_error(run("--no-such-option"), 2)

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            result = subprocess.run([PROGRAM, *SMALL], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(result.returncode, 1)
        self.assertIn("could not be written", result.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
