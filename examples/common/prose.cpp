// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// HTML is read without a tree: prose needs to know only where elements that are dropped end, and
// whether a tag breaks the line.

#include "common/prose.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/utf8.hpp"

namespace kvfolia_examples {
namespace {

constexpr std::string_view blanks = " \t\r\n\f\v";

// The entities of U+00A0 to U+00FF, in that order.
constexpr auto latin1_names = std::to_array<std::string_view>({
    "nbsp",   "iexcl",  "cent",   "pound",  "curren", "yen",    "brvbar", "sect",   "uml",    "copy",
    "ordf",   "laquo",  "not",    "shy",    "reg",    "macr",   "deg",    "plusmn", "sup2",   "sup3",
    "acute",  "micro",  "para",   "middot", "cedil",  "sup1",   "ordm",   "raquo",  "frac14", "frac12",
    "frac34", "iquest", "Agrave", "Aacute", "Acirc",  "Atilde", "Auml",   "Aring",  "AElig",  "Ccedil",
    "Egrave", "Eacute", "Ecirc",  "Euml",   "Igrave", "Iacute", "Icirc",  "Iuml",   "ETH",    "Ntilde",
    "Ograve", "Oacute", "Ocirc",  "Otilde", "Ouml",   "times",  "Oslash", "Ugrave", "Uacute", "Ucirc",
    "Uuml",   "Yacute", "THORN",  "szlig",  "agrave", "aacute", "acirc",  "atilde", "auml",   "aring",
    "aelig",  "ccedil", "egrave", "eacute", "ecirc",  "euml",   "igrave", "iacute", "icirc",  "iuml",
    "eth",    "ntilde", "ograve", "oacute", "ocirc",  "otilde", "ouml",   "divide", "oslash", "ugrave",
    "uacute", "ucirc",  "uuml",   "yacute", "thorn",  "yuml",
});
static_assert(latin1_names.size() == 96);

constexpr auto other_names = std::to_array<std::pair<std::string_view, std::uint32_t>>({
    {"amp", '&'},       {"lt", '<'},        {"gt", '>'},        {"quot", '"'},      {"apos", '\''},
    {"OElig", 0x152},   {"oelig", 0x153},   {"Scaron", 0x160},  {"scaron", 0x161},  {"Yuml", 0x178},
    {"ensp", 0x2002},   {"emsp", 0x2003},   {"thinsp", 0x2009}, {"ndash", 0x2013},  {"mdash", 0x2014},
    {"lsquo", 0x2018},  {"rsquo", 0x2019},  {"sbquo", 0x201a},  {"ldquo", 0x201c},  {"rdquo", 0x201d},
    {"bdquo", 0x201e},  {"dagger", 0x2020}, {"Dagger", 0x2021}, {"bull", 0x2022},   {"hellip", 0x2026},
    {"permil", 0x2030}, {"prime", 0x2032},  {"Prime", 0x2033},  {"lsaquo", 0x2039}, {"rsaquo", 0x203a},
    {"euro", 0x20ac},   {"trade", 0x2122},  {"larr", 0x2190},   {"uarr", 0x2191},   {"rarr", 0x2192},
    {"darr", 0x2193},   {"minus", 0x2212},  {"ne", 0x2260},     {"le", 0x2264},     {"ge", 0x2265},
});

constexpr auto block_tags = std::to_array<std::string_view>({
    "address", "article",    "aside",  "blockquote", "body",    "br",      "caption",  "center",
    "dd",      "details",    "dialog", "div",        "dl",      "dt",      "fieldset", "figure",
    "footer",  "figcaption", "form",   "h1",         "h2",      "h3",      "h4",       "h5",
    "h6",      "header",     "hr",     "html",       "legend",  "li",      "main",     "nav",
    "ol",      "option",     "p",      "pre",        "section", "summary", "table",    "tbody",
    "td",      "tfoot",      "th",     "thead",      "title",   "tr",      "ul",
});

constexpr auto dropped_tags = std::to_array<std::string_view>({"head", "pre", "script", "style"});

template <class Names>
bool contains(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_alphanumeric(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

std::string utf8(std::uint32_t c) {
  if (c == 0 || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff)) c = 0xfffd;
  const auto byte = [](std::uint32_t value) { return static_cast<char>(static_cast<unsigned char>(value)); };
  const auto next = [&](int shift) { return byte(0x80 | (c >> shift & 0x3f)); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xc0 | c >> 6), next(0)};
  if (c < 0x10000) return {byte(0xe0 | c >> 12), next(6), next(0)};
  return {byte(0xf0 | c >> 18), next(12), next(6), next(0)};
}

/// Collects text, and writes no blank before it knows that more text follows.
class Lines {
 public:
  void text(std::string_view bytes) {
    if (breaks_ && !text_.empty())
      text_ += '\n';
    else if (blank_ && !text_.empty())
      text_ += ' ';
    breaks_ = blank_ = false;
    text_ += bytes;
  }
  void blank() { blank_ = true; }
  void line_break() { breaks_ = true; }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
  bool breaks_ = false;
  bool blank_ = false;
};

class HtmlReader {
 public:
  explicit HtmlReader(std::string_view html) : html_(html) {}

  std::string read() {
    while (at_ < html_.size()) {
      const char c = html_[at_];
      if (c == '<' && skip_markup()) continue;
      if (c == '&' && read_entity()) continue;
      if (blanks.find(c) != std::string_view::npos)
        lines_.blank();
      else
        lines_.text(html_.substr(at_, 1));
      ++at_;
    }
    return lines_.take();
  }

 private:
  std::string_view rest() const { return html_.substr(at_); }
  void skip_past(std::string_view end) {
    const std::size_t found = html_.find(end, at_);
    at_ = found == std::string_view::npos ? html_.size() : found + end.size();
  }

  /// False where the '<' at hand is text.
  bool skip_markup() {
    if (rest().starts_with("<!--")) {
      at_ += 4;
      skip_past("-->");
      return true;
    }
    if (rest().starts_with("<!") || rest().starts_with("<?")) {
      skip_past(">");
      return true;
    }
    const bool closes = rest().starts_with("</");
    const std::string name = tag_name(at_ + (closes ? 2 : 1));
    if (name.empty()) return false;
    if (contains(block_tags, name)) lines_.line_break();
    const bool is_empty = skip_tag();
    if (!closes && !is_empty && contains(dropped_tags, name)) skip_element(name);
    return true;
  }

  std::string tag_name(std::size_t from) const {
    std::size_t end = from;
    while (end < html_.size() && is_alphanumeric(html_[end])) ++end;
    const std::string name = lower(html_.substr(from, end - from));
    return name.empty() || (name[0] >= '0' && name[0] <= '9') ? "" : name;
  }

  /// Attributes may hold a quoted '>'. Returns whether the tag closes its own element, as in `<pre/>`.
  bool skip_tag() {
    char quote = 0;
    for (; at_ < html_.size(); ++at_) {
      const char c = html_[at_];
      if (quote != 0) {
        if (c == quote) quote = 0;
      } else if (c == '"' || c == '\'') {
        quote = c;
      } else if (c == '>') {
        return html_[at_++ - 1] == '/';
      }
    }
    return false;
  }

  void skip_element(const std::string& name) {
    while (at_ < html_.size()) {
      at_ = std::min(html_.find('<', at_), html_.size());
      // HTML allows a head without an end: the body then ends it.
      if (name == "head" && tag_name(at_ + 1) == "body") return;
      if (rest().starts_with("</") && tag_name(at_ + 2) == name) {
        skip_tag();
        return;
      }
      ++at_;
    }
  }

  /// False where the '&' at hand is text.
  bool read_entity() {
    constexpr std::size_t longest = 10;
    const std::size_t end = html_.substr(at_, longest + 2).find(';');
    if (end == std::string_view::npos) return false;
    const std::string_view name = html_.substr(at_ + 1, end - 1);
    std::uint32_t character = 0;
    if (name.starts_with('#')) {
      const bool hex = name.size() > 1 && (name[1] == 'x' || name[1] == 'X');
      const char* first = name.data() + (hex ? 2 : 1);
      const char* last = name.data() + name.size();
      const auto [stop, error] = std::from_chars(first, last, character, hex ? 16 : 10);
      if (stop != last || error == std::errc::invalid_argument) return false;
      if (error != std::errc()) character = 0;
    } else if (const auto latin1 = std::find(latin1_names.begin(), latin1_names.end(), name);
               latin1 != latin1_names.end()) {
      character = 0xa0 + static_cast<std::uint32_t>(latin1 - latin1_names.begin());
    } else {
      const auto other = std::find_if(other_names.begin(), other_names.end(),
                                      [&](const auto& entity) { return entity.first == name; });
      if (other == other_names.end()) return false;
      character = other->second;
    }
    at_ += end + 1;
    if (character < 0x80 && blanks.find(static_cast<char>(character)) != std::string_view::npos)
      lines_.blank();
    else if (character == 0xa0)
      lines_.blank();
    else
      lines_.text(utf8(character));
    return true;
  }

  std::string_view html_;
  std::size_t at_ = 0;
  Lines lines_;
};

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file || file.bad()) throw std::runtime_error(path.string() + ": cannot be read");
  return text;
}

std::string read_handbook(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if ((name.starts_with("sect.") || name.starts_with("the-")) && name.ends_with(".html"))
      names.push_back(name);
  }
  if (error) throw std::runtime_error(folder.string() + ": cannot be read");
  if (names.empty())
    throw std::runtime_error(folder.string() + ": there are no pages sect.*.html or the-*.html here");
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += html_text(read_file(folder / name)) + '\n';
  return text;
}

}  // namespace

std::string html_text(std::string_view html) { return HtmlReader(html).read(); }

Prose read_prose(const std::string& path) {
  std::error_code none;
  if (path.empty()) {
    if (!std::filesystem::is_directory(handbook_folder, none))
      throw std::runtime_error(std::string(handbook_folder) +
                               ": not found; install Debian's package debian-handbook, or give --text");
    return {"debian-handbook", read_handbook(handbook_folder), true};
  }
  const std::filesystem::path file(path);
  const std::string name = (file.has_filename() ? file : file.parent_path()).filename().string();
  if (std::filesystem::is_directory(file, none)) return {name, read_handbook(file), true};
  const std::string ending = lower(file.extension().string());
  std::string text = read_file(file);
  if (ending == ".html" || ending == ".htm") text = html_text(text);
  return {name, std::move(text), false};
}

std::size_t utf8_prefix(std::string_view text, std::size_t characters) {
  std::size_t end = 0;
  for (; characters > 0 && end < text.size(); --characters)
    end += std::max<std::size_t>(1, utf8_length(text.substr(end)));
  return end;
}

}  // namespace kvfolia_examples
