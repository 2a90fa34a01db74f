// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Rows of numbers from one type to another, with vectors: the bits are those of the types' own conversions.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/tensor.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/vectors.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail {

template <class DF>
using IntsOf = hn::RebindToSigned<DF>;
template <class DF>
using HalvesOf = hn::Rebind<std::uint16_t, DF>;

/// `bits` where `mask` says so, else 0.
template <class M, class DI>
hn::Vec<DI> bits_where(M mask, DI di, std::int32_t bits) {
  return hn::IfThenElseZero(mask, hn::Set(di, bits));
}

/// fp16 in the lower halves of integers as floats; see fp16's conversion, which this repeats.
template <class DF>
hn::Vec<DF> widen_halves(DF df, hn::Vec<IntsOf<DF>> bits) {
  const IntsOf<DF> di;
  if constexpr (has_half_instructions) {
    const hn::Rebind<hwy::float16_t, DF> d16;
    return hn::PromoteTo(df, hn::BitCast(d16, hn::DemoteTo(HalvesOf<DF>{}, bits)));
  } else {
    const auto magnitude = hn::And(bits, hn::Set(di, 0x7fff));
    const auto special = bits_where(hn::Gt(magnitude, hn::Set(di, 0x7bff)), di, 0x38000000);
    const auto quiet = bits_where(hn::Gt(magnitude, hn::Set(di, 0x7c00)), di, 0x400000);
    const auto rebased = hn::Add(hn::ShiftLeft<13>(magnitude), hn::Set(di, 0x38000000));
    const auto normal = hn::Or(hn::Add(rebased, special), quiet);
    const auto counted = hn::Or(hn::And(magnitude, hn::Set(di, 0x3ff)), hn::Set(di, 0x3f000000));
    const auto subnormal = hn::BitCast(di, hn::Sub(hn::BitCast(df, counted), hn::Set(df, 0.5f)));
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(di, 0x8000)));
    const auto wide = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x400)), subnormal, normal);
    return hn::BitCast(df, hn::Or(sign, wide));
  }
}

/// Floats rounded to fp16, in the lower halves of integers.
template <class DF>
hn::Vec<IntsOf<DF>> round_to_halves(DF df, hn::Vec<DF> x) {
  const IntsOf<DF> di;
  if constexpr (has_half_instructions) {
    const hn::Rebind<hwy::float16_t, DF> d16;
    return hn::PromoteTo(di, hn::BitCast(HalvesOf<DF>{}, hn::DemoteTo(d16, x)));
  } else {
    const auto raw = hn::BitCast(di, x);
    const auto magnitude = hn::And(raw, hn::Set(di, 0x7fffffff));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
    const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, hn::Set(di, 0xfff - 0x38000000)), odd));
    // Beside 0.5 a float's last bit counts units of 2^-24, as a subnormal fp16 does: the addition rounds.
    const auto counted = hn::Add(hn::BitCast(df, magnitude), hn::Set(df, 0.5f));
    const auto subnormal = hn::Sub(hn::BitCast(di, counted), hn::Set(di, 0x3f000000));
    auto half = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x38800000)), subnormal, normal);
    half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x477fefff)), hn::Set(di, 0x7c00), half);
    const auto payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 0x3ff));
    half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7f800000)), hn::Or(payload, hn::Set(di, 0x7e00)),
                          half);
    return hn::Or(half, hn::And(hn::ShiftRight<16>(raw), hn::Set(di, 0x8000)));
  }
}

template <class DF>
hn::Vec<DF> load_floats(DF df, const float* from) {
  return hn::LoadU(df, from);
}
template <class DF>
hn::Vec<DF> load_floats(DF df, const bf16* from) {
  const auto wide = hn::PromoteTo(IntsOf<DF>{}, hn::LoadU(HalvesOf<DF>{}, &from->bits));
  return hn::BitCast(df, hn::ShiftLeft<16>(wide));
}
template <class DF>
hn::Vec<DF> load_floats(DF df, const fp16* from) {
  const auto bits = hn::LoadU(HalvesOf<DF>{}, &from->bits);
  if constexpr (has_half_instructions)
    return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, DF>{}, bits));
  else
    return widen_halves(df, hn::PromoteTo(IntsOf<DF>{}, bits));
}

template <class DF>
void store_halves(DF /*df*/, hn::Vec<IntsOf<DF>> bits, std::uint16_t* to) {
  hn::StoreU(hn::DemoteTo(HalvesOf<DF>{}, bits), HalvesOf<DF>{}, to);
}

// Stores what Identity<T>::round gives.

template <class DF>
void store_floats(DF df, hn::Vec<DF> x, float* to) {
  hn::StoreU(x, df, to);
}
template <class DF>
void store_floats(DF /*df*/, hn::Vec<DF> x, bf16* to) {
  const IntsOf<DF> di;
  const auto raw = hn::BitCast(di, x);
  const auto upper = hn::And(hn::ShiftRight<16>(raw), hn::Set(di, 0xffff));
  const auto odd = hn::And(upper, hn::Set(di, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(raw, hn::Set(di, 0x7fff)), odd));
  const auto is_nan = hn::Gt(hn::And(raw, hn::Set(di, 0x7fffffff)), hn::Set(di, 0x7f800000));
  const auto bits =
      hn::IfThenElse(is_nan, hn::Or(upper, hn::Set(di, 0x40)), hn::And(rounded, hn::Set(di, 0xffff)));
  store_halves(DF{}, bits, &to->bits);
}
template <class DF>
void store_floats(DF df, hn::Vec<DF> x, fp16* to) {
  const IntsOf<DF> di;
  const auto magnitude = hn::And(hn::BitCast(di, x), hn::Set(di, 0x7fffffff));
  const auto clamped = hn::Min(hn::Max(x, hn::Set(df, -65504.0f)), hn::Set(df, 65504.0f));
  const auto is_finite = hn::RebindMask(df, hn::Lt(magnitude, hn::Set(di, 0x7f800000)));
  const auto kept = hn::IfThenElse(is_finite, clamped, x);
  if constexpr (has_half_instructions) {
    const auto halves = hn::DemoteTo(hn::Rebind<hwy::float16_t, DF>{}, kept);
    hn::StoreU(hn::BitCast(HalvesOf<DF>{}, halves), HalvesOf<DF>{}, &to->bits);
  } else {
    store_halves(df, round_to_halves(df, kept), &to->bits);
  }
}

/// Dims numbers as Identity<To> stores them.
template <int Dims, class From, class To>
void convert_row(const From* from, To* to) {
  if constexpr (std::is_same_v<From, To> && std::is_same_v<To, float>) {
    std::memcpy(to, from, Dims * sizeof(float));
  } else if constexpr (std::is_same_v<From, To>) {
    // Only a NaN changes: it becomes quiet.
    constexpr std::int16_t infinity = std::is_same_v<To, fp16> ? 0x7c00 : 0x7f80;
    constexpr std::int16_t quiet = std::is_same_v<To, fp16> ? 0x200 : 0x40;
    each_vector<std::uint16_t, Dims>([&](auto d, int i) {
      const hn::RebindToSigned<decltype(d)> di;
      const auto bits = hn::LoadU(d, &from[i].bits);
      const auto magnitude = hn::And(hn::BitCast(di, bits), hn::Set(di, 0x7fff));
      const auto nan = hn::Gt(magnitude, hn::Set(di, infinity));
      const auto made_quiet = hn::IfThenElseZero(nan, hn::Set(di, quiet));
      hn::StoreU(hn::Or(bits, hn::BitCast(d, made_quiet)), d, &to[i].bits);
    });
  } else {
    each_vector<float, Dims>([&](auto d, int i) { store_floats(d, load_floats(d, from + i), to + i); });
  }
}

}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET::detail
