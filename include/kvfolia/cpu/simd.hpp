// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Vectors of the instruction set that is compiled for, through Highway; and the few instructions that
// Highway 1.0 has no name for.

#include <hwy/contrib/math/math-inl.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/cpu/target.hpp"
#include "kvfolia/cpu/vectors.hpp"

namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET {

/// Whether vectors have a size that the compiler knows: without one only the plain path is there.
inline constexpr bool has_vectors = !HWY_HAVE_SCALABLE;

namespace detail {

using FloatTag = hn::ScalableTag<float>;
using Int32Tag = hn::RebindToSigned<FloatTag>;
using Uint32Tag = hn::RebindToUnsigned<FloatTag>;
using Floats = hn::Vec<FloatTag>;
using Int32s = hn::Vec<Int32Tag>;
using Uint32s = hn::Vec<Uint32Tag>;

/// Floats in a vector.
inline constexpr int lanes = static_cast<int>(hn::MaxLanes(FloatTag()));

/// f(constant 0), ..., f(constant N - 1): written out, so that arrays of vectors stay in registers.
template <int N, class F>
KVF_INLINE void unroll(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) KVF_INLINE_LAMBDA {
    (f(std::integral_constant<int, I>()), ...);
  }
  (std::make_integer_sequence<int, N>());
}

template <class T>
KVF_INLINE constexpr T round_up(T n, T to) {
  return (n + to - 1) / to * to;
}

KVF_INLINE Floats load(const float* from) { return hn::LoadU(FloatTag(), from); }
KVF_INLINE void store(Floats x, float* to) { hn::StoreU(x, FloatTag(), to); }
KVF_INLINE Floats broadcast(float x) { return hn::Set(FloatTag(), x); }
KVF_INLINE Floats zeros() { return hn::Zero(FloatTag()); }
KVF_INLINE float sum_of(Floats x) { return hn::GetLane(hn::SumOfLanes(FloatTag(), x)); }
KVF_INLINE float max_of(Floats x) { return hn::GetLane(hn::MaxOfLanes(FloatTag(), x)); }

/// 0, 1, 2, ...
KVF_INLINE Uint32s lane_numbers() {
  alignas(64) static constexpr std::uint32_t numbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                            8, 9, 10, 11, 12, 13, 14, 15};
  return hn::LoadU(Uint32Tag(), numbers);
}

/// Numbers of type T from `at` on, one a lane.
template <class T>
KVF_INLINE auto load_as(const void* at) {
  return hn::LoadU(hn::Rebind<T, FloatTag>(), static_cast<const T*>(at));
}

/// e^x for x <= 104, to one unit in the last place (Highway's Exp); 0 below -104. NaN stays NaN.
KVF_INLINE Floats exp(Floats x) { return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(FloatTag(), x)); }

/// tanh(x), to four units in the last place (Highway's Tanh). NaN stays NaN.
KVF_INLINE Floats tanh(Floats x) { return hn::IfThenElse(hn::IsNaN(x), x, hn::Tanh(FloatTag(), x)); }

/// fp16 bits in the low halves.
KVF_INLINE Floats floats_of_half_bits(Uint32s bits) {
  const Uint32Tag u;
  // As a float's exponent and mantissa, 2^112 too small: the product is exact, for subnormals, too.
  const Uint32s magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(u, 0x7fffu)));
  const Floats scaled = hn::Mul(hn::BitCast(FloatTag(), magnitude), broadcast(0x1p112f));
  const Uint32s sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(u, 0x8000u)));
  // Infinities and NaN keep the largest exponent.
  const auto special = hn::Gt(hn::BitCast(Int32Tag(), magnitude), hn::Set(Int32Tag(), 0x0f7fffff));
  const Uint32s rest = hn::IfThenElseZero(hn::RebindMask(u, special), hn::Set(u, 0x7f800000u));
  return hn::BitCast(FloatTag(), hn::Or(hn::Or(hn::BitCast(u, scaled), sign), rest));
}

KVF_INLINE Floats load_floats(const float* from) { return load(from); }
KVF_INLINE Floats load_floats(const fp16* from) {
  if constexpr (has_half_instructions)
    return hn::PromoteTo(FloatTag(), load_as<hwy::float16_t>(from));
  else  // Highway's emulation knows no infinities
    return floats_of_half_bits(hn::PromoteTo(Uint32Tag(), load_as<std::uint16_t>(from)));
}
KVF_INLINE Floats load_floats(const bf16* from) {
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(Uint32Tag(), load_as<std::uint16_t>(from))));
}

/// Whether dot4 exists: sums + the products of four unsigned bytes with four signed ones, in every lane.
#if defined(__AVX512VNNI__) && HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
inline constexpr bool has_dot4 = true;
KVF_INLINE Int32s dot4(Int32s sums, Uint32s bytes, Int32s query) {
  return Int32s{_mm512_dpbusd_epi32(sums.raw, bytes.raw, query.raw)};
}
#elif defined(__AVXVNNI__) && HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2
inline constexpr bool has_dot4 = true;
KVF_INLINE Int32s dot4(Int32s sums, Uint32s bytes, Int32s query) {
  return Int32s{_mm256_dpbusd_avx_epi32(sums.raw, bytes.raw, query.raw)};
}
#else
inline constexpr bool has_dot4 = false;
#endif

#if HWY_TARGET != HWY_SCALAR
/// The sum over all blocks of four lanes.
template <class D>
KVF_INLINE void store_block_sums(D d, hn::Vec<D> x, float* to) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    hn::StoreU(x, d, to);
  } else {
    const hn::Half<D> half;
    store_block_sums(half, hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x)), to);
  }
}
#endif

/// The sums over the lanes of four vectors, side by side in `to`.
KVF_INLINE void store_sums(Floats a, Floats b, Floats c, Floats d, float* to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = sum_of(a);
  to[1] = sum_of(b);
  to[2] = sum_of(c);
  to[3] = sum_of(d);
#else
  const FloatTag f;
  const Floats ab = hn::Add(hn::InterleaveLower(f, a, b), hn::InterleaveUpper(f, a, b));
  const Floats cd = hn::Add(hn::InterleaveLower(f, c, d), hn::InterleaveUpper(f, c, d));
  const hn::RepartitionToWide<FloatTag> pairs;
  const auto ab2 = hn::BitCast(pairs, ab), cd2 = hn::BitCast(pairs, cd);
  const Floats low = hn::BitCast(f, hn::InterleaveLower(pairs, ab2, cd2));
  const Floats high = hn::BitCast(f, hn::InterleaveUpper(pairs, ab2, cd2));
  store_block_sums(f, hn::Add(low, high), to);
#endif
}

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI::cpu::inline KVF_CPU_TARGET
