// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What the codes of the quantizers are, by one name for those that are alike.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
#include "kvfolia/core/rounding.hpp"
#include "kvfolia/core/small_floats.hpp"
#include "kvfolia/quant/centered.hpp"
#include "kvfolia/quant/compact.hpp"
#include "kvfolia/quant/fp4.hpp"
#include "kvfolia/quant/fp8.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int4.hpp"
#include "kvfolia/quant/int8.hpp"
#include "kvfolia/quant/rotated.hpp"

namespace kvfolia::inline KVF_ABI::detail {

/// What one of a quantizer's codes is, for kernels that read codes without it; `other`: only decode() can. As
/// mid4, those of uint4 are read less 7.5.
enum class CodeKind : std::uint8_t { other, fp32, fp16, bf16, int8, e4m3, e5m2, uint4, int4, mid4, e2m1 };

template <class Q>
inline constexpr CodeKind code_kind = CodeKind::other;
template <>
inline constexpr CodeKind code_kind<Identity<float>> = CodeKind::fp32;
template <>
inline constexpr CodeKind code_kind<Identity<fp16>> = CodeKind::fp16;
template <>
inline constexpr CodeKind code_kind<Identity<bf16>> = CodeKind::bf16;
template <int Group>
inline constexpr CodeKind code_kind<Int8Groups<Group>> = CodeKind::int8;
template <int Group>
inline constexpr CodeKind code_kind<Int4<Group>> = CodeKind::uint4;
template <int Tokens>
inline constexpr CodeKind code_kind<Int4Channels<Tokens>> = CodeKind::uint4;
template <int Tokens>
inline constexpr CodeKind code_kind<Compact4Channels<Tokens>> = CodeKind::uint4;
template <int Group>
inline constexpr CodeKind code_kind<Int4Symmetric<Group>> = CodeKind::int4;
template <>
inline constexpr CodeKind code_kind<Nvfp4> = CodeKind::e2m1;
template <>
inline constexpr CodeKind code_kind<Mxfp4> = CodeKind::e2m1;
template <class Code>
inline constexpr CodeKind fp8_kind = CodeKind::e4m3;
template <>
inline constexpr CodeKind fp8_kind<fp8_e5m2> = CodeKind::e5m2;
template <class Code>
inline constexpr CodeKind code_kind<Fp8<Code>> = fp8_kind<Code>;
template <class Code>
inline constexpr CodeKind code_kind<Fp8Tensor<Code>> = fp8_kind<Code>;
template <class Code, int Group>
inline constexpr CodeKind code_kind<Fp8Blocks<Code, Group>> = fp8_kind<Code>;
template <class Q, int Tokens>
inline constexpr CodeKind code_kind<Centered<Q, Tokens>> = code_kind<Q>;
template <class Q, int Block>
inline constexpr CodeKind code_kind<Rotated<Q, Block>> = code_kind<Q>;

KVF_INLINE KVF_HD constexpr int kind_bits(CodeKind kind) {
  switch (kind) {
    case CodeKind::fp32: return 32;
    case CodeKind::fp16:
    case CodeKind::bf16: return 16;
    case CodeKind::int8:
    case CodeKind::e4m3:
    case CodeKind::e5m2: return 8;
    default: return 4;
  }
}

/// The number that a code of so many bits is.
template <CodeKind Kind>
KVF_INLINE KVF_HD float code_number(std::uint32_t bits) {
  static_assert(Kind != CodeKind::other);
  if constexpr (Kind == CodeKind::fp32) return float_of(bits);
  const auto half = static_cast<std::uint16_t>(bits);
  if constexpr (Kind == CodeKind::fp16) return static_cast<float>(fp16::from_bits(half));
  if constexpr (Kind == CodeKind::bf16) return static_cast<float>(bf16::from_bits(half));
  const auto byte = static_cast<std::uint8_t>(bits);
  if constexpr (Kind == CodeKind::int8) return static_cast<float>(static_cast<std::int8_t>(byte));
  if constexpr (Kind == CodeKind::e4m3) return static_cast<float>(fp8_e4m3::from_bits(byte));
  if constexpr (Kind == CodeKind::e5m2) return static_cast<float>(fp8_e5m2::from_bits(byte));
  if constexpr (Kind == CodeKind::int4) return static_cast<float>(static_cast<int>(byte) - 8);
  if constexpr (Kind == CodeKind::e2m1) return static_cast<float>(fp4_e2m1::from_bits(byte));
  return static_cast<float>(byte);
}

}  // namespace kvfolia::inline KVF_ABI::detail
