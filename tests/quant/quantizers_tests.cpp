// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What holds for every quantizer, over several head dims, and what was worked out by hand for single
// ones. The oracle is the independent decoder of bytes.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/quant/sections.hpp"
#include "quant/quant_cases.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace kvfolia;
using namespace kvfolia_tests;

namespace {

constexpr int page = 64;
constexpr float top16 = 65504.0f;  // the largest finite fp16

/// Every quantizer under test, with a name for messages.
template <class F>
void each_quantizer(F&& f) {
  f("Int8", Int8{});
  f("Int8Groups<32>", Int8Groups<32>{});
  f("Int4Symmetric<32>", Int4Symmetric<32>{});
  f("Int4<32>", Int4<32>{});
  f("Int4<64>", Int4<64>{});
  f("Int4<0>", Int4<0>{});
  f("Int4Channels<32>", Int4Channels<32>{});
  f("Int4Channels<64>", Int4Channels<64>{});
  f("Fp8<e4m3>", Fp8<>{});
  f("Fp8<e5m2>", Fp8<fp8_e5m2>{});
  f("Fp8Tensor", Fp8Tensor<>::calibrated(500.0f));
  f("Fp8Blocks", Fp8Blocks<>{});
  f("Nvfp4", Nvfp4::calibrated(4096.0f));
  f("Mxfp4", Mxfp4{});
  f("Q8_0", Q8_0{});
  f("Q4_0", Q4_0{});
  f("Centered<Int8>", Centered<Int8>{});
  f("Centered<Int4<32>>", Centered<Int4<32>>{});
  f("Centered<Fp8>", Centered<Fp8<>>{});
  f("Centered<Nvfp4>", Centered<Nvfp4>{Nvfp4::calibrated(4096.0f)});
  f("Rotated<Int8>", Rotated<Int8>{});
  f("Rotated<Int8, 16>", Rotated<Int8, 16>{});
  f("Rotated<Mxfp4>", Rotated<Mxfp4>{});
  f("Rotated<Centered<Int4<32>>>", Rotated<Centered<Int4<32>>>{});
}
template <class F>
void each_case(F&& f) {
  each_quantizer([&](const std::string& name, const auto& quant) {
    for (const int dims : {64, 80, 96, 128, 256}) {
      if (!fits<std::decay_t<decltype(quant)>>(dims)) continue;
      CAPTURE(name, dims);
      f(quant, dims);
    }
  });
}

/// ggml's blocks have an order of their own.
template <class Quant>
inline constexpr bool any_order = !std::is_same_v<Quant, Q8_0> && !std::is_same_v<Quant, Q4_0>;

/// Rows whose tokens and channels differ in size, with a bias in some channels; no zeros.
std::vector<float> make_rows(int dims, int tokens, std::uint64_t seed) {
  Random random(Random(seed).next());
  std::vector<float> factors, biases, rows;
  for (int d = 0; d < dims; ++d) {
    factors.push_back(random.between(0, 9) == 0 ? 15.0f : 1.0f);
    biases.push_back(random.between(0, 9) == 0 ? 20.0f : 0.0f);
  }
  for (int t = 0; t < tokens; ++t) {
    const float size = std::ldexp(1.0f, random.between(-1, 5));
    for (int d = 0; d < dims; ++d) {
      const auto i = static_cast<std::size_t>(d);
      rows.push_back(size * (factors[i] * random.gauss() + biases[i]));
    }
  }
  return rows;
}

/// Where two tiles of values differ by more than 1e-6 of the largest value of a group of dims (0 is all);
/// empty when they nowhere do. NaN equals NaN.
std::string difference(const std::vector<float>& got, const scalar::Values& right, int dims, int group) {
  if (group == 0) group = dims;
  for (std::size_t begin = 0, row; begin < right.size(); begin += row) {
    const auto column = static_cast<int>(begin) % dims;
    row = static_cast<std::size_t>(std::min(group, dims - column));
    double largest = 0.0;
    for (std::size_t i = begin; i < begin + row; ++i)
      if (std::isfinite(right[i])) largest = std::max(largest, std::fabs(right[i]));
    for (std::size_t i = begin; i < begin + row; ++i) {
      const double x = double{got[i]};
      if (std::isnan(right[i]) ? std::isnan(x) : x == right[i] || std::fabs(x - right[i]) <= 1e-6 * largest)
        continue;
      std::ostringstream text;
      text << "token " << static_cast<int>(i) / dims << " dimension " << static_cast<int>(i) % dims << ": "
           << x << ", not " << right[i];
      return text.str();
    }
  }
  return {};
}

/// The library's values of a tile, as models have them, against those of the independent decoder.
template <class Quant>
std::string decode_difference(PackedTile<Quant>& packed, const Quant& quant, int dims) {
  std::vector<float> got = packed.decode();
  for (int t = 0; t < page; ++t) from_stored(quant, got.data() + t * dims, dims);
  // A mean may cancel what a group has, and a rotation mixes groups: then a token's largest value counts.
  const bool is_group_own = !rotates<Quant> && !Quant::affine.channel_offset;
  return difference(got, scalar::decode(raw_format(quant), packed.raw()), dims,
                    is_group_own ? Quant::group_dims : 0);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// What the pieces that kernels fold say about one element.
struct Piece {
  double code, scale, offset, mean;
};
template <class Quant>
std::vector<Piece> pieces(PackedTile<Quant>& packed, const Quant& quant, int dims) {
  constexpr Affine has = Quant::affine;
  const auto tile = packed.const_tile();
  std::vector<Piece> all;
  std::vector<float> codes(static_cast<std::size_t>(dims));
  for (int t = 0; t < page; ++t) {
    quant.codes(tile, t, codes.data());
    for (int d = 0; d < dims; ++d) {
      const int group = Quant::group_dims == 0 ? 0 : d / std::max(1, Quant::group_dims);
      Piece piece{double{codes[static_cast<std::size_t>(d)]}, 1.0, 0.0, 0.0};
      if constexpr (has.token_scale) piece.scale *= double{quant.token_scale(tile, t, group)};
      if constexpr (has.channel_scale) piece.scale *= double{quant.channel_scale(tile, t, d)};
      if constexpr (has.token_offset) piece.offset = double{quant.token_offset(tile, t, group)};
      if constexpr (has.channel_offset) piece.mean = double{quant.channel_offset(tile, t, d)};
      all.push_back(piece);
    }
  }
  return all;
}

// For every quantizer: the error that rounding makes of y, in units of the scale, and the scale for a
// group whose values lie between `low` and `high`.

/// Whether `reach` comes from `amax` by rounding a scale to fp16 (and its smallest values).
bool is_rounded(double reach, double amax, double top) {
  return std::fabs(reach - amax) <= amax * 0x1p-11 + top * 0x1p-25;
}
double largest_of(double low, double high) { return std::max(std::fabs(low), std::fabs(high)); }

template <int Group>
double error_bound(const Int8Groups<Group>&, double) {
  return 0.5;
}
template <int Group>
bool is_right_scale(const Int8Groups<Group>&, double low, double high, double scale) {
  return is_rounded(127 * scale, largest_of(low, high), 127);
}
bool is_right_asymmetric(double low, double high, double scale) {
  const double range = high - low;  // and what rounding the minimum down adds
  return 15 * scale >= range * (1 - 0x1p-11) &&
         15 * scale <= (range + std::fabs(low) * 0x1p-10) * (1 + 0x1p-11);
}
template <int Group>
double error_bound(const Int4Symmetric<Group>&, double) {
  return 0.5;
}
template <int Group>
bool is_right_scale(const Int4Symmetric<Group>&, double low, double high, double scale) {
  return is_rounded(7 * scale, largest_of(low, high), 7);
}
template <int Group>
double error_bound(const Int4<Group>&, double) {
  return 0.5;
}
template <int Group>
bool is_right_scale(const Int4<Group>&, double low, double high, double scale) {
  return is_right_asymmetric(low, high, scale);
}
template <int Tokens>
double error_bound(const Int4Channels<Tokens>&, double) {
  return 0.5;
}
template <int Tokens>
bool is_right_scale(const Int4Channels<Tokens>&, double low, double high, double scale) {
  return is_right_asymmetric(low, high, scale);
}
/// Half of a step: a normal value's, or the smallest one.
double fp8_bound(fp8_e4m3, double y) { return std::max(std::fabs(y) / 16, 0x1p-10); }
double fp8_bound(fp8_e5m2, double y) { return std::max(std::fabs(y) / 8, 0x1p-17); }
template <class Code>
double error_bound(const Fp8<Code>&, double y) {
  return fp8_bound(Code{}, y);
}
template <class Code>
bool is_right_scale(const Fp8<Code>&, double low, double high, double scale) {
  // To nearest, or up: then nothing is clamped.
  const double reach = double{Code::largest} * scale, amax = largest_of(low, high);
  return is_rounded(reach, amax, double{Code::largest}) || (reach > amax && reach <= amax * (1 + 0x1p-10));
}
template <class Code>
double error_bound(const Fp8Tensor<Code>&, double y) {
  return std::max(fp8_bound(Code{}, y), std::fabs(y) - double{Code::largest});
}
template <class Code>
bool is_right_scale(const Fp8Tensor<Code>& quant, double, double, double scale) {
  return scale == double{quant.scale};
}
template <class Code, int Group>
double error_bound(const Fp8Blocks<Code, Group>&, double y) {
  return fp8_bound(Code{}, y);
}
template <class Code, int Group>
bool is_right_scale(const Fp8Blocks<Code, Group>&, double low, double high, double scale) {
  return scale == std::exp2(std::ceil(std::log2(largest_of(low, high) / double{Code::largest})));
}
/// Half of the gaps between 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and what lies above.
double fp4_bound(double y) {
  const double size = std::fabs(y);
  return size <= 2 ? 0.25 : size <= 4 ? 0.5 : std::max(1.0, size - 6);
}
double error_bound(const Nvfp4&, double y) { return fp4_bound(y); }
bool is_right_scale(const Nvfp4&, double low, double high, double scale) {
  const double largest = largest_of(low, high);
  return std::fabs(6 * scale - largest) <= largest * (0x1p-4 + 1e-6);
}
double error_bound(const Mxfp4&, double y) { return fp4_bound(y); }
bool is_right_scale(const Mxfp4&, double low, double high, double scale) {
  return scale == std::exp2(std::floor(std::log2(largest_of(low, high))) - 2);
}
// ggml rounds with the scale as it was before fp16.
double error_bound(const Q8_0&, double) { return 0.5 + 127 * 0x1p-11; }
bool is_right_scale(const Q8_0&, double low, double high, double scale) {
  return is_rounded(127 * scale, largest_of(low, high), 127);
}
double error_bound(const Q4_0&, double y) { return std::max(0.5, y - 7) + 8 * 0x1p-11; }
bool is_right_scale(const Q4_0&, double low, double high, double scale) {
  return is_rounded(-8 * scale, -low > high ? low : high, 8) ||
         is_rounded(std::fabs(8 * scale), -low > high ? -low : high, 8);
}
template <class Q, int Tokens>
double error_bound(const Centered<Q, Tokens>& quant, double y) {
  return error_bound(quant.inner, y);
}
template <class Q, int Tokens>
bool is_right_scale(const Centered<Q, Tokens>& quant, double low, double high, double scale) {
  return is_right_scale(quant.inner, low, high, scale);
}
template <class Q, int Block>
double error_bound(const Rotated<Q, Block>& quant, double y) {
  return error_bound(static_cast<const Q&>(quant), y);
}
template <class Q, int Block>
bool is_right_scale(const Rotated<Q, Block>& quant, double low, double high, double scale) {
  return is_right_scale(static_cast<const Q&>(quant), low, high, scale);
}

/// Whether a value at (t, d) shares its parameters with one at (u, e).
template <class Quant>
bool is_same_group(const Quant&, int t, int d, int u, int e) {
  if constexpr (std::is_same_v<Quant, Fp8Tensor<>>) return t == u && d == e;
  if constexpr (Quant::affine.channel_scale)
    return t / Quant::seal_tokens == u / Quant::seal_tokens && d == e;
  if constexpr (Quant::group_dims == 0) return t == u;
  return t == u && d / std::max(1, Quant::group_dims) == e / std::max(1, Quant::group_dims);
}

/// Where an error is larger than the quantizer's bound, or a scale not the documented one; empty when
/// nowhere. Groups with a value that is not finite are left out.
template <class Quant>
std::string bound_violation(PackedTile<Quant>& packed, const Quant& quant, const std::vector<float>& rows,
                            int dims) {
  const std::vector<float> got = packed.decode();
  const std::vector<Piece> all = pieces(packed, quant, dims);
  const bool centred = Quant::affine.channel_offset && !Quant::affine.channel_scale;
  const auto at = [&](int t, int d) { return static_cast<std::size_t>(t * dims + d); };
  const auto inner = [&](int t, int d) {  // what the inner quantizer got
    return double{rows[at(t, d)]} - (centred ? all[at(t, d)].mean : 0.0);
  };
  const int block = Quant::affine.channel_scale ? Quant::seal_tokens : 1;
  const int group = Quant::affine.channel_scale ? 1 : Quant::group_dims == 0 ? dims : Quant::group_dims;
  for (int first = 0; first < page; first += block)
    for (int begin = 0; begin < dims; begin += group) {
      const int end = std::min(begin + group, dims);
      double low = std::numeric_limits<double>::infinity(), high = -low;
      bool finite = true;
      for (int t = first; t < first + block; ++t)
        for (int d = begin; d < end; ++d) {
          low = std::min(low, inner(t, d));
          high = std::max(high, inner(t, d));
          finite = finite && std::isfinite(rows[at(t, d)]);
        }
      if (!finite) continue;
      for (int t = first; t < first + block; ++t)
        for (int d = begin; d < end; ++d) {
          const Piece& piece = all[at(t, d)];
          const double x = double{rows[at(t, d)]};
          // Codes of asymmetric quantizers count from the minimum, which rounds as well as any number.
          const double y = inner(t, d) / piece.scale;
          const double allowed = std::fabs(piece.scale) * (error_bound(quant, y) + 1e-4) +
                                 0x1p-22 * (std::fabs(x) + std::fabs(piece.mean));
          const bool is_right = is_right_scale(quant, low, high, piece.scale);
          if (is_right && std::fabs(double{got[at(t, d)]} - x) <= allowed) continue;
          std::ostringstream text;
          text << "token " << t << " dimension " << d << ": " << x << " became " << got[at(t, d)]
               << ", scale " << piece.scale << " for values from " << low << " to " << high << ", allowed "
               << allowed;
          return text.str();
        }
    }
  return {};
}

/// One token of `dims` values, coded and read by the library.
template <class Quant>
std::vector<float> round_trip(const Quant& quant, const std::vector<float>& rows, int dims) {
  PackedTile<Quant> packed(quant, dims, static_cast<int>(rows.size()) / dims);
  packed.encode(rows);
  return packed.decode();
}
/// A block of equal tokens.
template <class Quant>
std::vector<float> round_trip_constant(const Quant& quant, float x) {
  return round_trip(quant, std::vector<float>(static_cast<std::size_t>(64 * page), x), 64);
}
double largest_error(const std::vector<float>& got, double right) {
  double largest = 0.0;
  for (const float x : got) {
    const double error = std::fabs(double{x} - right);
    if (!(error <= largest)) largest = error;  // NaN, too
  }
  return largest;
}
std::vector<unsigned> numbers(const std::vector<std::byte>& bytes) {
  std::vector<unsigned> all;
  for (const std::byte b : bytes) all.push_back(std::to_integer<unsigned>(b));
  return all;
}

}  // namespace

TEST_CASE("every quantizer decodes what an independent decoder reads from its bytes") {
  each_case([](const auto& quant, int dims) {
    PackedTile packed(quant, dims, page);
    std::vector<float> rows = make_rows(dims, page, 1);
    // A token of zeros, one that is constant, one of tiny values.
    std::fill(rows.begin(), rows.begin() + dims, 0.0f);
    std::fill(rows.begin() + dims, rows.begin() + 2 * dims, -3.5f);
    for (int d = 0; d < dims; ++d) rows[static_cast<std::size_t>(2 * dims + d)] *= 1e-6f;
    for (int t = 0; t < page; ++t) to_stored(quant, rows.data() + t * dims, dims);
    packed.encode(rows);
    CHECK(decode_difference(packed, quant, dims) == "");
  });
}

TEST_CASE("every quantizer reads every byte as an independent decoder does") {
  each_case([](const auto& quant, int dims) {
    PackedTile packed(quant, dims, page);
    packed.encode(make_rows(dims, page, 2));
    for (int i = 0; i < packed.code_bytes(); ++i)
      packed.codes()[i] = static_cast<std::byte>((i + i / 256 * 83) % 256);
    CHECK(decode_difference(packed, quant, dims) == "");
  });
}

TEST_CASE("codes and the pieces that kernels fold make the values that decode gives") {
  each_case([](const auto& quant, int dims) {
    using Quant = std::decay_t<decltype(quant)>;
    PackedTile packed(quant, dims, page);
    packed.encode(make_rows(dims, page, 3));
    scalar::Values right;
    for (const Piece& piece : pieces(packed, quant, dims))
      right.push_back(piece.scale * piece.code + piece.offset + piece.mean);
    CHECK(difference(packed.decode(), right, dims, Quant::group_dims) == "");
  });
}

TEST_CASE("every error is within the quantizer's bound and every scale is the documented one") {
  each_case([](const auto& quant, int dims) {
    for (std::uint64_t seed = 10; seed < 13; ++seed) {
      CAPTURE(seed);
      PackedTile packed(quant, dims, page);
      const std::vector<float> rows = make_rows(dims, page, seed);
      packed.encode(rows);
      CHECK(bound_violation(packed, quant, rows, dims) == "");
    }
  });
}

TEST_CASE("a tile takes the documented bytes, all of which are written and none beside them") {
  each_case([](const auto& quant, int dims) {
    PackedTile a(quant, dims, page, std::byte{0xa5}), b(quant, dims, page, std::byte{0x5a});
    const std::vector<float> rows = make_rows(dims, page, 4);
    a.encode(rows);
    b.encode(rows);
    CHECK(a.code_bytes() == raw_format(quant).code_bytes(dims) * page);
    CHECK(a.param_bytes() == raw_format(quant).param_bytes(dims, page));
    CHECK(a.guards_intact());
    CHECK(b.guards_intact());
    CHECK(a.all_codes() == b.all_codes());
    CHECK(a.all_params() == b.all_params());
  });
}

TEST_CASE("writing a slot or a block again leaves all others as they were") {
  each_case([](const auto& quant, int dims) {
    using Quant = std::decay_t<decltype(quant)>;
    const int block = Quant::seal_tokens;
    const std::vector<float> before = make_rows(dims, page, 5), other = make_rows(dims, page, 6);
    for (const int slot : {0, 5 * block, page - block}) {
      if (slot >= page) continue;
      CAPTURE(slot);
      const auto begin = other.begin() + slot * dims, end = begin + block * dims;
      std::vector<float> mixed = before;
      std::copy(begin, end, mixed.begin() + slot * dims);
      PackedTile packed(quant, dims, page), at_once(quant, dims, page);
      packed.encode(before);
      const std::vector<float> old = packed.decode();
      packed.encode({begin, end}, slot, block);
      at_once.encode(mixed);
      CHECK(packed.all_codes() == at_once.all_codes());
      CHECK(packed.all_params() == at_once.all_params());
      bool is_unchanged = true;
      for (int t = 0; t < page; ++t)
        if (t < slot || t >= slot + block) {
          const std::vector<float> now = packed.decode_slot(t);
          is_unchanged =
              is_unchanged && same_bits(now, {old.begin() + t * dims, old.begin() + (t + 1) * dims});
        }
      CHECK(is_unchanged);
      if constexpr (block == 1) {  // in the slot's own bytes, and only there
        PackedTile empty(quant, dims, page, std::byte{0x77});
        empty.encode({begin, end}, slot, 1);
        const int code = empty.code_bytes() / page, param = empty.param_bytes() / page;
        bool is_inside = empty.guards_intact();
        for (int i = 0; i < empty.code_bytes(); ++i)
          is_inside = is_inside && (i / code == slot || empty.codes()[i] == std::byte{0x77});
        for (int i = 0; i < empty.param_bytes(); ++i)
          is_inside = is_inside && (i / param == slot || empty.params()[i] == std::byte{0x77});
        CHECK(is_inside);
      }
    }
  });
}

TEST_CASE("every order of elements holds the same numbers") {
  each_case([](const auto& quant, int dims) {
    using Quant = std::decay_t<decltype(quant)>;
    if constexpr (any_order<Quant>) {
      const std::vector<float> rows = make_rows(dims, page, 7);
      PackedTile<Quant> slots(quant, dims, page);
      slots.encode(rows);
      PackedTile<Quant, DimMajor<4>> fours(quant, dims, page);
      fours.encode(rows);
      CHECK(fours.guards_intact());
      CHECK(fours.all_params() == slots.all_params());
      CHECK(same_bits(fours.decode(), slots.decode()));
      if constexpr (Quant::code_bits >= 8) {
        PackedTile<Quant, SlotPairs<2>> pairs(quant, dims, page);
        pairs.encode(rows);
        CHECK(pairs.guards_intact());
        CHECK(same_bits(pairs.decode(), slots.decode()));
      }
    }
  });
}

TEST_CASE("a value that is not finite makes its own group NaN and nothing else") {
  each_case([](const auto& quant, int dims) {
    using Quant = std::decay_t<decltype(quant)>;
    const std::vector<float> clean = make_rows(dims, page, 8);
    const std::vector<float> right = round_trip(quant, clean, dims);
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY})
      for (const int d : {0, dims / 2 + 1, dims - 1}) {
        CAPTURE(bad, d);
        const int t = 37;
        std::vector<float> rows = clean;
        rows[static_cast<std::size_t>(t * dims + d)] = bad;
        PackedTile<Quant> packed(quant, dims, page);
        packed.encode(rows);
        const std::vector<float> got = packed.decode();
        int not_nan = 0, not_finite = 0, changed = 0;
        for (int u = 0; u < page; ++u)
          for (int e = 0; e < dims; ++e) {
            const auto i = static_cast<std::size_t>(u * dims + e);
            if (is_same_group(quant, t, d, u, e))
              not_nan += std::isnan(got[i]) ? 0 : 1;
            else
              not_finite += std::isfinite(got[i]) ? 0 : 1, changed += got[i] == right[i] ? 0 : 1;
          }
        CHECK(not_nan == 0);
        CHECK(not_finite == 0);
        // It is missing from its block's mean, which moves the others within their bounds.
        if (Quant::affine.channel_offset && !Quant::affine.channel_scale)
          CHECK(bound_violation(packed, quant, rows, dims) == "");
        else
          CHECK(changed == 0);
      }
  });
}

TEST_CASE("a constant group comes back as the constant rounded") {
  each_quantizer([](const std::string& name, const auto& quant) {
    CAPTURE(name);
    CHECK(largest_error(round_trip_constant(quant, 0.0f), 0.0) == 0.0);
    CHECK(largest_error(round_trip_constant(quant, -0.0f), 0.0) == 0.0);
  });
  // fp16 holds these, and asymmetric codes the constant itself.
  for (const float x : {9.0f, -3.5f, 600.0f, 0x1p-24f, -top16}) {
    CAPTURE(x);
    CHECK(largest_error(round_trip_constant(Int4<32>{}, x), x) == 0.0);
    CHECK(largest_error(round_trip_constant(Int4<64>{}, x), x) == 0.0);
    CHECK(largest_error(round_trip_constant(Int4<0>{}, x), x) == 0.0);
    CHECK(largest_error(round_trip_constant(Int4Channels<32>{}, x), x) == 0.0);
    CHECK(largest_error(round_trip_constant(Int4Channels<64>{}, x), x) == 0.0);
    CHECK(largest_error(round_trip_constant(Centered<Int8>{}, x), x) == 0.0);
    CHECK(largest_error(round_trip_constant(Centered<Int4<32>>{}, x), x) == 0.0);
    CHECK(largest_error(round_trip_constant(Centered<Fp8<>>{}, x), x) == 0.0);
    CHECK(largest_error(round_trip_constant(Centered<Nvfp4>{}, x), x) == 0.0);
  }
  const double tenth = scalar::fp16(0x2e66);
  CHECK(largest_error(round_trip_constant(Int4<32>{}, 0.1f), tenth) == 0.0);
  CHECK(largest_error(round_trip_constant(Int4Channels<32>{}, 0.1f), tenth) == 0.0);
  for (const float x : {9.0f, -3.5f, 600.0f, 0.1f}) {
    const double rounding = std::fabs(double{x}) * (0x1p-11 + 0x1p-20);  // of the scale to fp16
    CAPTURE(x);
    CHECK(largest_error(round_trip_constant(Int8{}, x), x) <= rounding);
    CHECK(largest_error(round_trip_constant(Int8Groups<32>{}, x), x) <= rounding);
    CHECK(largest_error(round_trip_constant(Fp8<>{}, x), x) <= rounding);
    CHECK(largest_error(round_trip_constant(Fp8<fp8_e5m2>{}, x), x) <= rounding + 57344 * 0x1p-24);
    CHECK(largest_error(round_trip_constant(Q8_0{}, x), x) <= rounding);
    CHECK(largest_error(round_trip_constant(Q4_0{}, x), x) <= rounding);
  }
  // Scales 1.5 and 9 / 16, 2 and 1 / 2, and powers of two.
  CHECK(largest_error(round_trip_constant(Nvfp4{}, 9.0f), 9.0) == 0.0);
  CHECK(largest_error(round_trip_constant(Nvfp4{}, -3.5f), -3.375) == 0.0);
  CHECK(largest_error(round_trip_constant(Mxfp4{}, 9.0f), 8.0) == 0.0);
  CHECK(largest_error(round_trip_constant(Mxfp4{}, -3.5f), -3.0) == 0.0);
  CHECK(largest_error(round_trip_constant(Fp8Blocks<>{}, 9.0f), 9.0) == 0.0);
  CHECK(largest_error(round_trip_constant(Fp8Blocks<>{}, -3.5f), -3.5) == 0.0);
}

TEST_CASE("values too small for a scale become zeros or stay small, never infinite") {
  each_quantizer([](const std::string& name, const auto& quant) {
    using Quant = std::decay_t<decltype(quant)>;
    CAPTURE(name);
    // Scales with a float's exponent reach them; all others give zeros.
    const bool reaches = std::is_same_v<Quant, Fp8Blocks<>> || std::is_same_v<Quant, Mxfp4> ||
                         std::is_same_v<Quant, Rotated<Mxfp4>>;
    for (const float x : {1e-30f, -1e-30f, std::numeric_limits<float>::denorm_min(), 1e-38f}) {
      CAPTURE(x);
      if (reaches)
        CHECK(largest_error(round_trip_constant(quant, x), x) <= double{std::fabs(x)});
      else
        CHECK(largest_error(round_trip_constant(quant, x), 0.0) == 0.0);
    }
    // Half of fp16's smallest step.
    for (const float x : {1e-8f, -1e-8f}) CHECK(largest_error(round_trip_constant(quant, x), x) <= 0x1p-25);
  });
}

TEST_CASE("values near 600 with a small range keep a finite minimum and half a scale") {
  std::vector<float> rows;
  for (int i = 0; i < page * 64; ++i) rows.push_back(600.0f + 0.05f * static_cast<float>(i % 3 - 1));
  const double bound = 0.5 * (600.05 - 599.5) / 15 * 1.001;  // fp16 has 599.5 and 600
  const auto worst = [&](const auto& quant) {
    const std::vector<float> got = round_trip(quant, rows, 64);
    double largest = 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const double error = std::fabs(double{got[i]} - double{rows[i]});
      if (!(error <= largest)) largest = error;
    }
    return largest;
  };
  CHECK(worst(Int4<32>{}) <= bound);
  CHECK(worst(Int4<64>{}) <= bound);
  CHECK(worst(Int4<0>{}) <= bound);
  CHECK(worst(Int4Channels<64>{}) <= bound);
  // The mean is 600, what is left is within 0.05.
  CHECK(worst(Centered<Int8>{}) <= 0.5 * 0.3 / 127 * 1.01);
  CHECK(worst(Centered<Int4<32>>{}) <= 0.5 * 0.4 / 15 * 1.01);
}

TEST_CASE("dims that do not fill a group leave its range to those there are") {
  const auto check = [](const auto& quant, int dims) {
    std::vector<float> row;
    for (int d = 0; d < dims; ++d) row.push_back(5.0f + static_cast<float>(d % 16) / 15.0f);
    PackedTile packed(quant, dims, 1);
    packed.encode(row);
    using Quant = std::decay_t<decltype(quant)>;
    for (int group = 0; group < group_count<Quant>(dims); ++group) {
      CHECK(quant.token_offset(packed.const_tile(), 0, group) == 5.0f);
      CHECK(std::fabs(double{quant.token_scale(packed.const_tile(), 0, group)} - 1 / 15.0) <= 0x1p-11 / 15);
    }
  };
  check(Int4<32>{}, 96);
  check(Int4<64>{}, 96);
  check(Int4<0>{}, 96);
  check(Int4<32>{}, 80);
  check(Int4<64>{}, 80);
  std::vector<float> row(80, 0.0f);
  for (std::size_t d = 64; d < 80; ++d) row[d] = 127.0f;  // the group of 16 has a scale of its own
  CHECK(round_trip(Int8Groups<32>{}, row, 80) == row);
}

TEST_CASE("the even dimension lies in the low half of a byte") {
  std::vector<float> row(32, 0.0f);
  row[0] = -6.0f, row[1] = 2.0f, row[2] = 3.0f, row[3] = -2.0f;
  PackedTile nvfp4(Nvfp4{}, 32, 1);
  nvfp4.encode(row);
  CHECK(nvfp4.decode() == row);
  CHECK(numbers({nvfp4.codes(), nvfp4.codes() + 3}) == std::vector<unsigned>{0x4f, 0xc5, 0x00});
  CHECK(numbers(nvfp4.all_params()) == std::vector<unsigned>{0x38, 0x00});  // 1 and 0
  PackedTile mxfp4(Mxfp4{}, 32, 1);
  mxfp4.encode(row);
  CHECK(mxfp4.decode() == row);
  CHECK(numbers({mxfp4.codes(), mxfp4.codes() + 3}) == std::vector<unsigned>{0x4f, 0xc5, 0x00});
  CHECK(numbers(mxfp4.all_params()) == std::vector<unsigned>{127});
  row[4] = 9.0f;  // a range of 15: codes 0 8 9 4 15, and 6 for zeros
  PackedTile int4(Int4<32>{}, 32, 1);
  int4.encode(row);
  CHECK(int4.decode() == row);
  CHECK(numbers({int4.codes(), int4.codes() + 4}) == std::vector<unsigned>{0x80, 0x49, 0x6f, 0x66});
  CHECK(numbers(int4.all_params()) == std::vector<unsigned>{0x00, 0x3c, 0x00, 0xc6});  // 1 and -6
}

TEST_CASE("values beyond the range of a format become its largest value") {
  const auto check = [](const auto& quant, float x, double right) {
    CAPTURE(x);
    CHECK(largest_error(round_trip_constant(quant, x), right) == 0.0);
    CHECK(largest_error(round_trip_constant(quant, -x), -right) == 0.0);
  };
  for (const float x : {1e10f, 1e30f, 3e38f}) {
    check(Int8{}, x, 127.0 * top16);
    check(Int8Groups<32>{}, x, 127.0 * top16);
    check(Int4<32>{}, x, top16);
    check(Int4<0>{}, x, top16);
    check(Int4Channels<32>{}, x, top16);
    check(Fp8Tensor<>{}, x, 448.0);
    check(Nvfp4{}, x, 6.0 * 448.0);
    check(Q8_0{}, x, 127.0 * top16);
    check(Q4_0{}, x, 8.0 * top16);
  }
  for (const float x : {1e10f, 1e30f, 3e38f}) check(Fp8<>{}, x, 448.0 * top16);
  for (const float x : {1e30f, 3e38f}) check(Fp8<fp8_e5m2>{}, x, 57344.0 * top16);
  check(Mxfp4{}, std::numeric_limits<float>::max(), 6 * 0x1p125);
}

TEST_CASE("asymmetric codes clamp what is beyond fp16 to its range, whatever else is in the group") {
  for (const float low : {-3e38f, -1e6f, -65520.0f, 0.0f, 65520.0f, 1e6f})
    for (const float high : {1.0f, 1e6f, 3e38f}) {
      if (low > high) continue;
      CAPTURE(low, high);
      std::vector<float> row(32, low);
      row[3] = 0.5f * (low + high), row[4] = high;
      const std::vector<float> got = round_trip(Int4<32>{}, row, 32);
      std::vector<float> right;
      for (const float x : row) right.push_back(std::clamp(x, -top16, top16));
      // Half a scale, and its rounding.
      const double bound = (double{right[4]} - double{right[0]}) / 30 * 1.01 + 32;
      int wrong = 0;
      for (std::size_t d = 0; d < 32; ++d)
        wrong += std::fabs(double{got[d]} - double{right[d]}) <= bound ? 0 : 1;
      CHECK(wrong == 0);
    }
}

TEST_CASE("finite values decode to finite ones") {
  const float largest = std::numeric_limits<float>::max();
  each_quantizer([&](const std::string& name, const auto& quant) {
    CAPTURE(name);
    Random random(9);
    std::vector<float> rows = random.gauss(static_cast<std::size_t>(64 * page));
    for (std::size_t i = 0; i < rows.size(); i += 7) rows[i] = i % 2 != 0 ? largest : -largest;
    int not_finite = 0;
    for (const float x : round_trip(quant, rows, 64)) not_finite += std::isfinite(x) ? 0 : 1;
    CHECK(not_finite == 0);
  });
}

TEST_CASE("fp8 with one scale for all saturates at 448 and keeps NaN") {
  const std::vector<float> row = {1000.0f, 464.0f, 465.0f, 1e10f, -1000.0f,
                                  -1e10f,  448.0f, 449.0f, NAN,   1.0f};
  const std::vector<float> got = round_trip(Fp8Tensor<>{}, row, 10);
  for (std::size_t i = 0; i < 8; ++i) {
    CAPTURE(row[i]);
    CHECK(got[i] == (row[i] < 0 ? -448.0f : 448.0f));
  }
  CHECK(std::isnan(got[8]));
  CHECK(got[9] == 1.0f);
}

TEST_CASE("a block of channels does not know the next one") {
  std::vector<float> rows;
  for (int t = 0; t < 64; ++t)
    for (int d = 0; d < 64; ++d)
      rows.push_back(t < 32 ? static_cast<float>(t % 16) / 15.0f : 1000.0f + static_cast<float>(t % 16));
  PackedTile channels(Int4Channels<32>{}, 64, 64);
  channels.encode(rows);
  for (int d = 0; d < 64; ++d) {
    CHECK(double{Int4Channels<32>{}.channel_scale(channels.const_tile(), 31, d)} ==
          Approx(1 / 15.0).epsilon(0x1p-11));
    CHECK(Int4Channels<32>{}.channel_offset(channels.const_tile(), 31, d) == 0.0f);
    CHECK(Int4Channels<32>{}.channel_scale(channels.const_tile(), 32, d) == 1.0f);
    CHECK(Int4Channels<32>{}.channel_offset(channels.const_tile(), 32, d) == 1000.0f);
  }
  PackedTile centred(Centered<Int8>{}, 64, 64);
  centred.encode(rows);
  for (int d = 0; d < 64; ++d) {
    CHECK(Centered<Int8>{}.channel_offset(centred.const_tile(), 31, d) == Approx(0.5f).epsilon(0.001));
    CHECK(Centered<Int8>{}.channel_offset(centred.const_tile(), 32, d) == 1007.5f);
  }
}

TEST_CASE("a centred tile holds its means before the scales") {
  // Channel d is d - 127 and d + 127 in turn: mean d, codes -127 and 127 at scale 1.
  std::vector<float> rows;
  for (int t = 0; t < 32; ++t)
    for (int d = 0; d < 4; ++d) rows.push_back(static_cast<float>(t % 2 != 0 ? d + 127 : d - 127));
  PackedTile packed(Centered<Int8>{}, 4, 32);
  packed.encode(rows);
  CHECK(packed.param_bytes() == 16 + 2 * 32);
  CHECK(numbers({packed.params(), packed.params() + 8}) ==
        std::vector<unsigned>{0, 0, 0x00, 0x3c, 0x00, 0x40, 0x00, 0x42});
  CHECK(numbers({packed.params() + 16, packed.params() + 20}) ==
        std::vector<unsigned>{0x00, 0x3c, 0x00, 0x3c});
  CHECK(numbers({packed.codes(), packed.codes() + 8}) ==
        std::vector<unsigned>{0x81, 0x81, 0x81, 0x81, 0x7f, 0x7f, 0x7f, 0x7f});
  CHECK(packed.decode() == rows);
}

TEST_CASE("ggml's blocks are those that ggml's own Python package writes") {
  // Made with gguf 0.19's gguf.quants.quantize; no value lies near a tie.
  const int units[64] = {16,  -20, 3,  -5,  -4,  -2,  -16, -2, -7,  27,  2,   -3, -2, -5,  -8,  -3,
                         4,   -2,  8,  -2,  0,   12,  4,   -4, -1,  4,   15,  -2, -2, 8,   -7,  -2,
                         -37, 28,  46, -86, -20, 13,  -24, 64, -48, 14,  -42, 56, -1, -15, -69, 67,
                         30,  30,  46, 14,  -26, -32, -32, 55, -58, -24, -13, 9,  23, -50, -69, 0};
  const std::vector<unsigned> q8_0 = {
      0xce, 0x1e, 0x4b, 0xa2, 0x0e, 0xe8, 0xed, 0xf7, 0xb5, 0xf7, 0xdf, 0x7f, 0x09, 0xf2, 0xf7, 0xe8, 0xda,
      0xf2, 0x13, 0xf7, 0x26, 0xf7, 0x00, 0x38, 0x13, 0xed, 0xfb, 0x13, 0x47, 0xf7, 0xf7, 0x26, 0xdf, 0xf7,
      0x6b, 0x25, 0xc9, 0x29, 0x44, 0x81, 0xe2, 0x13, 0xdd, 0x5f, 0xb9, 0x15, 0xc2, 0x53, 0xff, 0xea, 0x9a,
      0x63, 0x2c, 0x2c, 0x44, 0x15, 0xda, 0xd1, 0xd1, 0x51, 0xaa, 0xdd, 0xed, 0x0d, 0x22, 0xb6, 0x9a, 0x00};
  const std::vector<unsigned> q4_0 = {0xc0, 0xae, 0x73, 0x9e, 0x67, 0x99, 0x89, 0x49, 0x7d, 0x99, 0x8a, 0x70,
                                      0x47, 0x99, 0x99, 0x69, 0xaa, 0x99, 0x60, 0x35, 0xb5, 0xbb, 0xcc, 0x90,
                                      0x66, 0x59, 0x56, 0xde, 0x34, 0x69, 0x74, 0x9d, 0xa8, 0x37, 0x22, 0x8e};
  std::vector<float> row;
  for (const int unit : units) row.push_back(static_cast<float>(unit) / 32.0f);
  PackedTile eights(Q8_0{}, 64, 1);
  eights.encode(row);
  CHECK(numbers(eights.all_codes()) == q8_0);
  PackedTile fours(Q4_0{}, 64, 1);
  fours.encode(row);
  CHECK(numbers(fours.all_codes()) == q4_0);
}

TEST_CASE("rotation is the Hadamard matrix, keeps dot products, and undoes itself") {
  for (const int dims : {1, 2, 6, 8, 64, 80, 96, 128, 256}) {
    CAPTURE(dims);
    const auto n = static_cast<std::size_t>(dims);
    Random random(Random(static_cast<std::uint64_t>(dims)).next());
    const std::vector<float> a = random.gauss(n), b = random.gauss(n);
    std::vector<float> x = a, y = b;
    const Rotated<Int8> quant;
    quant.rotate(x.data(), dims);
    quant.rotate(y.data(), dims);
    scalar::Values matrix(a.begin(), a.end());
    scalar::rotate(matrix.data(), dims, scalar::rotation_size(dims));
    CHECK(difference(x, matrix, dims, 0) == "");
    double before = 0.0, after = 0.0, norms = 0.0;
    for (std::size_t d = 0; d < n; ++d) {
      before += double{a[d]} * double{b[d]};
      after += double{x[d]} * double{y[d]};
      norms += double{a[d]} * double{a[d]} + double{b[d]} * double{b[d]};
    }
    CHECK(std::fabs(after - before) <= 1e-6 * norms);
    quant.unrotate(x.data(), dims);
    quant.rotate(y.data(), dims);
    CHECK(difference(x, {a.begin(), a.end()}, dims, 0) == "");
    CHECK(difference(y, {b.begin(), b.end()}, dims, 0) == "");
  }
}

TEST_CASE("a rotation's block can be chosen, and must divide the dims") {
  std::vector<float> x(64, 0.0f);
  x[17] = 4.0f;
  Rotated<Int8, 16>{}.rotate(x.data(), 64);
  for (std::size_t d = 0; d < 64; ++d) {
    const float right = d < 16 || d >= 32 ? 0.0f : d % 2 == 0 ? 1.0f : -1.0f;
    CHECK(x[d] == right);
  }
  CHECK(fits<Rotated<Int8, 16>>(80));
  CHECK(!fits<Rotated<Int8, 32>>(80));
  CHECK(fits<Rotated<Int8>>(80));
  CHECK(std::is_same_v<Rotated<Int8>::Exact, Rotated<Identity<fp16>>>);
}

TEST_CASE("only dims that fill bytes and blocks can be coded") {
  CHECK((fits<Q8_0>(64) && fits<Q8_0>(96) && !fits<Q8_0>(80) && !fits<Q4_0>(80) && !fits<Q4_0>(40)));
  CHECK((fits<Int8>(7) && !fits<Int4<32>>(7) && fits<Int4<32>>(80) && !fits<Nvfp4>(7) && fits<Mxfp4>(80)));
  CHECK((fits<Centered<Int8>>(7) && !fits<Centered<Int4<32>>>(7) && !fits<Rotated<Int4<32>>>(7)));
}

TEST_CASE("sections lie behind one another, each as its own quantizer writes it") {
  // Codes of 64 + 16 + 32 + 2 * 16 bytes; parameters of 2 + 2 of padding, 4, 2 + 2 of padding.
  using Quant =
      Sections<Section<Int8, 64>, Section<Int4<32>, 32>, Section<Fp8<>, 32>, Section<Identity<bf16>, 16, 8>>;
  constexpr int dims = 144, code = 64 + 16 + 32 + 8 + 32, param = 4 + 4 + 4;
  CHECK(fits<Quant>(dims));
  CHECK(!fits<Quant>(128));
  CHECK(code_bytes<Quant>(dims) == code);
  CHECK(Quant::param_bytes(dims, page) == page * param);
  const std::vector<float> rows = make_rows(dims, page, 20);
  PackedTile packed(Quant{}, dims, page);
  packed.encode(rows);
  CHECK(packed.guards_intact());
  const auto part = [&](const auto& format, int n, int code_at, int param_at) {
    return scalar::decode(format,
                          {packed.codes() + code_at, packed.params() + param_at, n, page, code, param});
  };
  const scalar::Values parts[4] = {part(scalar::Int8{}, 64, 0, 0), part(scalar::Int4{32}, 32, 64, 4),
                                   part(scalar::Fp8{scalar::e4m3}, 32, 80, 8),
                                   part(scalar::Bf16{}, 16, 120, 12)};
  scalar::Values right;
  for (int t = 0; t < page; ++t)
    for (const scalar::Values& values : parts) {
      const auto n = static_cast<std::ptrdiff_t>(values.size()) / page;
      right.insert(right.end(), values.begin() + t * n, values.begin() + (t + 1) * n);
    }
  CHECK(difference(packed.decode(), right, dims, 16) == "");
  scalar::Values folded;
  for (const Piece& piece : pieces(packed, Quant{}, dims))
    folded.push_back(piece.scale * piece.code + piece.offset);
  CHECK(difference(packed.decode(), folded, dims, 16) == "");
  bool is_skipped = true;  // 8 bytes before the last section
  for (int t = 0; t < page; ++t)
    for (int i = 112; i < 120; ++i)
      is_skipped = is_skipped && packed.codes()[t * code + i] == std::byte{0xa5};
  CHECK(is_skipped);
  // Each section alone gives the same numbers.
  std::vector<float> first;
  for (int t = 0; t < page; ++t)
    first.insert(first.end(), rows.begin() + t * dims, rows.begin() + t * dims + 64);
  const std::vector<float> alone = round_trip(Int8{}, first, 64), together = packed.decode();
  for (int t = 0; t < page; ++t)
    CHECK(std::equal(alone.begin() + t * 64, alone.begin() + (t + 1) * 64, together.begin() + t * dims));
}

TEST_CASE("the 656-byte token of latent caches is two sections with the scales between them") {
  // 512 e4m3, 4 float scales for 128 each, 64 bf16.
  using Quant = Sections<Section<Fp8Blocks<>, 512>, Section<Identity<bf16>, 64, 16>>;
  constexpr int dims = 576, token = 656, tokens = 5;
  CHECK(code_bytes<Quant>(dims) == token);
  CHECK(Quant::param_bytes(dims, 1) == 16);
  const std::vector<float> rows = make_rows(dims, tokens, 21);
  alignas(16) std::byte bytes[token * tokens];
  std::fill(std::begin(bytes), std::end(bytes), std::byte{0xa5});
  Quant{}.encode(Tile<SlotMajor, std::byte>{bytes, bytes + 512, dims, tokens, token, token}, 0, tokens,
                 Rows{rows.data(), dims});
  const scalar::Values latent =
      scalar::decode(scalar::Fp8Blocks{scalar::e4m3, 128}, {bytes, bytes + 512, 512, tokens, token, token});
  const scalar::Values rotary = scalar::decode(scalar::Bf16{}, {bytes + 528, nullptr, 64, tokens, token, 0});
  for (int t = 0; t < tokens; ++t) {
    std::vector<float> got(dims);
    Quant{}.decode(Tile<SlotMajor, const std::byte>{bytes, bytes + 512, dims, tokens, token, token}, t,
                   got.data());
    scalar::Values right(latent.begin() + t * 512, latent.begin() + (t + 1) * 512);
    right.insert(right.end(), rotary.begin() + t * 64, rotary.begin() + (t + 1) * 64);
    CHECK(difference(got, right, dims, 64) == "");
    double worst = 0.0;
    for (int d = 0; d < dims; ++d) {
      const double x = double{rows[static_cast<std::size_t>(t * dims + d)]};
      const double bound = d < 512 ? std::max(std::fabs(x) / 16, 0.1) : std::fabs(x) * 0x1p-8;
      worst = std::max(worst, std::fabs(x - double{got[static_cast<std::size_t>(d)]}) / bound);
    }
    CHECK(worst <= 1.0 + 1e-6);
  }
}
