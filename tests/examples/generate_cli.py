# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the generate program promises on its command line: generate_cli.py PROGRAM MODEL."""

import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import unittest

PROGRAM, MODEL = sys.argv[1:3]


def run(*arguments, model=MODEL):
    command = [PROGRAM, *(["--model", model] if model else []), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def run_json(*arguments):
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


class Generate(unittest.TestCase):
    def check_error(self, result, status, *words):
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertEqual(result.stdout, "")
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        self.assertTrue(result.stderr.startswith("generate: "))
        for word in words:
            self.assertIn(word, result.stderr)

    def test_help(self):
        result = run("--help", model=None)
        self.assertEqual(result.returncode, 0)
        for word in ("--prompt", "--chat", "--policy", "fp32, fp16, bf16, int8", "+window:W[,S]", "+sink:PAGES"):
            self.assertIn(word, result.stdout)

    def test_wrong_usage(self):
        self.check_error(run(), 2)
        self.check_error(run("--prompt", "a", "--chat", "b"), 2)
        self.check_error(run("--prompt", "a", "--tokens", "0"), 2, "--tokens")
        self.check_error(run("--prompt", "a", "--policy", "int3"), 2, "int3", "fp16")
        self.check_error(run("--prompt", "a", "--order", "up"), 2, "--order")
        self.check_error(run("--prompt", "a", "--no-such-option"), 2)
        self.check_error(run("--prompt", "a", "--temperature", "nan"), 2, "--temperature")
        self.check_error(run("--prompt", "a", "--policy", "x\ny"), 2)

    def test_failures(self):
        self.check_error(run("--prompt", "a", model="/nowhere/model.gguf"), 1, "/nowhere/model.gguf")
        self.check_error(run("--prompt-file", "/nowhere/text"), 1, "/nowhere/text")
        self.check_error(run("--prompt-file", "/tmp"), 1, "/tmp")
        self.check_error(run("--prompt", ""), 1, "no tokens")
        self.check_error(run("--prompt", "a", "--tokens", "9000"), 1, "8192")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "broken.gguf")
            with open(MODEL, "rb") as whole, open(path, "wb") as broken:
                broken.write(whole.read(1 << 20))
            self.check_error(run("--prompt", "a", model=path), 1, path)
            with open(path, "w", encoding="utf-8") as broken:
                broken.write("no model at all")
            self.check_error(run("--prompt", "a", model=path), 1, path)

    def test_foreign_architecture(self):
        def text(value):
            data = value.encode()
            return struct.pack("<Q", len(data)) + data

        header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("general.architecture") + struct.pack("<I", 8)
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(header + text("qwen\n2"))
            file.flush()
            self.check_error(run("--prompt", "a", model=file.name), 1, file.name, "architecture", "llama")

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            for extra in ((), ("--json",)):
                result = subprocess.run([PROGRAM, "--model", MODEL, "--prompt", "a", "--tokens", "2", *extra],
                                        stdout=full, stderr=subprocess.PIPE, text=True, check=False)
                self.assertEqual(result.returncode, 1)
                self.assertIn("could not be written", result.stderr)

    def test_json(self):
        result = run_json("--prompt", "The capital of France is", "--tokens", "6", "--policy", "fp32")
        self.assertLessEqual(
            {"text", "prompt_tokens", "tokens", "logprobs", "prefill_seconds", "decode_seconds",
             "prefill_attention_seconds", "decode_attention_seconds", "cache_bytes_per_token", "pages_used"},
            set(result))
        for phase in ("prefill", "decode"):
            self.assertGreater(result[phase + "_attention_seconds"], 0)
            self.assertLess(result[phase + "_attention_seconds"], result[phase + "_seconds"])
        self.assertEqual(result["prompt_tokens"], [504, 3575, 282, 4649, 314])
        self.assertEqual(len(result["tokens"]), 6)
        self.assertEqual(len(result["logprobs"]), 6)
        self.assertTrue(all(math.isfinite(p) and p <= 0 for p in result["logprobs"]))
        # 10 tokens are stored: one page of 32, keys and values of 3 heads of 64 floats in 30 layers.
        self.assertEqual(result["pages_used"], 1)
        self.assertAlmostEqual(result["cache_bytes_per_token"], 32 * 2 * 3 * 64 * 4 * 30 / 10)

    def test_text(self):
        result = run("--prompt", "The capital of France is", "--tokens", "4")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.startswith("The capital of France is"))
        for word in ("tokens/s", "bytes a token", "pages"):
            self.assertIn(word, result.stdout)

    def test_prompt_file_and_threads_change_nothing(self):
        text = "One two three\n"
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            one = run_json("--prompt-file", file.name, "--tokens", "5", "--threads", "1", "--path", "plain")
        two = run_json("--prompt", text, "--tokens", "5", "--threads", "2", "--path", "plain")
        self.assertEqual(one["tokens"], two["tokens"])
        self.assertEqual(one["logprobs"], two["logprobs"])
        fast = run_json("--prompt", text, "--tokens", "5")
        self.assertEqual(one["tokens"], fast["tokens"])

    def test_sampling_is_seeded(self):
        sample = lambda seed: run_json("--prompt", "Once", "--tokens", "8", "--temperature", "1.0", "--seed", seed)["tokens"]
        self.assertEqual(sample("1"), sample("1"))
        self.assertNotEqual(sample("1"), sample("2"))

    def test_forks_share_the_prompt(self):
        prompt = "word " * 70  # more than eight pages of 8 tokens
        arguments = ("--prompt", prompt, "--tokens", "6", "--page-tokens", "8", "--seed", "5")
        result = run_json(*arguments, "--forks", "4")
        forks = result["forks"]
        self.assertEqual(len(forks), 4)
        for fork in forks:
            self.assertLessEqual({"text", "tokens", "logprobs"}, set(fork))
        self.assertEqual(forks[0]["tokens"], result["tokens"])
        self.assertGreater(len({tuple(fork["tokens"]) for fork in forks}), 1)
        full_pages = len(result["prompt_tokens"]) // 8
        self.assertEqual(result["pages_shared"], full_pages)
        page_bytes = 8 * 2 * 3 * 64 * 2 * 30
        self.assertEqual(result["bytes_saved"], full_pages * 3 * page_bytes)
        # Fork i draws its first token as a run of its own with seed S + i does.
        for i in (0, 3):
            alone = run_json(*arguments[:-1], str(5 + i), "--temperature", "0.8")
            self.assertEqual(alone["tokens"][0], forks[i]["tokens"][0])

    def test_window_bounds_the_pages(self):
        result = run_json("--prompt", "word " * 100, "--tokens", "40", "--page-tokens", "8", "--policy", "int8+window:32,4")
        # Sinks take one page, the window of 32 tokens at most five.
        self.assertLessEqual(result["pages_used"], 6)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
