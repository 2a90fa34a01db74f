// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The rules' regular expressions, and the loop that cuts by them.

#include "common/pretokenizer.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>

#include "common/utf8.hpp"

namespace kvfolia_examples {
namespace {

std::string error_text(int code) {
  std::array<PCRE2_UCHAR, 128> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

/// The pattern for `rules`, or an empty one for unknown rules.
std::string pattern_for(std::string_view rules) {
  // Unicode's White_Space spelled out, since PCRE2's \s takes U+180E for white space as well.
  const std::string space =
      R"(\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
  const std::string words = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+)";
  const std::string symbols = " ?[^" + space + R"(\p{L}\p{N}]+)";
  // White space leaves its last character to the word that follows it, if one does.
  if (rules == "gpt-2" || rules == "default") {
    return words + R"(| ?\p{N}+|)" + symbols + "|[" + space + "]+(?![^" + space + "])|[" + space + "]+";
  }
  // A digit ends the stretch that GPT-2's pattern sees, so here it is no such word.
  if (rules == "smollm") {
    return words + R"(|\p{N}|)" + symbols + "|[" + space + "]+(?![^" + space + R"(\p{N}])|[)" + space + "]+";
  }
  return {};
}

struct FreeMatch {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

}  // namespace

struct Pretokenizer::Pattern {
  explicit Pattern(const std::string& expression) {
    int error = 0;
    PCRE2_SIZE where = 0;
    code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(), PCRE2_UTF,
                         &error, &where, nullptr);
    if (code == nullptr) {
      throw std::runtime_error("PCRE2 cannot compile the pre-tokenizer: " + error_text(error));
    }
    // Where PCRE2 has no JIT this fails, and matching interprets the pattern.
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;
  ~Pattern() { pcre2_code_free(code); }

  pcre2_code* code;
};

Pretokenizer::Pretokenizer(std::string_view rules) {
  const std::string expression = pattern_for(rules);
  if (expression.empty()) {
    throw std::runtime_error("the pre-tokenizer '" + std::string(rules) +
                             "' is not supported (smollm, gpt-2 and default are)");
  }
  pattern_ = std::make_shared<const Pattern>(expression);
}

void Pretokenizer::split(std::string_view text, const std::function<void(std::string_view)>& piece) const {
  std::size_t begin = 0;
  std::size_t end = 0;
  while (end < text.size()) {
    if (const std::size_t length = utf8_length(text.substr(end)); length != 0) {
      end += length;
      continue;
    }
    split_valid(text.substr(begin, end - begin), piece);
    piece(text.substr(end, 1));
    begin = ++end;
  }
  split_valid(text.substr(begin), piece);
}

void Pretokenizer::split_valid(std::string_view text,
                               const std::function<void(std::string_view)>& piece) const {
  const std::unique_ptr<pcre2_match_data, FreeMatch> match(
      pcre2_match_data_create_from_pattern(pattern_->code, nullptr));
  if (match == nullptr) throw std::bad_alloc();
  std::size_t position = 0;
  while (position < text.size()) {
    // `split` has checked the text; a check here would read all of it again for every piece.
    const int matched = pcre2_match(pattern_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                    position, PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK, match.get(), nullptr);
    // Every character is a letter, a number, white space or none of these, so one always matches.
    if (matched < 0) throw std::runtime_error("PCRE2 cannot match: " + error_text(matched));
    const std::size_t end = pcre2_get_ovector_pointer(match.get())[1];
    piece(text.substr(position, end - position));
    position = end;
  }
}

}  // namespace kvfolia_examples
