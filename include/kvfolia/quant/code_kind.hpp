// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// What the codes of the quantizers are, by one name for those that are alike.

#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/fp16.hpp"
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

}  // namespace kvfolia::inline KVF_ABI::detail
