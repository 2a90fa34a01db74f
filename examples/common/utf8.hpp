// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

// Finding where UTF-8 characters end: in a text, and in one that arrives in parts.

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

namespace kvfolia_examples {

/// Bytes of the valid UTF-8 sequence that `text` begins with; 0 when it begins with none. A
/// sequence cut short at the end of `text` counts as none.
inline std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto follows = [&](std::size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const unsigned first = byte(0);
  const unsigned second = byte(1);
  if (text.empty()) return 0;
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    // E0 begins overlong forms, ED surrogates, where the second byte lets them.
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f)) return 0;
    return follows(1) && follows(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    // F0 begins overlong forms, F4 what lies above U+10FFFF.
    if ((first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f)) return 0;
    return follows(1) && follows(2) && follows(3) ? 4 : 0;
  }
  return 0;
}

/// Lets text be printed as its tokens come: holds back a character's first bytes until the rest of
/// it has arrived. Bytes that cannot become valid UTF-8 pass through at once.
class Utf8Stream {
 public:
  /// What can be printed now of everything pushed so far.
  std::string push(std::string_view bytes) {
    held_ += bytes;
    std::size_t end = 0;
    while (end < held_.size() && !is_begun(std::string_view(held_).substr(end))) {
      const std::size_t length = utf8_length(std::string_view(held_).substr(end));
      end += length == 0 ? 1 : length;
    }
    std::string ready = held_.substr(0, end);
    held_.erase(0, end);
    return ready;
  }

  /// What is still held back, for the end of the output. Leaves the stream empty.
  std::string finish() { return std::exchange(held_, {}); }

 private:
  /// Whether `text` is the beginning of a character but not all of it. Every begun character is
  /// completed by the lowest continuation bytes or by the highest.
  static bool is_begun(std::string_view text) {
    if (text.size() > 3) return false;
    const std::string begun(text);
    return utf8_length(begun + "\x80\x80\x80") > text.size() ||
           utf8_length(begun + "\xbf\xbf\xbf") > text.size();
  }

  std::string held_;
};

}  // namespace kvfolia_examples
