// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/plot.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdio>

namespace kvfolia_examples {
namespace {

struct Box {
  double left, top, right, bottom;
  bool overlaps(const Box& other) const {
    return left < other.right && other.left < right && top < other.bottom && other.top < bottom;
  }
};

constexpr double width = 1080.0;
constexpr double height = 720.0;
constexpr Box frame{90.0, 80.0, width - 30.0, height - 90.0};
constexpr double radius = 4.0;
constexpr double letter_width = 6.4;  // of a sans-serif letter of 11 pixels, rather too wide than too narrow
constexpr double letter_height = 12.0;

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  std::array<char, 1024> buffer{};
  std::va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(buffer.data(), buffer.size(), pattern, arguments);
  va_end(arguments);
  return buffer.data();
}

/// The parts of an axis that lie in the frame. Limits on a logarithmic axis are exponents of ten.
struct Axes {
  double x_low, x_high, y_low, y_high;
  double x_step;

  double x(double value) const {
    return frame.left + (value - x_low) / (x_high - x_low) * (frame.right - frame.left);
  }
  double y(double value) const {
    return frame.bottom - (std::log10(value) - y_low) / (y_high - y_low) * (frame.bottom - frame.top);
  }
};

/// 1, 2 or 5 times a power of ten, so that the range has at most ten steps.
double tick_step(double range) {
  const double power = std::pow(10.0, std::floor(std::log10(range / 10.0)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (range <= 10.0 * factor * power) return factor * power;
  return 10.0 * power;
}

Axes axes_of(const std::vector<PlotPoint>& points) {
  Axes axes{0.0, 16.0, -6.0, 0.0, 2.0};
  if (points.empty()) return axes;
  const auto [left, right] = std::minmax_element(points.begin(), points.end(),
                                                 [](const auto& a, const auto& b) { return a.x < b.x; });
  const auto [low, high] = std::minmax_element(points.begin(), points.end(),
                                               [](const auto& a, const auto& b) { return a.y < b.y; });
  axes.x_step = tick_step(std::max(1.0, right->x - left->x));
  axes.x_low = axes.x_step * (std::ceil(left->x / axes.x_step) - 1.0);
  axes.x_high = axes.x_step * (std::floor(right->x / axes.x_step) + 1.0);
  axes.y_low = std::floor(std::log10(low->y));
  axes.y_high = std::max(axes.y_low + 1.0, std::ceil(std::log10(high->y)));
  return axes;
}

std::string text_at(double x, double y, const char* attributes, std::string_view text) {
  return format("<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes) + xml_text(text) + "</text>\n";
}

std::string draw_axes(const Axes& axes, const Plot& plot) {
  std::string svg;
  const auto line = [&](double x1, double y1, double x2, double y2, const char* colour) {
    svg += format("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", x1, y1, x2, y2,
                  colour);
  };
  const auto steps = static_cast<int>(std::lround((axes.x_high - axes.x_low) / axes.x_step));
  for (int i = 0; i <= steps; ++i) {
    const double value = axes.x_low + i * axes.x_step, x = axes.x(value);
    line(x, frame.top, x, frame.bottom, "#e4e4e4");
    svg += text_at(x, frame.bottom + 18.0, "text-anchor=\"middle\"", format("%g", value));
  }
  for (auto decade = static_cast<int>(axes.y_low); decade <= static_cast<int>(axes.y_high); ++decade) {
    const double y = axes.y(std::pow(10.0, decade));
    line(frame.left, y, frame.right, y, "#d0d0d0");
    svg += text_at(frame.left - 8.0, y + 4.0, "text-anchor=\"end\"", format("1e%d", decade));
    if (decade == static_cast<int>(axes.y_high)) break;
    for (int digit = 2; digit <= 9; ++digit) {
      const double between = axes.y(digit * std::pow(10.0, decade));
      line(frame.left, between, frame.right, between, "#f2f2f2");
    }
  }
  svg += format(
      "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"none\" stroke=\"#404040\"/>\n",
      frame.left, frame.top, frame.right - frame.left, frame.bottom - frame.top);
  svg += text_at(width / 2.0, 34.0, "text-anchor=\"middle\" font-size=\"18\"", plot.title);
  svg += text_at(width / 2.0, 58.0, "text-anchor=\"middle\" fill=\"#505050\"", plot.subtitle);
  svg += text_at((frame.left + frame.right) / 2.0, frame.bottom + 44.0,
                 "text-anchor=\"middle\" font-size=\"14\"", plot.x_label);
  const double middle = (frame.top + frame.bottom) / 2.0;
  const std::string turned =
      format("text-anchor=\"middle\" font-size=\"14\" transform=\"rotate(-90 28 %.1f)\"", middle);
  svg += text_at(28.0, middle, turned.c_str(), plot.y_label);
  return svg;
}

std::string draw_steps(const Axes& axes, const std::vector<PlotPoint>& points) {
  const std::vector<PlotPoint> best = best_points(points);
  if (best.empty()) return {};
  std::string path;
  for (const PlotPoint& point : best)
    path += path.empty() ? format("M%.1f %.1f", axes.x(point.x), axes.y(point.y))
                         : format("H%.1f V%.1f", axes.x(point.x), axes.y(point.y));
  path += format("H%.1f", frame.right);
  return "<path class=\"best\" d=\"" + path +
         "\" fill=\"none\" stroke=\"#d07000\" stroke-width=\"1.5\" stroke-dasharray=\"6 3\"/>\n";
}

/// Writes every label beside its point where there is room, else farther off with a line to it.
class Labels {
 public:
  Labels(const Axes& axes, const std::vector<PlotPoint>& points) : axes_(axes) {
    for (const PlotPoint& point : points) {
      const double x = axes.x(point.x), y = axes.y(point.y);
      taken_.push_back({x - radius, y - radius, x + radius, y + radius});
    }
    const std::vector<PlotPoint> best = best_points(points);
    for (std::size_t i = 0; i < best.size(); ++i) {
      const double x = axes.x(best[i].x), y = axes.y(best[i].y);
      const double end = i + 1 < best.size() ? axes.x(best[i + 1].x) : frame.right;
      const double end_y = i + 1 < best.size() ? axes.y(best[i + 1].y) : y;
      steps_.push_back({x - 1.0, y - 1.0, end + 1.0, y + 1.0});
      steps_.push_back({end - 1.0, y - 1.0, end + 1.0, end_y + 1.0});
    }
  }

  std::string draw(const PlotPoint& point) {
    const double x = axes_.x(point.x), y = axes_.y(point.y);
    const Box box = place(x, y, letter_width * static_cast<double>(point.label.size()));
    taken_.push_back(box);
    std::string svg;
    const double near_x = std::clamp(x, box.left, box.right), near_y = std::clamp(y, box.top, box.bottom);
    if (std::hypot(near_x - x, near_y - y) > 3.0 * radius)
      svg += format("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#909090\"/>\n", x, y,
                    near_x, near_y);
    return svg + text_at(box.left, box.bottom - 2.5, "font-size=\"11\"", point.label);
  }

 private:
  /// A free place near the point: off the step line if there is one nearby, else anywhere; right beside
  /// the point where all are taken.
  Box place(double x, double y, double label_width) const {
    Box box{};
    if (find_place(x, y, label_width, 6, true, box) || find_place(x, y, label_width, 40, false, box))
      return box;
    const double left = std::clamp(x + gap, 2.0, std::max(2.0, frame.right - label_width));
    return {left, y - letter_height / 2.0, left + label_width, y + letter_height / 2.0};
  }

  bool find_place(double x, double y, double label_width, int rings, bool off_steps, Box& box) const {
    for (int ring = 0; ring < rings; ++ring) {
      const double rise = ring * 0.75 * letter_height, shift = gap + ring * 5.0;
      for (const double side : {1.0, -1.0}) {
        const double left = side > 0.0 ? x + shift : x - shift - label_width;
        for (const double up : {-1.0, 1.0}) {
          for (const double box_left : {left, x - label_width / 2.0}) {
            // Centred labels stand above or below the point, never on it.
            const double extra = box_left == left ? 0.0 : gap + letter_height / 2.0;
            const double top = y + up * (rise + extra) - letter_height / 2.0;
            box = {box_left, top, box_left + label_width, top + letter_height};
            if (is_free(box, off_steps)) return true;
          }
        }
      }
    }
    return false;
  }

  bool is_free(const Box& box, bool off_steps) const {
    if (box.left < frame.left + 2.0 || box.right > frame.right - 2.0 || box.top < frame.top + 2.0 ||
        box.bottom > frame.bottom - 2.0)
      return false;
    const auto is_hit = [&](const Box& other) { return box.overlaps(other); };
    return std::none_of(taken_.begin(), taken_.end(), is_hit) &&
           !(off_steps && std::any_of(steps_.begin(), steps_.end(), is_hit));
  }

  static constexpr double gap = radius + 3.0;
  Axes axes_;
  std::vector<Box> taken_;  ///< by points and labels
  std::vector<Box> steps_;  ///< the step line
};

}  // namespace

std::vector<PlotPoint> best_points(std::span<const PlotPoint> points) {
  std::vector<PlotPoint> sorted(points.begin(), points.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const PlotPoint& a, const PlotPoint& b) { return a.x != b.x ? a.x < b.x : a.y < b.y; });
  std::vector<PlotPoint> best;
  for (const PlotPoint& point : sorted)
    if (best.empty() || point.y < best.back().y) best.push_back(point);
  return best;
}

std::string xml_text(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      default: escaped += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return escaped;
}

std::string plot_svg(const Plot& plot) {
  std::vector<PlotPoint> points;
  std::string off_axis;
  for (const PlotPoint& point : plot.points) {
    if (!std::isfinite(point.x) || !std::isfinite(point.y)) continue;
    if (point.y > 0.0)
      points.push_back(point);
    else
      off_axis += (off_axis.empty() ? "" : ", ") + point.label;
  }
  const Axes axes = axes_of(points);
  std::string svg = format(
                        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
                        "viewBox=\"0 0 %.0f %.0f\" "
                        "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\">\n",
                        width, height, width, height) +
                    "<title>" + xml_text(plot.title) +
                    "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  svg += draw_axes(axes, plot);
  svg += draw_steps(axes, points);
  for (const PlotPoint& point : points)
    svg += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\" fill=\"#1060a0\"/>\n", axes.x(point.x),
                  axes.y(point.y), radius);
  Labels labels(axes, points);
  for (const PlotPoint& point : points) svg += labels.draw(point);
  std::string note = "dashed: the best at or below each x";
  if (!off_axis.empty()) note += "; y is 0, not shown: " + off_axis;
  svg += text_at(frame.left, height - 16.0, "fill=\"#505050\"", note);
  return svg + "</svg>\n";
}

}  // namespace kvfolia_examples
