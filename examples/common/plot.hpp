// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// A scatter plot of what policies cost against what they store, as a self-contained SVG file.

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvfolia_examples {

struct PlotPoint {
  std::string label;
  double x;
  double y;
};

struct Plot {
  std::string title;
  std::string subtitle;
  std::string x_label;
  std::string y_label;
  std::vector<PlotPoint> points;
};

/// The lowest y at or below each x: from every x on where that changes, in ascending order of x, so y
/// descends strictly.
std::vector<PlotPoint> best_points(std::span<const PlotPoint> points);

/// Axis x is linear, y logarithmic. A point whose y is not above 0 has no place on it: a line below the
/// plot names it. Points that are not finite are left out.
std::string plot_svg(const Plot& plot);

/// Escapes what XML gives a meaning, and replaces control characters, which it forbids, by blanks.
std::string xml_text(std::string_view text);

}  // namespace kvfolia_examples
