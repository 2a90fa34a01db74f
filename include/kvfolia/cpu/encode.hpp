// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Encoders made of vectors, for the quantizers that have one below. They write the very bytes that the
// quantizer's own encode() does; every other quantizer keeps that.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kvfolia/core/affine.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/cpu/convert.hpp"
#include "kvfolia/cpu/fit.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/vectors.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int4.hpp"
#include "kvfolia/quant/int8.hpp"
#include "kvfolia/quant/rotated.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

/// Which integers a quantizer of tokens stores: those in [low, high] with `bias` added.
template <class Q>
struct CodeRule {
  static constexpr bool known = false;
};
template <int Group>
struct CodeRule<Int8Groups<Group>> {
  static constexpr bool known = true;
  static constexpr int low = -127, high = 127, bias = 0;
  static constexpr bool has_min = false;
};
template <int Group>
struct CodeRule<Int4Symmetric<Group>> {
  static constexpr bool known = true;
  static constexpr int low = -7, high = 7, bias = 8;
  static constexpr bool has_min = false;
};
template <int Group>
struct CodeRule<Int4<Group>> {
  static constexpr bool known = true;
  static constexpr int low = 0, high = 15, bias = 0;
  static constexpr bool has_min = true;
};
template <class Q, int Block>
struct CodeRule<Rotated<Q, Block>> : CodeRule<Q> {};

template <class Q>
inline constexpr bool is_identity = false;
template <class T>
inline constexpr bool is_identity<Identity<T>> = true;
template <class Q, int Block>
inline constexpr bool is_identity<Rotated<Q, Block>> = is_identity<Q>;

/// Whether encode_rows() takes a quantizer.
template <class Q>
inline constexpr bool encodes_rows = has_exact_vectors && (is_identity<Q> || CodeRule<Q>::known);

/// round_code(), one code a lane, with Bias added.
template <int Low, int High, int Bias, class DF>
hn::Vec<IntsOf<DF>> round_codes(DF df, hn::Vec<DF> x) {
  const IntsOf<DF> di;
  const auto least = hn::Set(df, static_cast<float>(Low)), most = hn::Set(df, static_cast<float>(High));
  const auto clamped = hn::Min(hn::Max(x, least), most);
  const auto rounded = hn::Add(clamped, hn::Set(df, 12582912.0f));
  return hn::Sub(hn::BitCast(di, rounded), hn::Set(di, 0x4b400000 - Bias));
}

/// Codes of 8 bits or, two a byte, of 4.
template <int Bits, class DF>
void store_codes(DF /*df*/, hn::Vec<IntsOf<DF>> codes, std::byte* to) {
  if constexpr (Bits == 8) {
    const hn::Rebind<std::int8_t, DF> d8;
    hn::StoreU(hn::DemoteTo(d8, codes), d8, reinterpret_cast<std::int8_t*>(to));
  } else {
    // Not by truncation: that of Highway 1.0 is wrong for AVX3_DL.
    const hn::Rebind<std::uint8_t, DF> d8;
    const hn::RepartitionToWide<decltype(d8)> d16;
    const hn::Rebind<std::uint8_t, decltype(d16)> d_pairs;
    const auto wide = hn::BitCast(d16, hn::DemoteTo(d8, codes));
    const auto pairs = hn::And(hn::Or(wide, hn::ShiftRight<4>(wide)), hn::Set(d16, 0xff));
    const auto narrow = hn::DemoteTo(d_pairs, hn::BitCast(hn::RebindToSigned<decltype(d16)>{}, pairs));
    hn::StoreU(narrow, d_pairs, reinterpret_cast<std::uint8_t*>(to));
  }
}

/// Calls f(dims of the group as a constant, first dim, group) for every group.
template <class Q, int Dims, class F>
void each_group(F&& f) {
  constexpr int width = Q::group_dims == 0 || Q::group_dims > Dims ? Dims : Q::group_dims;
  constexpr int whole = Dims / width, rest = Dims % width;
  for (int group = 0; group < whole; ++group) f(std::integral_constant<int, width>{}, group * width, group);
  if constexpr (rest != 0) f(std::integral_constant<int, rest>{}, whole * width, whole);
}

/// Some tokens at a time, so that the parameters of all their groups are found side by side.
template <class Q, int Dims>
class GroupEncoder {
  using Rule = CodeRule<Q>;
  static constexpr int groups = group_count<Q>(Dims);
  static constexpr int fitting = groups < 16 ? 16 / groups : 1;
  static constexpr int near = 2048 / Dims > 0 ? 2048 / Dims : 1;  // 8 KiB of floats

 public:
  static constexpr int tokens_at_once = fitting < near ? fitting : near;

  GroupEncoder(const float* rows, std::int64_t stride, int count)
      : rows_(rows), stride_(stride), count_(count) {}

  /// Finds all parameters; false where a value is not finite.
  bool fit() {
    for (int t = 0; t < count_; ++t)
      each_group<Q, Dims>([&](auto dims, int begin, int group) {
        measure<dims>(rows_ + t * stride_ + begin, t * groups + group);
      });
    using DF = hn::CappedTag<float, std::bit_ceil(static_cast<std::size_t>(tokens_at_once * groups))>;
    const DF df;
    const IntsOf<DF> di;
    const int lanes = static_cast<int>(hn::Lanes(df));
    auto smallest = hn::Zero(di), largest = hn::Zero(di);
    for (int i = 0; i < count_ * groups; i += lanes) {
      const auto high = hn::LoadU(di, high_ + i);
      largest = hn::Max(largest, high);
      Fitted<DF> fitted;
      if constexpr (Rule::has_min) {
        const auto low = hn::LoadU(di, low_ + i);
        smallest = hn::Min(smallest, low);
        fit_ranges(df, low, high, fitted);
        hn::StoreU(fitted.from, df, from_ + i);
        store_halves(df, fitted.min, min_ + i);
      } else {
        fit_scales<Rule::high>(df, hn::BitCast(df, high), fitted);
      }
      hn::StoreU(fitted.inverse, df, inverse_ + i);
      store_halves(df, fitted.scale, scale_ + i);
    }
    const auto beyond =
        hn::Or(hn::Gt(largest, hn::Set(di, 0x7f7fffff)), hn::Lt(smallest, hn::Set(di, -0x7f800000)));
    return hn::AllFalse(di, beyond);
  }

  /// Writes parameters and codes to the slots from `slot` on.
  void write(const Tile<SlotMajor, std::byte>& to, int slot) const {
    for (int t = 0; t < count_; ++t) {
      std::byte* codes = to.codes + (slot + t) * to.code_stride;
      auto* params = &to.template param<typename Q::Param>(slot + t);
      each_group<Q, Dims>([&](auto dims, int begin, int group) {
        const int i = t * groups + group;
        params[group].scale = fp16::from_bits(scale_[i]);
        if constexpr (Rule::has_min) params[group].min = fp16::from_bits(min_[i]);
        const float* row = rows_ + t * stride_ + begin;
        each_vector<float, dims>([&](auto df, int d) {
          auto x = hn::LoadU(df, row + d);
          if constexpr (Rule::has_min) x = hn::Sub(x, hn::Set(df, from_[i]));
          const auto scaled = hn::Mul(x, hn::Set(df, inverse_[i]));
          store_codes<Q::code_bits>(df, round_codes<Rule::low, Rule::high, Rule::bias>(df, scaled),
                                    codes + (begin + d) * Q::code_bits / 8);
        });
      });
    }
  }

 private:
  /// The range of a group's values as keys, or the bits of their largest magnitude.
  template <int Count>
  void measure(const float* x, int i) {
    const hn::CappedTag<std::int32_t, std::bit_floor(static_cast<std::size_t>(Count))> d;
    const auto key_at = [&](int at) {
      const auto bits = hn::BitCast(d, hn::LoadU(hn::RebindToFloat<decltype(d)>{}, x + at));
      if constexpr (Rule::has_min)
        return ordered_key(d, bits);
      else
        return hn::And(bits, hn::Set(d, 0x7fffffff));
    };
    auto low = key_at(0), high = low;  // not to begin with lanes that no value has
    each_vector<std::int32_t, Count>([&](auto, int at) {
      const auto key = key_at(at);
      if constexpr (Rule::has_min) low = hn::Min(low, key);
      high = hn::Max(high, key);
    });
    if constexpr (Rule::has_min) low_[i] = hn::GetLane(hn::MinOfLanes(d, low));
    high_[i] = hn::GetLane(hn::MaxOfLanes(d, high));
  }

  static constexpr int capacity =
      tokens_at_once * groups + static_cast<int>(hn::MaxLanes(hn::ScalableTag<float>{}));

  const float* rows_;
  std::int64_t stride_;
  int count_;
  // Lanes behind the last group find parameters for zeros.
  std::int32_t low_[Rule::has_min ? capacity : 1] = {}, high_[capacity] = {};
  float from_[Rule::has_min ? capacity : 1], inverse_[capacity];
  std::uint16_t min_[Rule::has_min ? capacity : 1], scale_[capacity];
};

/// Writes what quant.encode() does, with `to_stored` before it: `count` rows of Dims numbers to the slots
/// from `slot` on.
template <int Dims, class Q, class T>
void encode_rows(const Q& quant, const Tile<SlotMajor, std::byte>& to, int slot, const T* rows,
                 std::int64_t stride, int count) {
  if constexpr (is_identity<Q>) {
    for (int t = 0; t < count; ++t) {
      auto* codes = reinterpret_cast<typename Q::Code*>(to.codes + (slot + t) * to.code_stride);
      if constexpr (rotates<Q>) {
        float row[Dims];
        convert_row<Dims>(rows + t * stride, row);
        to_stored(quant, row, Dims);
        convert_row<Dims>(row, codes);
      } else {
        convert_row<Dims>(rows + t * stride, codes);
      }
    }
  } else {
    using Encoder = GroupEncoder<Q, Dims>;
    constexpr int block = Encoder::tokens_at_once;
    constexpr bool in_place = std::is_same_v<T, float> && !rotates<Q>;
    float block_rows[in_place ? 1 : block * Dims];
    for (int first = 0; first < count; first += block) {
      const int tokens = count - first < block ? count - first : block;
      Rows values{};
      if constexpr (in_place) {
        values = {rows + first * stride, stride};
      } else {
        for (int t = 0; t < tokens; ++t) {
          convert_row<Dims>(rows + (first + t) * stride, block_rows + t * Dims);
          to_stored(quant, block_rows + t * Dims, Dims);
        }
        values = {block_rows, Dims};
      }
      Encoder encoder(values.data, values.stride, tokens);
      // NaN follows rules that no two processors' vectors share.
      if (encoder.fit())
        encoder.write(to, slot + first);
      else
        quant.encode(to, slot + first, tokens, values);
    }
  }
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
