// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "kvfolia/quant/compact.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kvfolia/core/page_format.hpp"
#include "kvfolia/layout/gqa.hpp"
#include "quant/quant_cases.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace kvfolia;
using namespace kvfolia_tests;

namespace {

constexpr int tokens = 64;

/// Channels of different sizes and biases.
std::vector<float> make_rows(int dims, std::uint64_t seed) {
  Random random(Random(seed).next());
  std::vector<float> size, bias, rows;
  for (int d = 0; d < dims; ++d) {
    size.push_back(static_cast<float>(std::exp(2.0 * random.uniform() - 1.0)));
    bias.push_back(5.0f * random.gauss());
  }
  for (int t = 0; t < tokens; ++t)
    for (std::size_t d = 0; d < size.size(); ++d) rows.push_back(random.gauss() * size[d] + bias[d]);
  return rows;
}

/// Errors within half a scale, and scales that are no larger than ranges and roundings make them.
template <int Block>
void check_bounds(PackedTile<Compact4Channels<Block>>& packed, const std::vector<float>& rows, int dims) {
  const scalar::Compact4Channels format{Block};
  const std::vector<float> got = packed.decode();
  int outside = 0, too_large = 0, other = 0;
  for (int first = 0; first < tokens; first += Block) {
    double largest_min = 0.0, largest_scale = 0.0;
    const auto at = [&](int t, int d) { return double{rows[static_cast<std::size_t>(t * dims + d)]}; };
    std::vector<double> low(static_cast<std::size_t>(dims), 1e300), high(low.size(), -1e300);
    for (int d = 0; d < dims; ++d) {
      for (int t = first; t < first + Block; ++t) {
        low[static_cast<std::size_t>(d)] = std::fmin(low[static_cast<std::size_t>(d)], at(t, d));
        high[static_cast<std::size_t>(d)] = std::fmax(high[static_cast<std::size_t>(d)], at(t, d));
      }
      largest_min = std::max(largest_min, std::fabs(low[static_cast<std::size_t>(d)]));
      largest_scale = std::max(largest_scale, format.scale(packed.raw(), first, d));
    }
    for (int d = 0; d < dims; ++d) {
      const double scale = format.scale(packed.raw(), first, d);
      const double range = high[static_cast<std::size_t>(d)] - low[static_cast<std::size_t>(d)];
      const double steps =
          largest_min / 127 / 15 + largest_scale / 255 * 1.001;  // min downwards, scale upwards
      too_large += !(scale <= (range / 15 + steps) * 1.001) ? 1 : 0;
      for (int t = first; t < first + Block; ++t) {
        const double y = double{got[static_cast<std::size_t>(t * dims + d)]};
        outside += !(std::fabs(y - at(t, d)) <= scale / 2 * 1.0001 + 1e-6 * largest_min) ? 1 : 0;
        other += !(std::fabs(y - format.value(packed.raw(), t, d)) <= 1e-5 * largest_min) ? 1 : 0;
      }
    }
  }
  CHECK(outside == 0);
  CHECK(too_large == 0);
  CHECK(other == 0);
}

}  // namespace

TEST_CASE("compact channels decode as an independent decoder reads them, within half a scale") {
  for (const int dims : {64, 80, 96, 128, 256}) {
    CAPTURE(dims);
    PackedTile<Compact4Channels<32>> packed({}, dims, tokens);
    PackedTile<Compact4Channels<16>> shorter({}, dims, tokens);
    const std::vector<float> rows = make_rows(dims, 3);
    packed.encode(rows);
    shorter.encode(rows);
    check_bounds(packed, rows, dims);
    check_bounds(shorter, rows, dims);
    CHECK(packed.guards_intact());
  }
}

TEST_CASE("compact codes are the ones worked out by hand") {
  // Channel 0: -127 to 128; channel 1: 0 to 15. References: min 128, of which -127 / 128 is channel 0's, and
  // then 255 / 15 * 256 / 255 = 17.07, as fp16 17.078. Channel 0's scale is 255 of its 256ths, 17.012;
  // channel 1's min is 0, its scale 15 of them, 1.0007.
  const float rows[] = {-127.0f, 0.0f, 128.0f, 15.0f, 0.0f, 4.0f, -110.0f, 11.0f};
  PackedTile<Compact4Channels<4>> packed({}, 2, 4);
  packed.encode(std::vector<float>(rows, rows + 8));
  const std::vector<float> got = packed.decode();
  const float right[] = {-127.0f, 0.0f, 128.0f, 15.0f, -8.0f, 4.0f, -110.0f, 11.0f};
  for (std::size_t i = 0; i < 8; ++i) CHECK(std::fabs(got[i] - right[i]) <= 15 * 0.013f);
  CHECK(packed.code_bytes() == 4);
  CHECK(packed.all_codes()[0] == std::byte{0x00});
  CHECK(packed.all_codes()[1] == std::byte{0xff});
  CHECK(packed.all_codes()[2] == std::byte{0x47});
}

TEST_CASE("a compact channel with a value that is not finite is NaN, and no other") {
  const int dims = 64;
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> rows = make_rows(dims, 4);
    rows[40 * dims + 7] = bad;
    PackedTile<Compact4Channels<32>> packed({}, dims, tokens);
    packed.encode(rows);
    const std::vector<float> got = packed.decode();
    int wrong = 0;
    for (int t = 0; t < tokens; ++t)
      for (int d = 0; d < dims; ++d)
        wrong += std::isnan(got[static_cast<std::size_t>(t * dims + d)]) != (t >= 32 && d == 7) ? 1 : 0;
    CHECK(wrong == 0);
  }
}

TEST_CASE("compact channels keep zeros, constants, and tiny and huge values") {
  const int dims = 64;
  const auto round_trip = [&](const std::vector<float>& rows) {
    PackedTile<Compact4Channels<32>> packed({}, dims, tokens);
    packed.encode(rows);
    return packed.decode();
  };
  for (const float y : round_trip(std::vector<float>(64 * 64, 0.0f))) CHECK(y == 0.0f);
  for (const float c : {9.0f, -3.5f, 600.0f})
    for (const float y : round_trip(std::vector<float>(64 * 64, c)))
      CHECK(std::fabs(y - c) <= std::fabs(c) * 0.002f);
  for (const float y : round_trip(std::vector<float>(64 * 64, 1e-30f))) CHECK(std::fabs(y) <= 0x1p-24f);
  std::vector<float> huge(64 * 64, 3e38f);
  huge[0] = -3e38f;
  for (const float y : round_trip(huge)) CHECK(std::isfinite(y));
}

TEST_CASE("compact codes at head dim 64 cost 4.52 bits over 32 tokens and 4.26 over 64") {
  CHECK(bits_per_value<Gqa<64>, Compact4Channels<32>>(32) == Approx(4 + (4 + 2 * 64) * 8.0 / (32 * 64)));
  CHECK(bits_per_value<Gqa<64>, Compact4Channels<64>>(64) == Approx(4.2578).margin(1e-4));
}
