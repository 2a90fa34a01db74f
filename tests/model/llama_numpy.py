# SPDX-FileCopyrightText: The kvfolia authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A plain NumPy forward pass of a llama model from a GGUF file: expected data for tests.

    python llama_numpy.py MODEL.gguf OUT.json             write the expected data (float32)
    python llama_numpy.py MODEL.gguf OUT.json --float64   the same with all arithmetic in float64
    python llama_numpy.py MODEL.gguf OUT.json --noise     write it, then measure rounding noise

Needs the PyPI packages gguf, numpy, tokenizers, regex and jinja2.  It shares no code with the
engine it checks.  Everything is written for clarity:

* Weights are expanded once with gguf.quants.dequantize.  A Q4_1 weight is d*q + m and a Q8_0
  weight is d*q with float16 d and m and small integer q, so d*q is exact in float32 and the
  expanded weight carries at most one rounding, with or without fused multiply-add.
* Every product, norm, softmax and activation is computed in one dtype (float32 by default);
  the rotary angles are computed in float64 and their sines and cosines rounded to that dtype.
* Log-probabilities are a float64 log-softmax over the logits.
* Text is split by the `smollm` rule (each \\p{N} character alone, then the GPT-2 pattern on the
  stretches between) and merged by byte-pair merges; PyPI tokenizers and a plain Python
  implementation must agree on every string, or the run fails.

Only the `llama` architecture with the `smollm` pre-tokenizer and a tied output is supported.
"""

import argparse
import hashlib
import json
import math
import sys

import gguf
import jinja2.sandbox
import numpy as np
import regex
import tokenizers

STEPS = 48  # greedy tokens for each prompt, fewer if the end token comes first

# ---------------------------------------------------------------------------------------------
# Tokenizer


def byte_alphabet():
    """The GPT-2 table: one printable character for each byte value."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(plain))
    return table


GPT2_PATTERN = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
DIGIT_PATTERN = regex.compile(r"\p{N}")


class PlainTokenizer:
    """The tokenizer written out in Python, with nothing but `regex` for the character classes."""

    def __init__(self, tokens, merges):
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.alphabet = byte_alphabet()

    def pieces(self, text):
        """Splits text into the pieces that merges never cross."""
        stretches, start = [], 0
        for digit in DIGIT_PATTERN.finditer(text):
            stretches += [text[start:digit.start()], digit.group()]
            start = digit.end()
        stretches.append(text[start:])
        return [m.group() for s in stretches for m in GPT2_PATTERN.finditer(s)]

    def encode(self, text):
        """Token ids of plain text: nothing in it is taken for a special token."""
        out = []
        for piece in self.pieces(text):
            # A byte without a token of its own is dropped before merging, so that its
            # neighbours may merge: this is what PyPI tokenizers does when no unknown token
            # is set.
            symbols = [self.alphabet[b] for b in piece.encode()]
            symbols = [s for s in symbols if s in self.ids]
            while len(symbols) > 1:
                rank, at = min(
                    (self.ranks.get(pair, math.inf), i)
                    for i, pair in enumerate(zip(symbols, symbols[1:]))
                )
                if rank == math.inf:
                    break
                symbols[at:at + 2] = [symbols[at] + symbols[at + 1]]
            out += [self.ids[s] for s in symbols]
        return out


class Tokenizer:
    """Encodes with PyPI tokenizers, and checks each answer against PlainTokenizer."""

    def __init__(self, fields):
        tokens = fields["tokenizer.ggml.tokens"].contents()
        kinds = fields["tokenizer.ggml.token_type"].contents()
        merges = fields["tokenizer.ggml.merges"].contents()
        assert fields["tokenizer.ggml.model"].contents() == "gpt2"
        assert fields["tokenizer.ggml.pre"].contents() == "smollm"
        self.tokens = tokens
        self.special = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds)) if kind != 1}
        self.special_pattern = regex.compile("(" + "|".join(map(regex.escape, self.special)) + ")")
        self.bytes = {char: byte for byte, char in byte_alphabet().items()}
        self.plain = PlainTokenizer(tokens, merges)
        self.library = tokenizers.Tokenizer(tokenizers.models.BPE(
            {t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]))
        self.library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ])

    def encode(self, text):
        """Token ids of plain text."""
        ids = self.library.encode(text, add_special_tokens=False).ids
        if ids != self.plain.encode(text):
            raise SystemExit(f"the two tokenizers differ on {text!r}")
        return ids

    def encode_with_special(self, text):
        """Token ids of rendered chat text, where special tokens stand for themselves."""
        return [i for part in self.special_pattern.split(text)
                for i in ([self.special[part]] if part in self.special else self.encode(part))]

    def decode(self, ids):
        """Text of ids without the special ones; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(bytes(self.bytes[c] for c in self.tokens[i])
                        for i in ids if self.tokens[i] not in self.special)
        return data.decode(errors="replace")


# ---------------------------------------------------------------------------------------------
# Model


def whole(x, w):
    """x @ w.T as the BLAS library computes it."""
    return x @ w.T


def in_blocks(size):
    """x @ w.T with the inner sum cut into blocks of `size`, added in ascending order."""
    def product(x, w):
        total = x[..., :size] @ w[:, :size].T
        for k in range(size, x.shape[-1], size):
            total += x[..., k:k + size] @ w[:, k:k + size].T
        return total
    return product


class Model:
    """Weights and forward pass of one llama model."""

    def __init__(self, reader, dtype, product=whole):
        fields = reader.fields
        assert fields["general.architecture"].contents() == "llama"
        get = lambda key: fields["llama." + key].contents()  # noqa: E731
        self.dtype = np.dtype(dtype)
        self.product = product
        self.layers = get("block_count")
        self.heads = get("attention.head_count")
        self.kv_heads = get("attention.head_count_kv")
        self.head_dim = get("embedding_length") // self.heads
        assert get("rope.dimension_count") == self.head_dim
        self.rope_base = float(get("rope.freq_base"))
        self.eps = self.dtype.type(get("attention.layer_norm_rms_epsilon"))
        self.weights = {}
        for t in reader.tensors:
            data = gguf.quants.dequantize(t.data, t.tensor_type)
            assert data.dtype == np.float32 and data.shape == tuple(t.shape[::-1])
            self.weights[t.name] = data.astype(self.dtype, copy=False)
        assert "output.weight" not in self.weights  # tied to the embedding

    def norm(self, x, weight):
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x / scale * weight

    def rotate(self, x, first):
        """Rotary embedding of x [position, head, dim] on the pairs (2i, 2i + 1)."""
        position = np.arange(first, first + x.shape[0], dtype=np.float64)
        power = -np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        angle = position[:, None] * self.rope_base ** power
        cos = np.cos(angle).astype(self.dtype)[:, None, :]
        sin = np.sin(angle).astype(self.dtype)[:, None, :]
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    def attend(self, q, keys, values):
        """Causal attention of the last q.shape[0] positions over all of keys and values."""
        count, total = q.shape[0], keys.shape[0]
        hidden = np.arange(total)[None, :] > np.arange(total - count, total)[:, None]
        out = np.empty_like(q)
        for h in range(self.heads):
            group = h // (self.heads // self.kv_heads)
            scores = self.product(q[:, h], keys[:, group])
            scores *= self.dtype.type(1 / math.sqrt(self.head_dim))
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            out[:, h] = self.product(scores, values[:, group].T)
        return out.reshape(count, -1)

    def forward(self, ids, cache, wanted):
        """Runs ids after what cache holds, adds them to it; logits of the last `wanted` ones."""
        w, product = self.weights, self.product
        x = w["token_embd.weight"][ids]
        for i in range(self.layers):
            layer = lambda name: w[f"blk.{i}.{name}.weight"]  # noqa: B023, E731
            h = self.norm(x, layer("attn_norm"))
            heads = lambda y: y.reshape(len(ids), -1, self.head_dim)  # noqa: E731
            old = cache.get(i)
            first = 0 if old is None else old[0].shape[0]
            q = self.rotate(heads(product(h, layer("attn_q"))), first)
            k = self.rotate(heads(product(h, layer("attn_k"))), first)
            v = heads(product(h, layer("attn_v")))
            if old is not None:
                k, v = np.concatenate([old[0], k]), np.concatenate([old[1], v])
            cache[i] = k, v
            x = x + product(self.attend(q, k, v), layer("attn_output"))
            h = self.norm(x, layer("ffn_norm"))
            gate = product(h, layer("ffn_gate"))
            gate = gate / (1 + np.exp(-gate))
            x = x + product(gate * product(h, layer("ffn_up")), layer("ffn_down"))
        x = self.norm(x[-wanted:], w["output_norm.weight"])
        logits = product(x, w["token_embd.weight"])
        assert logits.dtype == self.dtype
        return logits


def log_softmax(logits):
    """Log-softmax over the last axis, in float64."""
    z = logits.astype(np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def generate(model, prompt_ids, end):
    """Greedy continuation: ids, log-probabilities, and best-minus-second margins."""
    cache, ids, logprobs, margins = {}, [], [], []
    feed = prompt_ids
    while len(ids) < STEPS and (not ids or ids[-1] != end):
        logits = model.forward(feed, cache, 1)[0]
        best = int(np.argmax(logits))
        second, first = np.partition(logits.astype(np.float64), -2)[-2:]
        ids.append(best)
        logprobs.append(float(log_softmax(logits)[best]))
        margins.append(float(first - second))
        feed = [best]
    return ids, logprobs, margins


# ---------------------------------------------------------------------------------------------
# What is asked of it

PROMPTS = [
    {"name": "prose",
     "prompt": "The old lighthouse stood at the edge of the cliff, and every evening the keeper"
               " climbed the narrow stairs to"},
    {"name": "code",
     "prompt": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n"
               "    a, b = 0, 1\n"},
    {"name": "question",
     "chat": "What is the capital of France, and which river runs through it?"},
    {"name": "digits",
     "prompt": "Multiples of 125: 125, 250, 375, 500, 625, 750,"},
    {"name": "non-ascii",
     "prompt": "\u4f60\u597d means hello, \u8c22\u8c22 means thank you, cafe\u0301 means coffee,"
               " \U0001f469\u200d\U0001f373 is a cook, \U0001f375 is tea, \u00fcber means over,"
               " \u6771\u4eac means"},
]

TOKENIZER_TEXTS = [
    "",
    " ",
    "  ",
    "   ",
    " " * 17,
    "\t",
    "\t\t\tx",
    "\n",
    "\n\n\n",
    "a\n\nb",
    "a \n b",
    "\r\n",
    "one\r\ntwo\rthree\n\r\nfour",
    " \t \n \r\n x",
    "trailing space ",
    "trailing spaces   ",
    "  leading and   inner    spaces",
    "Hello, world!",
    "I'm sure they'll say we've done what you'd do; it's Bob's, isn't it? You're 're",
    "I'M SURE IT'S NOT, DON'T",
    "don\u2019t \u2018quote\u2019 \u201cdouble\u201d \u2026 \u2013 \u2014",
    "''s 'sx 'lll ' s",
    "0",
    "1234567890",
    " 12 34  56   78",
    "3.14159, -2.5e-10, 1_000_000, 0xFF, v1.2.3",
    "abc123def 4g5 h6 ",
    "\u0660\u0661\u0662\u0663 \u0967\u0968\u0969 \u0e51\u0e52\u0e53 \uff11\uff12\uff13"
    " \U0001d7d8\U0001d7d9",
    "x\u00b2 + y\u00b3 = z\u2074, H\u2082O, a\u207f",
    "\u2160 \u2161 \u216b \u2170 \u2188 \u2460 \u2474 \u24b6 \u3007 \u3021",
    "\u00bd cup, \u00be, \u2153 and \u0bf0 \u137b",
    "\u4e00\u4e8c\u4e09 \u4f60\u597d\uff0c\u4e16\u754c\uff01\u8fd9\u662f\u4e00\u4e2a\u6d4b"
    "\u8bd5\u3002",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u30ab\u30bf\u30ab\u30ca\u30fc",
    "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8 \u1112\u1161\u11ab",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m stra\u00dfe \u0142\u00f3d\u017a \u0130\u0131",
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m",
    "Z\u0351\u036b\u0343a\u0310\u0321l\u0302\u0324g\u033do\u0308\u0337",
    "\u0301 \u0301a a \u0301",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439, \u043c\u0438\u0440!"
    " \u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645"
    " \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22"
    " \u1019\u103c\u1014\u103a\u1019\u102c",
    "\U0001f600 \U0001f389\U0001f389 \u2764\ufe0f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f469\U0001f3fd\u200d"
    "\U0001f680 \U0001f1eb\U0001f1f7 1\ufe0f\u20e3",
    "a\u00a0b \u00a0 c\u00a0\u00a0d\u00a0",
    "\u3000\u6771\u4eac\u3000\u3000\u5927\u962a\u3000",
    "a\u2003b\u2009\u200ac\u2028d\u2029e\u0085f\u1680g\u205fh\u202fi",
    "zero\u200bwidth\u200c \u200dand\u2060 \ufeffmark\u180ex\u00ady",
    "\x00",
    "a\x00b\x01c\x02 \x07\x08\x1b[0m\x7f",
    "\x0b\x0c x\x1c\x1d\x1e\x1fy\x0bz",
    "\x04",
    "a\x04b!\x06! =\x13= (\x14)\x16\x1d",
    "\ufffd\ufffe\uffff \ue000 \U000e0001 \U0010ffff \U00040000\U00080000",
    "def f(x, *, y=None):\n\tif x >= 10 and y != 'a':\n\t\treturn {x: [y]}  # note\n",
    "for (int i = 0; i < n; ++i) {\n        sum += a[i] * b[i];\n    }\n\n\n}",
    "SELECT COUNT(*) FROM t WHERE a<>'b' AND c LIKE '%d_'; -- ok",
    "https://example.com:8080/a/b-c_d.html?q=1&r=%20x#frag user@mail.example.org",
    "C:\\Users\\name\\file.txt ~/.config/app.json $HOME ${X}",
    "\\(x_i^2 + \\frac{1}{2}\\) $$\\sum_{n=1}^{\\infty} n^{-2} = \\pi^2/6$$",
    "<|im_start|>system\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|>",
    "<repo_name><file_sep><jupyter_code> <|im_end|> <|im_start |>",
    "Pneumonoultramicroscopicsilicovolcanoconiosis" * 3,
    "a" * 300,
    "ab" * 100 + "=" * 65 + "-" * 40,
    "HTTPServerError camelCase snake_case SCREAMING_CASE kebab-case",
    "\u01c5 \u02b0x \u00aa\u00ba \u24d0 \u1e9e \ufb01n",
    "!?...!!! ((())) [[]] {{}} <<>> @#$%^&*",
    " !\n ?\t#  @",
]


def expected(model, tokenizer, fields, how, digest):
    """The whole of OUT.json."""
    end = fields["tokenizer.ggml.eos_token_id"].contents()
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(fields["tokenizer.chat_template"].contents())
    prompts = []
    for entry in PROMPTS:
        entry = dict(entry)
        if "chat" in entry:
            entry["rendered"] = template.render(
                messages=[{"role": "user", "content": entry["chat"]}],
                add_generation_prompt=True)
            entry["prompt_tokens"] = tokenizer.encode_with_special(entry["rendered"])
        else:
            entry["prompt_tokens"] = tokenizer.encode(entry["prompt"])
        ids, logprobs, margins = generate(model, entry["prompt_tokens"], end)
        entry |= {"tokens": ids, "text": tokenizer.decode(ids), "logprobs": logprobs,
                  "margins": margins}
        prompts.append(entry)
    texts = [{"text": text, "tokens": tokenizer.encode(text)} for text in TOKENIZER_TEXTS]
    return {"model_sha256": digest, "how": how, "prompts": prompts, "tokenizer": texts}


def to_json(value, depth=0):
    """JSON in ASCII, numbers of a list on one line, floats of 9 significant digits."""
    pad = "  " * depth
    if isinstance(value, dict) and "text" in value and len(value) == 2:
        return "{" + ", ".join(f"{json.dumps(k)}: {to_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, dict):
        rows = [f"{pad}  {json.dumps(k)}: {to_json(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{pad}}}"
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        rows = [f"{pad}  {to_json(v, depth + 1)}" for v in value]
        return "[\n" + ",\n".join(rows) + f"\n{pad}]"
    if isinstance(value, list):
        return "[" + ", ".join(to_json(v) for v in value) + "]"
    if isinstance(value, float):
        return f"{value:.9g}"
    return json.dumps(value, ensure_ascii=True)


# ---------------------------------------------------------------------------------------------
# Rounding noise


def choices(model, prompts):
    """Logits at every step of every prompt when its expected tokens are fed in one pass."""
    return np.concatenate([
        model.forward(p["prompt_tokens"] + p["tokens"][:-1], {}, len(p["tokens"]))
        for p in prompts]).astype(np.float64)


def compare(name, got, exact, chosen):
    """Prints how far the logits `got` lie from `exact`."""
    rows = np.arange(len(chosen))
    logits = got - exact
    logprobs = (log_softmax(got) - log_softmax(exact))[rows, chosen]
    # The difference of two logits decides a greedy choice: best against second.
    top = np.argsort(exact, axis=-1)[:, -2:]
    margins = (got - exact)[rows, top[:, 1]] - (got - exact)[rows, top[:, 0]]
    flips = int((got.argmax(axis=-1) != exact.argmax(axis=-1)).sum())
    print(f"{name:24}" + "".join(
        f"  {what} max {np.abs(d).max():.2e} rms {np.sqrt(np.mean(d * d)):.2e}"
        for what, d in (("logit", logits), ("logprob", logprobs), ("margin", margins))
    ) + f"  other choices {flips}", flush=True)


def noise(reader, prompts):
    """Measures float32 rounding noise against float64, for several orders of summation."""
    chosen = np.concatenate([p["tokens"] for p in prompts])
    exact = choices(Model(reader, np.float64), prompts)
    recorded = np.concatenate([p["logprobs"] for p in prompts])
    step = recorded - log_softmax(exact)[np.arange(len(chosen)), chosen]
    print(f"{len(chosen)} steps; logits rms {np.sqrt(np.mean(exact * exact)):.3g},"
          f" largest {np.abs(exact).max():.3g}; against float64:")
    print(f"{'recorded, step by step':24}  logprob max {np.abs(step).max():.2e}"
          f" rms {np.sqrt(np.mean(step * step)):.2e}")
    model = Model(reader, np.float32)
    plain = None
    for name, product in [("one pass", whole), ("blocks of 64", in_blocks(64)),
                          ("blocks of 8", in_blocks(8)), ("one by one", in_blocks(1))]:
        model.product = product
        got = choices(model, prompts)
        compare(name, got, exact, chosen)
        if plain is None:
            plain = got
        else:
            compare(f"  {name} / one pass", got, plain, chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    parser.add_argument("--noise", action="store_true", help="measure rounding noise as well")
    args = parser.parse_args()

    with open(args.model, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    reader = gguf.GGUFReader(args.model)
    dtype = np.float64 if args.float64 else np.float32
    versions = {m.__name__: m.__version__ for m in (np, tokenizers, regex, jinja2)}
    how = (
        f"Made by llama_numpy.py: a NumPy forward pass in {np.dtype(dtype).name} over weights"
        " expanded by gguf.quants.dequantize, prompt in one pass and then one token at a time"
        " with cached keys and values; tokens are the greedy continuation, at most"
        f" {STEPS}, ending with the end token where it comes first; text leaves special tokens"
        " out; logprobs are a float64 log-softmax over the logits, of the chosen token; margins"
        " are best logit minus second best. A prompt is plain text; a chat is one user message,"
        " rendered by the model file's template, in which special tokens are single ids. The"
        " texts under tokenizer are plain text, never special tokens. Token ids come from PyPI"
        " tokenizers and agree with a plain Python implementation."
        f" Python {sys.version.split()[0]}, gguf {gguf_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    )
    tokenizer = Tokenizer(reader.fields)
    data = expected(Model(reader, dtype), tokenizer, reader.fields, how, digest)
    with open(args.out, "w", encoding="ascii") as f:
        f.write(to_json(data) + "\n")
    for p in data["prompts"]:
        print(f"{p['name']}: {len(p['prompt_tokens'])} + {len(p['tokens'])} tokens, smallest"
              f" margin {min(p['margins']):.3g}\n{p['text']!r}")
    if args.noise:
        noise(reader, data["prompts"])


def gguf_version():
    import importlib.metadata
    return importlib.metadata.version("gguf")


if __name__ == "__main__":
    main()
