// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// The byte-level BPE tokenizer that a GGUF file describes.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/gguf.hpp"
#include "common/pretokenizer.hpp"
#include "common/utf8.hpp"

namespace kvfolia_examples {

using TokenId = std::int32_t;

/// What `decode` makes of tokens that stand for no text, such as the end of a turn.
enum class SpecialTokens { hide, show };

/// Holds copies of what it needs, so the file may be closed. Any thread may use it at any time.
class Tokenizer {
 public:
  /// Throws std::runtime_error, which starts with the file's path, when the file's tokenizer is not
  /// of the model `gpt2`, when its pre-tokenizer is unknown, or when its tables are inconsistent.
  explicit Tokenizer(const GgufFile& file);

  /// Any bytes are accepted. The text of special tokens is nothing special here, so a user's text
  /// cannot end its own turn.
  ///
  /// The decoded tokens concatenate to `text`, except that a byte for which the vocabulary has no
  /// token is left out before merging, as the reference tokenizers do (SmolLM2 lacks 21, of which
  /// only six control characters and the first bytes of unassigned planes occur in UTF-8).
  std::vector<TokenId> encode(std::string_view text) const;

  /// The bytes of one token, which may begin or end inside a character. Throws std::out_of_range
  /// when `id` is not below `vocab_size()`.
  std::string_view decode(TokenId id, SpecialTokens specials = SpecialTokens::hide) const;

  /// The special token with exactly this text.
  std::optional<TokenId> special(std::string_view text) const;

  TokenId eos() const { return eos_; }
  TokenId vocab_size() const { return static_cast<TokenId>(tokens_.size()); }

 private:
  static constexpr TokenId no_token = -1;

  struct Token {
    std::string bytes;
    bool is_text;  ///< false for those that `decode` hides
  };

  /// A merge of two neighbours. The lower the rank, the earlier it is done.
  struct Merge {
    std::uint32_t rank;
    TokenId result;
  };

  void load_tokens(const GgufFile& file);
  void load_merges(const GgufFile& file);
  const Merge* find_merge(TokenId left, TokenId right) const;
  void encode_piece(std::string_view piece, std::vector<TokenId>& out) const;

  Pretokenizer pretokenizer_;
  std::vector<Token> tokens_;
  std::unordered_map<std::string, TokenId> texts_;
  std::unordered_map<std::string, TokenId> specials_;
  std::unordered_map<std::uint64_t, Merge> merges_;  ///< by left id << 32 | right id
  std::array<TokenId, 256> byte_tokens_{};
  TokenId eos_ = no_token;
};

}  // namespace kvfolia_examples
