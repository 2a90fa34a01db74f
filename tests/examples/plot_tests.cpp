// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/plot.hpp"

#include <cmath>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "support/catch.hpp"

using namespace kvfolia_examples;
using namespace kvfolia_tests;

namespace {

/// The numbers that the pattern's groups match, match after match.
std::vector<std::vector<double>> numbers(const std::string& text, const std::string& pattern) {
  std::vector<std::vector<double>> found;
  const std::regex regex(pattern);
  for (std::sregex_iterator match(text.begin(), text.end(), regex), end; match != end; ++match) {
    found.emplace_back();
    for (std::size_t i = 1; i < match->size(); ++i) found.back().push_back(std::stod((*match)[i]));
  }
  return found;
}

/// Whether all elements are closed in the order that XML asks for, and no text holds a bare '&' or '<'.
bool is_well_formed(const std::string& xml) {
  std::vector<std::string> open;
  const std::regex tag("<(!--[^>]*--|/?[a-z]+(?: [a-zA-Z0-9:-]+=\"[^\"<]*\")*/?)>"),
      entity("&(amp|lt|gt|quot);");
  std::string text = std::regex_replace(xml, entity, "");
  if (text.find('&') != std::string::npos) return false;
  for (std::sregex_iterator match(text.begin(), text.end(), tag), end; match != end; ++match) {
    const std::string inside = (*match)[1];
    if (inside.starts_with("!--") || inside.ends_with('/')) continue;
    if (!inside.starts_with('/')) {
      open.push_back(inside.substr(0, inside.find(' ')));
    } else {
      if (open.empty() || open.back() != inside.substr(1)) return false;
      open.pop_back();
    }
  }
  text = std::regex_replace(text, tag, "");
  return open.empty() && text.find('<') == std::string::npos;
}

Plot plot_of(std::vector<PlotPoint> points) {
  return {
      .title = "a < b & c", .subtitle = "\"s\"", .x_label = "x", .y_label = "y", .points = std::move(points)};
}

const std::string circle = "<circle cx=\"([0-9.]+)\" cy=\"([0-9.]+)\"";
const std::string label = "<text x=\"([0-9.-]+)\" y=\"([0-9.-]+)\" font-size=\"11\"[^>]*>";

}  // namespace

TEST_CASE("the best points descend as bits grow") {
  const std::vector<PlotPoint> points{{"d", 8, 1e-3}, {"b", 4, 1e-1}, {"a", 4, 3e-1},
                                      {"e", 9, 2e-3}, {"c", 5, 1e-1}, {"f", 16, 1e-5}};
  const std::vector<PlotPoint> best = best_points(points);
  REQUIRE(best.size() == 3);
  CHECK(best[0].label == "b");
  CHECK(best[1].label == "d");
  CHECK(best[2].label == "f");
  CHECK(best_points({}).empty());
}

TEST_CASE("the plot of two points has them where the axes say") {
  const std::string svg = plot_svg(plot_of({{"one", 4.0, 1e-1}, {"two", 8.0, 1e-3}}));
  CHECK(is_well_formed(svg));
  // x goes from 3.5 to 8.5 in steps of 0.5 and y from 1e-3 to 1e-1, in a frame from (90, 80) to (1050, 630).
  const auto points = numbers(svg, circle);
  REQUIRE(points.size() == 2);
  CHECK(points[0][0] == Approx(90.0 + 960.0 * 0.1));
  CHECK(points[0][1] == Approx(80.0));
  CHECK(points[1][0] == Approx(90.0 + 960.0 * 0.9));
  CHECK(points[1][1] == Approx(630.0));
  CHECK(svg.find("d=\"M186.0 80.0H954.0 V630.0H1050.0\"") != std::string::npos);
  for (const char* text : {">one<", ">two<", ">3.5<", ">8.5<", ">1e-3<", ">1e-1<", "a &lt; b &amp; c"})
    CHECK(svg.find(text) != std::string::npos);
}

TEST_CASE("points without a place on the axes are named or left out") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::string svg =
      plot_svg(plot_of({{"fp32", 32.0, 0.0}, {"broken", 8.0, nan}, {"int8", 8.25, 5e-4}}));
  CHECK(is_well_formed(svg));
  CHECK(numbers(svg, circle).size() == 1);
  CHECK(svg.find("not shown: fp32<") != std::string::npos);
  CHECK(svg.find("broken") == std::string::npos);
  CHECK(svg.find("nan") == std::string::npos);
  const std::string empty = plot_svg(plot_of({}));
  CHECK(is_well_formed(empty));
  CHECK(numbers(empty, circle).empty());
  CHECK(empty.find("class=\"best\"") == std::string::npos);
}

TEST_CASE("twenty-five points lie in the frame and their labels on no other") {
  std::vector<PlotPoint> points;
  for (int i = 0; i < 25; ++i)
    points.push_back({"int8+centered/int4-g32+rotated+sink:" + std::to_string(10 + i), 4.25 + 0.25 * (i % 7),
                      std::pow(10.0, -3.0 + 0.1 * i)});
  const std::string svg = plot_svg(plot_of(points));
  CHECK(is_well_formed(svg));
  const auto drawn = numbers(svg, circle);
  REQUIRE(drawn.size() == points.size());
  for (const auto& point : drawn) {
    CHECK((point[0] >= 90.0 && point[0] <= 1050.0));
    CHECK((point[1] >= 80.0 && point[1] <= 630.0));
  }
  // A label of 38 letters is about 240 wide and 11 high.
  const auto labels = numbers(svg, label);
  REQUIRE(labels.size() == points.size());
  for (std::size_t i = 0; i < labels.size(); ++i)
    for (std::size_t k = 0; k < i; ++k)
      CHECK(
          (std::abs(labels[i][0] - labels[k][0]) >= 230.0 || std::abs(labels[i][1] - labels[k][1]) >= 11.0));
}

TEST_CASE("the step line only descends") {
  std::vector<PlotPoint> points;
  for (int i = 0; i < 12; ++i) points.push_back({"p", 16.0 - i, std::pow(10.0, -6.0 + (i * 7 % 12) * 0.3)});
  const std::string svg = plot_svg(plot_of(points));
  const auto steps = numbers(svg, "H([0-9.]+) V([0-9.]+)");
  REQUIRE(!steps.empty());
  for (std::size_t i = 1; i < steps.size(); ++i) {
    CHECK(steps[i][0] > steps[i - 1][0]);
    CHECK(steps[i][1] > steps[i - 1][1]);  // down the page
  }
}

TEST_CASE("text is escaped for XML") {
  CHECK(xml_text("a<b>&\"c\"\n\x01") == "a&lt;b&gt;&amp;&quot;c&quot;  ");
  CHECK(xml_text("") == "");
}
