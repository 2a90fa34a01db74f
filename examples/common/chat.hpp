// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// The prompt for one user message to a chat model of the ChatML kind.

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/gguf.hpp"
#include "common/tokenizer.hpp"

namespace kvfolia_examples {

/// The system message that a ChatML template writes when a conversation has none of its own: the
/// text between the first `<|im_start|>system`, newline and the `<|im_end|>` after it that is
/// literal text. The template is a Jinja program and is not run: text with a quote or a brace in it
/// is taken for code, and that occurrence is passed over. The newline may be a character or the
/// escape `\n`; other escapes are left as they are.
inline std::optional<std::string> default_system_message(std::string_view chat_template) {
  constexpr std::string_view opening = "<|im_start|>system";
  for (auto at = chat_template.find(opening); at != std::string_view::npos;
       at = chat_template.find(opening, at + opening.size())) {
    std::string_view text = chat_template.substr(at + opening.size());
    if (text.starts_with('\n')) {
      text.remove_prefix(1);
    } else if (text.starts_with("\\n")) {
      text.remove_prefix(2);
    } else {
      continue;
    }
    const auto end = text.find("<|im_end|>");
    if (end == std::string_view::npos) continue;
    text = text.substr(0, end);
    if (text.find_first_of("'\"{}") == std::string_view::npos) return std::string(text);
  }
  return std::nullopt;
}

/// The tokens of
///
///     <|im_start|>system
///     {the template's default system message; this turn only where there is one}<|im_end|>
///     <|im_start|>user
///     {message}<|im_end|>
///     <|im_start|>assistant
///
/// and the newline behind it, after which the model writes its answer. The message is plain text,
/// whatever markers it contains. Throws std::runtime_error when the file's chat template is missing
/// or not ChatML.
inline std::vector<TokenId> chat_prompt(const GgufFile& file, const Tokenizer& tokenizer,
                                        std::string_view message) {
  constexpr std::string_view key = "tokenizer.chat_template";
  const std::string_view chat_template = file.has(key) ? file.get_string(key) : "";
  const auto start = tokenizer.special("<|im_start|>");
  const auto end = tokenizer.special("<|im_end|>");
  const auto has_marker = [&](std::string_view marker) {
    return chat_template.find(marker) != std::string_view::npos;
  };
  if (!start || !end || !has_marker("<|im_start|>") || !has_marker("<|im_end|>")) {
    throw std::runtime_error(file.path() +
                             ": the chat template is missing or not ChatML, the only kind "
                             "supported; --prompt still works");
  }
  std::vector<TokenId> prompt;
  const auto append_text = [&](const std::string& text) {
    const std::vector<TokenId> ids = tokenizer.encode(text);
    prompt.insert(prompt.end(), ids.begin(), ids.end());
  };
  const auto append_turn = [&](const std::string& text) {
    prompt.push_back(*start);
    append_text(text);
    prompt.push_back(*end);
    append_text("\n");
  };
  if (const auto system = default_system_message(chat_template)) append_turn("system\n" + *system);
  append_turn("user\n" + std::string(message));
  prompt.push_back(*start);
  append_text("assistant\n");
  return prompt;
}

}  // namespace kvfolia_examples
