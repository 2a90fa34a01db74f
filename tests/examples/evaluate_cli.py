# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the evaluate program promises on its command line: evaluate_cli.py PROGRAM MODEL."""

import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

PROGRAM, MODEL = sys.argv[1:3]
FIELDS = ["name", "perplexity", "perplexity_change_percent", "standard_error", "kl_mean", "kl_p99", "top1",
          "bits_per_value", "bytes_per_token", "seconds"]
SENTENCES = (
    "A cache keeps what was computed before, so that it need not be computed again. ",
    "Keys say where to look, and values say what is found there; both are stored for every token. ",
    "The more tokens there are, the more memory they take, and the longer it takes to read them. ",
    "Fewer bits for each number make room for more tokens, at a price that can be measured. ",
)


def run(*arguments, model=MODEL):
    command = [PROGRAM, *(["--model", model] if model else []), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


class Evaluate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.text = write(cls.path("small.txt"), "\n".join(SENTENCES) * 5)  # about 350 tokens

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder.name, name)

    def check_error(self, result, status, *words):
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertTrue(result.stderr.startswith("evaluate: "))
        for word in words:
            self.assertIn(word, result.stderr)

    def test_help(self):
        result = run("--help", model=None)
        self.assertEqual(result.returncode, 0)
        for word in ("--text", "--tokens", "--context", "--policies", "--page-tokens", "--csv", "--svg", "--json",
                     "--threads", "8192", "4096", "Instantiated here: ", "int8"):
            self.assertIn(word, result.stdout)

    def test_wrong_usage(self):
        text = ("--text", self.text)
        self.check_error(run(*text, "--policies", "fp16,int3"), 2, "int3")
        self.check_error(run(*text, "--policies", "fp16,,bf16"), 2)
        self.check_error(run(*text, "--policies", "fp16+window:8,4,5"), 2, "'5'")
        self.check_error(run(*text, "--policies", "x\ny"), 2)
        self.check_error(run(*text, "--tokens", "1"), 2, "--tokens")
        self.check_error(run(*text, "--context", "1"), 2, "--context")
        self.check_error(run(*text, "--page-tokens", "0"), 2, "--page-tokens")
        self.check_error(run(*text, "--no-such-option"), 2)
        # A wrong name is seen before any file.
        self.check_error(run("--policies", "int3", model="/nowhere/model.gguf"), 2, "int3")

    def test_failures(self):
        fp16 = ("--policies", "fp16")
        self.check_error(run("--text", self.text, *fp16, model="/nowhere/model.gguf"), 1, "/nowhere/model.gguf")
        self.check_error(run("--text", "/nowhere/text", *fp16), 1, "/nowhere/text")
        self.check_error(run("--text", self.path(""), *fp16), 1, "sect.*.html")
        self.check_error(run("--text", self.text, *fp16, "--context", "9000"), 1, "8192")
        self.check_error(run("--text", self.text, *fp16, "--tokens", "5000"), 1, "5000")
        for option in ("--csv", "--svg"):
            self.check_error(run("--text", self.text, *fp16, option, "/nowhere/file"), 1, "/nowhere/file")
            self.check_error(run("--text", self.text, *fp16, option, self.folder.name), 1, self.folder.name)
        for short in ("", "a"):
            self.check_error(run("--text", write(self.path("short.txt"), short), *fp16), 1, "at least 2")

    def test_output_that_cannot_be_written(self):
        arguments = ("--text", self.text, "--policies", "fp32", "--tokens", "4")
        with open("/dev/full", "w", encoding="utf-8") as full:
            for extra in ((), ("--json",)):
                result = subprocess.run([PROGRAM, "--model", MODEL, *arguments, *extra], stdout=full,
                                        stderr=subprocess.PIPE, text=True, check=False)
                self.assertEqual(result.returncode, 1)
                self.assertIn("could not be written", result.stderr)
        self.check_error(run(*arguments, "--csv", "/dev/full"), 1, "/dev/full")

    def test_figures(self):
        svg, table = self.path("plot.svg"), self.path("figures.csv")
        result = run("--text", self.text, "--policies", "int8,fp16,fp16+window:64,4,fp32,int8", "--context", "200",
                     "--page-tokens", "16", "--json", "--svg", svg, "--csv", table)
        self.assertEqual(result.returncode, 0, result.stderr)
        # Fewer tokens than usual are no error, but one line says so; progress is for terminals.
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertIn("fewer than", result.stderr)
        figures = json.loads(result.stdout)
        self.assertEqual(figures["text"], "small.txt")
        self.assertEqual(figures["context"], 200)
        # Each of two windows has a last token that predicts nothing.
        self.assertEqual(figures["tokens"], int(result.stderr.split(" tokens to score")[0].split()[-1]) - 2)
        self.assertEqual([p["name"] for p in figures["policies"]], ["fp32", "int8", "fp16", "fp16+window:64,4"])
        for policy in figures["policies"]:
            self.assertEqual(sorted(policy), sorted(FIELDS))
            self.assertTrue(all(math.isfinite(policy[field]) for field in FIELDS[1:]), policy)
        fp32, int8, fp16, window = figures["policies"]
        self.assertEqual((fp32["kl_mean"], fp32["kl_p99"], fp32["top1"]), (0, 0, 1))
        self.assertEqual((fp32["perplexity_change_percent"], fp32["standard_error"]), (0, 0))
        self.assertTrue(1 < fp32["perplexity"] < 100)
        self.assertTrue(0 < fp16["kl_mean"] < 1e-4, fp16)
        self.assertTrue(fp16["kl_mean"] < int8["kl_mean"] < 0.02, int8)
        self.assertLess(int8["kl_mean"], window["kl_mean"])
        for policy in figures["policies"][1:]:
            self.assertGreaterEqual(policy["kl_p99"], policy["kl_mean"])
            self.assertTrue(0 <= policy["top1"] <= 1)
            change = 100 * (policy["perplexity"] / fp32["perplexity"] - 1)
            self.assertAlmostEqual(policy["perplexity_change_percent"], change, places=6)
            self.assertGreater(policy["standard_error"], 0)
        self.assertAlmostEqual(fp32["bits_per_value"], 32)
        self.assertAlmostEqual(fp16["bits_per_value"], 16)
        self.assertTrue(8 < int8["bits_per_value"] < 9)
        # Keys and values of 3 heads of 64 numbers in 30 layers; a page may not be full.
        self.assertTrue(1 <= fp16["bytes_per_token"] / (2 * 3 * 64 * 2 * 30) < 1.1)

        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        self.assertEqual(rows[0], FIELDS)
        for row, policy in zip(rows[1:], figures["policies"], strict=True):
            self.assertEqual(row[0], policy["name"])
            self.assertEqual([float(number) for number in row[1:]], [policy[field] for field in FIELDS[1:]])

        plot = xml.etree.ElementTree.parse(svg).getroot()
        self.assertTrue(plot.tag.endswith("svg"))
        texts = {element.text for element in plot.iter() if element.text}
        self.assertLessEqual({"int8", "fp16", "fp16+window:64,4"}, texts)

    def test_table(self):
        result = run("--text", self.text, "--policies", "fp16", "--tokens", "20")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        lines = result.stdout.splitlines()
        self.assertIn("19 tokens scored", lines[0])
        self.assertTrue(lines[2].startswith("policy"))
        self.assertEqual([line.split()[0] for line in lines[3:]], ["fp32", "fp16"])
        self.assertEqual(len({len(line) for line in lines[2:]}), 1)

    def test_pages_are_read_as_text(self):
        page = self.path("page.html")
        write(page, "<html><head><title>No</title></head><body><p>" + SENTENCES[0] * 3 + "</p></body></html>")
        plain = write(self.path("page.txt"), (SENTENCES[0] * 3).strip())
        same = [json.loads(run("--text", path, "--policies", "fp32", "--json").stdout) for path in (page, plain)]
        self.assertEqual(same[0]["tokens"], same[1]["tokens"])
        self.assertEqual(same[0]["policies"][0]["perplexity"], same[1]["policies"][0]["perplexity"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
