// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/prose.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "support/catch.hpp"

using namespace kvfolia_examples;

namespace {

/// A folder of its own, gone afterwards.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "prose-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return (path_ / name).string();
  }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("block elements are lines, other tags vanish, blanks are single") {
  CHECK(html_text("") == "");
  CHECK(html_text("plain") == "plain");
  CHECK(html_text("<div>\n\t\tOne <em>t</em>wo\n three\t</div><div></div>\n\n<p>four</p>") ==
        "One two three\nfour");
  CHECK(html_text("a<br/>b<hr>c<span> d</span> <b>e</b>") == "a\nb\nc d e");
  CHECK(html_text("<UL><LI>one</LI><li>two</li></UL>") == "one\ntwo");
  CHECK(html_text("<table><tr><td>1</td><td>2</td></tr></table>") == "1\n2");
}

TEST_CASE("heads, scripts, styles and preformatted parts are dropped") {
  CHECK(html_text("<html><head><title>t</title></head><body>a</body></html>") == "a");
  CHECK(html_text("<head><title>t</title><body>a") == "a");
  CHECK(html_text("<header>a</header>b") == "a\nb");
  CHECK(html_text("a<script>if (1 < 2) x = '<p>';</script>b") == "ab");
  CHECK(html_text("a<STYLE>p { }</style >b") == "ab");
  CHECK(html_text("a<pre class=\"screen\">x <strong>y</strong>\n</pre>b") == "a\nb");
  CHECK(html_text("a<pre/>b") == "a\nb");
  CHECK(html_text("a<script>never closed") == "a");
  CHECK(html_text("<?xml version=\"1.0\"?><!DOCTYPE html>a<!-- b > c -->d") == "ad");
}

TEST_CASE("only tags are tags") {
  CHECK(html_text("1 < 2 and 3 <4") == "1 < 2 and 3 <4");
  CHECK(html_text("<a title=\"x > y\" href='<p>'>b</a>") == "b");
  CHECK(html_text("a <b") == "a");
  CHECK(html_text("a <!-- b") == "a");
  CHECK(html_text("<") == "<");
  CHECK(html_text("</") == "</");
}

TEST_CASE("entities become characters, unknown ones stay") {
  CHECK(html_text("&lt;p&gt; &amp;amp; &quot;&apos;") == "<p> &amp; \"'");
  CHECK(html_text("&eacute;&Agrave;&yuml;&iexcl;&divide;") == "\u00e9\u00c0\u00ff\u00a1\u00f7");
  CHECK(html_text("&ldquo;a&rdquo;&ndash;&mdash;&hellip;&euro;") == "\u201ca\u201d\u2013\u2014\u2026\u20ac");
  CHECK(html_text("&#65;&#x42;&#X1F600;&#233;") == "AB\U0001F600\u00e9");
  CHECK(html_text("a&nbsp;&#160;b &#32; &#10; c") == "a b c");
  CHECK(html_text("&#0;&#xd800;&#x110000;&#99999999;") == "\ufffd\ufffd\ufffd\ufffd");
  for (const char* text : {"AT&T", "&", "&;", "&nosuch;", "&#;", "&#x;", "&#12a;", "&amp", "a & b; c"})
    CHECK(html_text(text) == text);
}

TEST_CASE("a prefix counts characters, not bytes") {
  CHECK(utf8_prefix("", 3) == 0);
  CHECK(utf8_prefix("abc", 2) == 2);
  CHECK(utf8_prefix("abc", 4) == 3);
  CHECK(utf8_prefix("\u00e9\u20ac\U0001F600x", 1) == 2);
  CHECK(utf8_prefix("\u00e9\u20ac\U0001F600x", 3) == 9);
  CHECK(utf8_prefix("\xff\xfe"
                    "a",
                    2) == 2);
}

TEST_CASE("text files are taken as they are, pages and folders of pages as text") {
  const Folder folder;
  CHECK(read_prose(folder.write("a.txt", "<p>x  &lt;\n\n\n")).text == "<p>x  &lt;\n\n\n");
  const Prose page = read_prose(folder.write("b.HTM", "<p>x</p>"));
  CHECK(page.text == "x");
  CHECK(page.name == "b.HTM");
  CHECK(!page.is_handbook);
  CHECK_THROWS_WITH(read_prose(folder.path()), kvfolia_tests::contains_text("sect.*.html"));
  folder.write("the-end.html", "<p>5</p>");
  folder.write("sect.b.html", "<p>4</p>");
  folder.write("sect.a-b.html", "<p>2</p>");
  folder.write("sect.a.html", "<p>3</p>");
  folder.write("sect.B.html", "<p>1</p>");
  folder.write("index.html", "<p>not this</p>");
  folder.write("sect.c.txt", "nor this");
  const Prose handbook = read_prose(folder.path() + "/");
  CHECK(handbook.text == "1\n2\n3\n4\n5\n");
  CHECK(handbook.is_handbook);
  CHECK(handbook.name == std::filesystem::path(folder.path()).filename().string());
}

TEST_CASE("files that cannot be read are named") {
  CHECK_THROWS_WITH(read_prose("/nowhere/text"), kvfolia_tests::contains_text("/nowhere/text"));
  if (!std::filesystem::exists(handbook_folder))
    CHECK_THROWS_WITH(read_prose(""), kvfolia_tests::contains_text("package debian-handbook"));
}
