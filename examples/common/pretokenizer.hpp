// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// The first step of byte-level BPE: cutting a text into the pieces that are encoded on their own.

#include <functional>
#include <memory>
#include <string_view>

namespace kvfolia_examples {

/// Cuts a text by the rules that a GGUF file names in `tokenizer.ggml.pre`:
///
/// - `gpt-2` (or `default`): the pattern of GPT-2's encoder, by way of PCRE2.
/// - `smollm`: every \p{N} character is a piece of its own, and the pattern of GPT-2 cuts what lies
///   between such characters, blind to them.
///
/// White space is Unicode's White_Space. Letters and numbers are those of the Unicode version that
/// the PCRE2 library was built with.
class Pretokenizer {
 public:
  /// Throws std::runtime_error, naming `rules`, when they are not among the above.
  explicit Pretokenizer(std::string_view rules);

  /// Calls `piece` for consecutive parts of `text` which together are all of it. A byte that is not
  /// part of valid UTF-8 is a piece of its own, and the text ends before it as far as the rules
  /// are concerned.
  void split(std::string_view text, const std::function<void(std::string_view)>& piece) const;

 private:
  struct Pattern;

  /// `text` is valid UTF-8.
  void split_valid(std::string_view text, const std::function<void(std::string_view)>& piece) const;

  std::shared_ptr<const Pattern> pattern_;
};

}  // namespace kvfolia_examples
