// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Text to evaluate a model on: from text files, HTML pages, and folders of a handbook's pages.

#include <cstddef>
#include <string>
#include <string_view>

namespace kvfolia_examples {

/// The text that a reader of the page sees, in UTF-8. The head, scripts, styles and preformatted parts
/// are left out. Every block element is on a line of its own; blanks are single, empty lines are gone.
/// Any bytes are accepted: what is neither a tag nor a known entity is text.
std::string html_text(std::string_view html);

struct Prose {
  std::string name;
  std::string text;
  bool is_handbook = false;
};

/// The English pages of Debian's handbook, where its package installs them.
inline constexpr const char* handbook_folder = "/usr/share/doc/debian-handbook/html/en-US";

/// A text file as it is, an .html or .htm file through html_text(), or of a folder the pages
/// `sect.*.html` and `the-*.html`, one after the other in the order of their names' bytes. An empty path
/// means handbook_folder. Throws std::runtime_error, which names the path, and Debian's package where
/// that is missing.
Prose read_prose(const std::string& path);

/// Bytes of the first `characters` UTF-8 characters of `text`; all of it where it has fewer. A byte that
/// begins no character counts as one.
std::size_t utf8_prefix(std::string_view text, std::size_t characters);

}  // namespace kvfolia_examples
