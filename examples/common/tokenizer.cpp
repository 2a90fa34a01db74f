// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// Loading of a GGUF file's vocabulary and merges, and the merging itself.

#include "common/tokenizer.hpp"

#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <utility>

namespace kvfolia_examples {
namespace {

/// Values of `tokenizer.ggml.token_type`.
enum class TokenKind : std::int64_t {
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6,
};

[[noreturn]] void fail(const GgufFile& file, const std::string& problem) {
  throw std::runtime_error(file.path() + ": " + problem);
}

/// The code points by which a vocabulary's text stands for bytes: printable Latin-1 bytes for
/// themselves, the others for 256 and on, in order.
constexpr std::array<std::uint16_t, 256> byte_code_points() {
  std::array<std::uint16_t, 256> points{};
  std::uint16_t next = 256;
  for (std::uint16_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    points[byte] = printable ? byte : next++;
  }
  return points;
}

/// The bytes that a text of the vocabulary stands for; nothing when it has other characters.
std::optional<std::string> unspell(std::string_view text) {
  static constexpr auto points = byte_code_points();
  static constexpr auto bytes = [] {
    std::array<std::int16_t, 512> inverse{};
    inverse.fill(-1);
    for (std::size_t byte = 0; byte < points.size(); ++byte) {
      inverse[points[byte]] = static_cast<std::int16_t>(byte);
    }
    return inverse;
  }();
  std::string result;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length != 1 && length != 2) return std::nullopt;  // all code points are below 0x800
    const auto first = static_cast<unsigned char>(text[0]);
    const std::size_t point =
        length == 1 ? first : (first & 0x1fu) << 6 | (static_cast<unsigned char>(text[1]) & 0x3fu);
    if (point >= bytes.size() || bytes[point] < 0) return std::nullopt;
    result += static_cast<char>(bytes[point]);
    text.remove_prefix(length);
  }
  return result;
}

std::uint64_t pair_key(TokenId left, TokenId right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

Pretokenizer make_pretokenizer(const GgufFile& file) {
  const std::string_view model = file.get_string("tokenizer.ggml.model");
  if (model != "gpt2") {
    fail(file, "the tokenizer model '" + std::string(model) + "' is not supported (gpt2 is)");
  }
  const std::string_view rules = file.get_string("tokenizer.ggml.pre");
  try {
    return Pretokenizer(rules);
  } catch (const std::runtime_error& error) {
    fail(file, error.what());
  }
}

}  // namespace

Tokenizer::Tokenizer(const GgufFile& file) : pretokenizer_(make_pretokenizer(file)) {
  load_tokens(file);
  load_merges(file);
  const std::uint32_t eos = file.get_u32("tokenizer.ggml.eos_token_id");
  if (eos >= tokens_.size()) fail(file, "tokenizer.ggml.eos_token_id is not in the vocabulary");
  eos_ = static_cast<TokenId>(eos);
}

void Tokenizer::load_tokens(const GgufFile& file) {
  const auto texts = file.strings("tokenizer.ggml.tokens");
  const auto kinds = file.ints("tokenizer.ggml.token_type");
  if (texts.size() != kinds.size()) {
    fail(file, "tokenizer.ggml.tokens and tokenizer.ggml.token_type differ in length");
  }
  if (texts.empty() || texts.size() > std::numeric_limits<TokenId>::max()) {
    fail(file, "tokenizer.ggml.tokens has an impossible length");
  }
  tokens_.reserve(texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto id = static_cast<TokenId>(i);
    const auto kind = static_cast<TokenKind>(kinds[i]);
    if (kind == TokenKind::normal) {
      auto bytes = unspell(texts[i]);
      if (!bytes || bytes->empty()) {
        fail(file, "token " + std::to_string(id) + " is not spelled in the byte alphabet");
      }
      if (!texts_.emplace(*bytes, id).second) {
        fail(file, "token " + std::to_string(id) + " repeats the text of another");
      }
      tokens_.push_back({std::move(*bytes), true});
    } else {
      specials_.emplace(texts[i], id);
      tokens_.push_back({std::string(texts[i]), kind == TokenKind::user_defined});
    }
  }
  for (std::size_t byte = 0; byte < byte_tokens_.size(); ++byte) {
    const auto found = texts_.find(std::string(1, static_cast<char>(byte)));
    byte_tokens_[byte] = found == texts_.end() ? no_token : found->second;
  }
}

void Tokenizer::load_merges(const GgufFile& file) {
  const auto rules = file.strings("tokenizer.ggml.merges");
  merges_.reserve(rules.size());
  for (std::size_t i = 0; i < rules.size(); ++i) {
    // The byte alphabet has no space, so the only one separates the two sides.
    const std::size_t space = rules[i].find(' ');
    std::optional<std::string> left;
    std::optional<std::string> right;
    if (space != std::string_view::npos) {
      left = unspell(rules[i].substr(0, space));
      right = unspell(rules[i].substr(space + 1));
    }
    if (!left || !right) fail(file, "merge " + std::to_string(i) + " is not two texts");
    const auto left_id = texts_.find(*left);
    const auto right_id = texts_.find(*right);
    const auto result = texts_.find(*left + *right);
    if (left_id == texts_.end() || right_id == texts_.end() || result == texts_.end()) {
      fail(file, "merge " + std::to_string(i) + " is not of tokens in the vocabulary");
    }
    merges_.emplace(pair_key(left_id->second, right_id->second),
                    Merge{static_cast<std::uint32_t>(i), result->second});
  }
}

const Tokenizer::Merge* Tokenizer::find_merge(TokenId left, TokenId right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

std::vector<TokenId> Tokenizer::encode(std::string_view text) const {
  std::vector<TokenId> ids;
  pretokenizer_.split(text, [&](std::string_view piece) { encode_piece(piece, ids); });
  return ids;
}

void Tokenizer::encode_piece(std::string_view piece, std::vector<TokenId>& out) const {
  constexpr std::size_t none = std::numeric_limits<std::size_t>::max();
  struct Symbol {
    TokenId id;
    std::size_t previous;
    std::size_t next;
  };
  std::vector<Symbol> symbols;
  const auto append = [&](TokenId id) {
    if (id == no_token) return;
    const std::size_t index = symbols.size();
    if (index != 0) symbols.back().next = index;
    symbols.push_back({id, index == 0 ? none : index - 1, none});
  };
  for (const char c : piece) append(byte_tokens_[static_cast<unsigned char>(c)]);
  if (symbols.empty()) return;

  // The lowest rank first, among equals the leftmost. Symbols keep their place in `symbols`; a
  // merged pair lives on in its left one. Candidates that a later merge overtook stay in the queue
  // and are recognized by their rank, which tells pairs apart.
  using Candidate = std::pair<std::uint32_t, std::size_t>;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto merge_at = [&](std::size_t left) -> const Merge* {
    const std::size_t right = symbols[left].next;
    return right == none ? nullptr : find_merge(symbols[left].id, symbols[right].id);
  };
  const auto consider = [&](std::size_t left) {
    if (const Merge* merge = merge_at(left)) queue.emplace(merge->rank, left);
  };
  for (std::size_t i = 0; i < symbols.size(); ++i) consider(i);
  while (!queue.empty()) {
    const auto [rank, left] = queue.top();
    queue.pop();
    const Merge* merge = symbols[left].id == no_token ? nullptr : merge_at(left);
    if (merge == nullptr || merge->rank != rank) continue;
    const std::size_t right = symbols[left].next;
    const std::size_t after = symbols[right].next;
    symbols[left].id = merge->result;
    symbols[left].next = after;
    symbols[right].id = no_token;
    if (after != none) symbols[after].previous = left;
    if (symbols[left].previous != none) consider(symbols[left].previous);
    consider(left);
  }
  // The first symbol is never the right one of a pair.
  for (std::size_t i = 0; i != none; i = symbols[i].next) out.push_back(symbols[i].id);
}

std::string_view Tokenizer::decode(TokenId id, SpecialTokens specials) const {
  if (id < 0 || id >= vocab_size()) {
    throw std::out_of_range("there is no token " + std::to_string(id));
  }
  const Token& token = tokens_[static_cast<std::size_t>(id)];
  return token.is_text || specials == SpecialTokens::show ? std::string_view(token.bytes)
                                                          : std::string_view();
}

std::optional<TokenId> Tokenizer::special(std::string_view text) const {
  const auto found = specials_.find(std::string(text));
  return found == specials_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace kvfolia_examples
