// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "kvfolia/quant/int8.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kvfolia/core/page_format.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/quant/identity.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace kvfolia;
using namespace kvfolia_tests;

namespace {

/// One tile with memory of its own.
template <class Order, class Quant>
struct OwnTile {
  int dims, page_tokens;
  std::vector<std::byte> codes, params;
  Tile<Order, std::byte> tile;

  OwnTile(int d, int p)
      : dims(d),
        page_tokens(p),
        codes(static_cast<std::size_t>(code_bytes<Quant>(d) * p), std::byte{0xff}),
        params(static_cast<std::size_t>(Quant::param_bytes(d, p)) + 1, std::byte{0xff}),
        tile{codes.data(), params.data(), d, p, code_bytes<Quant>(d), Quant::param_bytes(d, p) / p} {}
};

std::vector<float> round_trip(const std::vector<float>& x) {
  OwnTile<SlotMajor, Int8> own(static_cast<int>(x.size()), 4);
  Int8{}.encode(own.tile, 2, 1, Rows{x.data(), own.dims});
  std::vector<float> y(x.size());
  Int8{}.decode(own.tile, 2, y.data());
  return y;
}

}  // namespace

TEST_CASE("Int8 codes and scale are the ones worked out by hand") {
  OwnTile<SlotMajor, Int8> own(4, 2);
  const float x[] = {127.0f, -63.5f, 2.5f, -0.5f};  // scale 1: ties go to even
  Int8{}.encode(own.tile, 1, 1, Rows{x, 4});
  CHECK(own.tile.param<Int8::Param>(1).scale.bits == 0x3c00);
  const auto code = [&](int d) { return static_cast<int>(own.tile.code<std::int8_t>(1, d)); };
  CHECK(code(0) == 127);
  CHECK(code(1) == -64);
  CHECK(code(2) == 2);
  CHECK(code(3) == 0);
}

TEST_CASE("an Int8 error is at most half a scale") {
  Random random(11);
  for (int n = 0; n < 500; ++n) {
    std::vector<float> x = random.gauss(64);
    const float magnitude = static_cast<float>(std::pow(10.0, random.uniform() * 12 - 7));
    float amax = 0.0f;
    for (float& v : x) amax = std::max(amax, std::fabs(v *= magnitude));
    const std::vector<float> y = round_trip(x);
    const double scale = static_cast<float>(Int8::fit(amax));
    // Rounding the scale to fp16 moves the largest value by at most 127 half-ulps of it.
    const double bound = 0.5 * scale * (1 + 0x1p-22) + std::max(0.0, amax - 127.0 * scale);
    for (std::size_t d = 0; d < x.size(); ++d) CHECK(std::fabs(double{y[d]} - double{x[d]}) <= bound);
    CHECK(std::fabs(scale * 127 - amax) <= amax * 0x1p-11 + 127 * 0x1p-24);
  }
}

TEST_CASE("a constant Int8 group comes back within fp16's rounding of the scale") {
  for (const float c : {9.0f, -3.5f, 600.0f, 0.01f}) {
    for (const float y : round_trip(std::vector<float>(32, c)))
      CHECK(std::fabs(y - c) <= std::fabs(c) * (0x1p-11 + 0x1p-20));
  }
  for (const float y : round_trip(std::vector<float>(32, 0.0f))) CHECK(y == 0.0f);
}

TEST_CASE("tiny Int8 groups decode to zero or to their own size, never to infinity") {
  for (const float y : round_trip(std::vector<float>(32, 1e-30f))) CHECK(y == 0.0f);
  for (const float y : round_trip(std::vector<float>(32, 1e-8f))) CHECK(std::fabs(y - 1e-8f) <= 0x1p-25f);
  for (const float y : round_trip(std::vector<float>(32, 1e-6f))) CHECK(std::fabs(y - 1e-6f) <= 0x1p-25f);
}

TEST_CASE("huge Int8 groups are clamped to the largest scale") {
  for (const float y : round_trip(std::vector<float>(32, 3e38f))) CHECK(y == 127.0f * 65504.0f);
}

TEST_CASE("a non-finite value makes its token NaN and no other") {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    OwnTile<DimMajor<4>, Int8> own(8, 4);
    float x[16] = {};
    for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(i);
    x[3] = bad;
    Int8{}.encode(own.tile, 0, 2, Rows{x, 8});
    float y[8];
    Int8{}.decode(own.tile, 0, y);
    for (const float v : y) CHECK(std::isnan(v));
    Int8{}.decode(own.tile, 1, y);
    CHECK(y[7] == Approx(15.0f).epsilon(0.001));
  }
}
