// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// Tests of the pre-tokenizer's rules, of the merging against a plain loop, and of round trips.

#include <map>
#include <random>

#include "common/tokenizer.hpp"
#include "examples/gguf_builder.hpp"

using namespace kvfolia_examples;
using namespace kvfolia_examples::testing;

namespace {

using Pieces = std::vector<std::string>;
using Ids = std::vector<TokenId>;

Pieces cut(std::string_view rules, std::string_view text) {
  Pieces pieces;
  Pretokenizer(rules).split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

std::string decode_all(const Tokenizer& tokenizer, const Ids& ids) {
  std::string text;
  for (const TokenId id : ids) text += tokenizer.decode(id);
  return text;
}

Tokenizer make(const TinyVocabulary& vocabulary) {
  return Tokenizer(open_bytes(vocabulary.builder().build()));
}

/// Random bytes of which about half are characters of several bytes.
std::string random_bytes(std::mt19937& random, std::size_t length) {
  static const Pieces parts{"a",  "b", "é", "漢",     "😀",      " ",      "\n",           "7",
                            "'s", "!", "²", "\u00a0", "\u3000", "\u0085", "\xed\xa0\x80", "\xf4"};
  std::string text;
  while (text.size() < length) {
    text += random() % 2 == 0 ? parts[random() % parts.size()]
                              : std::string(1, static_cast<char>(random() & 255u));
  }
  return text;
}

const TinyVocabulary letters{.merges = {{"a", "b"},
                                        {"b", "c"},
                                        {"ab", "c"},
                                        {"c", "c"},
                                        {"abc", "abc"},
                                        {" ", "a"},
                                        {"cc", "cc"},
                                        {"\xc3", "\xa9"},
                                        {" a", "bc"}}};

}  // namespace

TEST_CASE("smollm cuts words with their space, and every number character alone") {
  CHECK(cut("smollm", "").empty());
  CHECK(cut("smollm", "Hello world") == Pieces{"Hello", " world"});
  CHECK(cut("smollm", "in 2024!") == Pieces{"in", " ", "2", "0", "2", "4", "!"});
  CHECK(cut("smollm", "a1b²c½") == Pieces{"a", "1", "b", "²", "c", "½"});
  CHECK(cut("smollm", "I'm we'll it's 's 'S") ==
        Pieces{"I", "'m", " we", "'ll", " it", "'s", " '", "s", " '", "S"});
  CHECK(cut("smollm", "x == y;\n") == Pieces{"x", " ==", " y", ";", "\n"});
  CHECK(cut("smollm", "naïve 漢字😀") == Pieces{"naïve", " 漢字", "😀"});
}

TEST_CASE("white space leaves its last character to a word, but not to a number") {
  CHECK(cut("smollm", "a   b") == Pieces{"a", "  ", " b"});
  CHECK(cut("smollm", "a \n\tb") == Pieces{"a", " \n", "\t", "b"});
  CHECK(cut("smollm", "a  ") == Pieces{"a", "  "});
  CHECK(cut("smollm", "a   7") == Pieces{"a", "   ", "7"});
  CHECK(cut("gpt-2", "a   7") == Pieces{"a", "  ", " 7"});
  CHECK(cut("gpt-2", "in 2024!") == Pieces{"in", " 2024", "!"});
  CHECK(cut("default", "in 2024!") == Pieces{"in", " 2024", "!"});
}

TEST_CASE("white space is Unicode's White_Space") {
  for (const std::string space : {"\t", "\n", "\v", "\f", "\r", " ", "\u0085", "\u00a0", "\u1680", "\u2000",
                                  "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"}) {
    INFO(space);
    CHECK(cut("smollm", "!" + space + space + "!") ==
          (space == " " ? Pieces{"!", " ", " !"} : Pieces{"!", space, space, "!"}));
  }
  // The zero-width space, the Mongolian vowel separator, the word joiner, the byte order mark.
  for (const std::string other : {"\u200b", "\u180e", "\u2060", "\ufeff", "\x1c", "\x1f"}) {
    INFO(other);
    CHECK(cut("smollm", "!" + other + "!") == Pieces{"!" + other + "!"});
  }
}

TEST_CASE("bytes that are not UTF-8 are pieces of their own") {
  CHECK(cut("smollm", "a\xff b") == Pieces{"a", "\xff", " b"});
  CHECK(cut("smollm", "\xe6\xbc") == Pieces{"\xe6", "\xbc"});
  CHECK(cut("smollm", "\xc0\x80") == Pieces{"\xc0", "\x80"});              // overlong
  CHECK(cut("smollm", "\xed\xa0\x80") == Pieces{"\xed", "\xa0", "\x80"});  // a surrogate
  CHECK(cut("smollm", "\xf4\x90\x80\x80") == Pieces{"\xf4", "\x90", "\x80", "\x80"});
  CHECK(cut("smollm", "a \xff") == Pieces{"a", " ", "\xff"});
}

TEST_CASE("long runs of anything are cut without running out of stack or matching limits") {
  const std::string letter(1000000, 'x');
  const std::string blank(1000000, ' ');
  CHECK(cut("smollm", letter).size() == 1);
  CHECK(cut("smollm", blank + "y").size() == 2);
  CHECK(cut("smollm", std::string(1000000, '!')).size() == 1);
}

TEST_CASE("merges are done by rank, then from the left") {
  const Tokenizer tokenizer = make(letters);
  const TokenId ab = 256, bc = 257, abc = 258, cc = 259, abcabc = 260, spaced_a = 261, cccc = 262;
  CHECK(tokenizer.encode("").empty());
  CHECK(tokenizer.encode("a") == Ids{'a'});
  CHECK(tokenizer.encode("ab") == Ids{ab});
  CHECK(tokenizer.encode("bc") == Ids{bc});
  CHECK(tokenizer.encode("abc") == Ids{abc});
  CHECK(tokenizer.encode("bbc") == Ids{'b', bc});
  CHECK(tokenizer.encode("ccc") == Ids{cc, 'c'});
  CHECK(tokenizer.encode("abcc") == Ids{abc, 'c'});
  CHECK(tokenizer.encode("abcabcabc") == Ids{abcabc, abc});
  CHECK(tokenizer.encode("cccccccc") == Ids{cccc, cccc});
  // "ab" outranks " a", so " abc" is never made of {" a", "bc"}.
  CHECK(tokenizer.encode("c abc") == Ids{'c', ' ', abc});
  CHECK(tokenizer.encode("c ac") == Ids{'c', spaced_a, 'c'});
  CHECK(tokenizer.encode("é") == Ids{263});
  CHECK(tokenizer.decode(263) == "é");
}

TEST_CASE("the merging equals a loop that does the best merge over and over") {
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const Tokenizer tokenizer = make(letters);
  std::map<std::pair<std::string, std::string>, std::size_t> ranks;
  for (std::size_t i = 0; i < letters.merges.size(); ++i) ranks[letters.merges[i]] = i;
  for (int trial = 0; trial < 500; ++trial) {
    Pieces parts;
    for (auto length = random() % 40; length > 0; --length) {
      parts.emplace_back(1, "abc"[random() % 3]);
    }
    std::string word;
    for (const std::string& part : parts) word += part;
    for (;;) {
      std::size_t best = ranks.size();
      std::size_t where = 0;
      for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto found = ranks.find({parts[i], parts[i + 1]});
        if (found != ranks.end() && found->second < best) best = found->second, where = i;
      }
      if (best == ranks.size()) break;
      parts[where] += parts[where + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(where) + 1);
    }
    Pieces got;
    for (const TokenId id : tokenizer.encode(word)) got.emplace_back(tokenizer.decode(id));
    REQUIRE(got == parts);
  }
  CHECK(tokenizer.encode(std::string(1000000, 'c')).size() == 250000);
}

TEST_CASE("every byte string comes back from its tokens") {
  const unsigned seed = std::random_device{}();
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const Tokenizer tokenizer = make(letters);
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  CHECK(decode_all(tokenizer, tokenizer.encode(all)) == all);
  for (std::size_t length = 0; length < 300; ++length) {
    const std::string text = random_bytes(random, length);
    REQUIRE(decode_all(tokenizer, tokenizer.encode(text)) == text);
  }
}

TEST_CASE("a byte that the vocabulary lacks is left out, and its neighbours merge") {
  TinyVocabulary vocabulary = letters;
  vocabulary.without = "\xf1";
  const Tokenizer tokenizer = make(vocabulary);
  CHECK(decode_all(tokenizer, tokenizer.encode("a\xf1z")) == "az");
  CHECK(tokenizer.encode("\xf1").empty());
}

TEST_CASE("special tokens are found by name, hidden in text, and not read from it") {
  const Tokenizer tokenizer = make(letters);
  CHECK(tokenizer.special("<|im_end|>") == letters.end());
  CHECK(tokenizer.special("<|im_start|>") == letters.end() - 1);
  CHECK_FALSE(tokenizer.special("ab").has_value());
  CHECK(tokenizer.eos() == letters.end());
  CHECK(tokenizer.vocab_size() == letters.end() + 1);
  CHECK(tokenizer.decode(tokenizer.eos()).empty());
  CHECK(tokenizer.decode(tokenizer.eos(), SpecialTokens::show) == "<|im_end|>");
  for (const TokenId id : tokenizer.encode("<|im_end|>")) CHECK(id < 256);
  CHECK_THROWS_AS(tokenizer.decode(-1), std::out_of_range);
  CHECK_THROWS_AS(tokenizer.decode(tokenizer.vocab_size()), std::out_of_range);
}

TEST_CASE("a tokenizer of another kind, or a broken one, is refused by name") {
  const auto refused = [](const GgufBuilder& b, std::string_view part) {
    const GgufFile file = open_bytes(b.build());
    const std::string message = error_of([&] { Tokenizer{file}; });
    check_mentions(message, part);
    CHECK(message.starts_with(file.path() + ": "));
    CHECK(message.rfind(file.path()) == 0);
  };
  refused(GgufBuilder(), ": the key 'tokenizer.ggml.model' is missing");
  refused(GgufBuilder().text("tokenizer.ggml.model", "gpt2"), ": the key 'tokenizer.ggml.pre' is missing");
  refused(TinyVocabulary{.model = "llama"}.builder(), "'llama'");
  refused(TinyVocabulary{.pre = "qwen2"}.builder(), "'qwen2'");

  const auto tables = [](const std::vector<std::string>& tokens, const std::string& merge,
                         std::uint32_t eos) {
    GgufBuilder b;
    b.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "smollm");
    b.texts("tokenizer.ggml.tokens", tokens).ints("tokenizer.ggml.token_type", {1, 1, 1});
    return b.texts("tokenizer.ggml.merges", {merge}).u32("tokenizer.ggml.eos_token_id", eos);
  };
  CHECK_NOTHROW(Tokenizer(open_bytes(tables({"a", "b", "ab"}, "a b", 2).build())));
  refused(tables({"a", "b", "ab"}, "a b", 3), "eos_token_id");
  refused(tables({"a", "b", "ab"}, "a c", 2), "merge 0");
  refused(tables({"a", "b", "ab"}, "b a", 2), "merge 0");
  refused(tables({"a", "b", "ab"}, "ab", 2), "merge 0");
  refused(tables({"a", "b", "a b"}, "a b", 2), "token 2");
  refused(tables({"a", "b", ""}, "a b", 2), "token 2");
  refused(tables({"a", "b", "\xff"}, "a b", 2), "token 2");
  refused(tables({"a", "b", "漢"}, "a b", 2), "token 2");
  refused(tables({"a", "b", "b"}, "a b", 2), "token 2 repeats");
  refused(tables({"a", "b"}, "a b", 1), "differ in length");
}

TEST_CASE("a stream prints characters when they are complete") {
  const std::string text = "aé漢😀z";
  for (std::size_t first = 0; first <= text.size(); ++first) {
    for (std::size_t second = first; second <= text.size(); ++second) {
      Utf8Stream stream;
      std::string printed;
      for (const std::string& part :
           {text.substr(0, first), text.substr(first, second - first), text.substr(second)}) {
        const std::string ready = stream.push(part);
        for (std::size_t i = 0; i < ready.size();) {
          const std::size_t length = utf8_length(std::string_view(ready).substr(i));
          REQUIRE(length > 0);
          i += length;
        }
        printed += ready;
      }
      CHECK(printed == text);
      CHECK(stream.finish().empty());
    }
  }
  Utf8Stream stream;
  CHECK(stream.push("a\xff") == "a\xff");  // never part of a character
  CHECK(stream.push("\xe6\xbc") == "");
  CHECK(stream.push("b") ==
        "\xe6\xbc"
        "b");
  CHECK(stream.push("\xf0\x9f\x98") == "");
  CHECK(stream.finish() == "\xf0\x9f\x98");
  CHECK(stream.push("\xed\xa0") == "\xed\xa0");  // begins a surrogate, so no character
  CHECK(stream.push("\xe0") == "");
  CHECK(stream.push("\xa0\x80") == "\u0800");
}
