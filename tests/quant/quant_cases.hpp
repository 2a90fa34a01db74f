// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Tiles with guarded memory of their own, and which documented bytes each quantizer should write.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/tile.hpp"
#include "kvfolia/layout/orders.hpp"
#include "kvfolia/quant/centered.hpp"
#include "kvfolia/quant/compact.hpp"
#include "kvfolia/quant/fp4.hpp"
#include "kvfolia/quant/fp8.hpp"
#include "kvfolia/quant/ggml.hpp"
#include "kvfolia/quant/identity.hpp"
#include "kvfolia/quant/int4.hpp"
#include "kvfolia/quant/int8.hpp"
#include "kvfolia/quant/rotated.hpp"
#include "quant/scalar_decoder.hpp"

namespace kvfolia_tests {

// The format of a quantizer, by the names of the documentation.

inline scalar::Fp16 raw_format(const kvfolia::Identity<kvfolia::fp16>&) { return {}; }
inline scalar::Bf16 raw_format(const kvfolia::Identity<kvfolia::bf16>&) { return {}; }
template <int Group>
scalar::Int8 raw_format(const kvfolia::Int8Groups<Group>&) {
  return {Group};
}
template <int Group>
scalar::Int4 raw_format(const kvfolia::Int4<Group>&) {
  return {Group};
}
template <int Group>
scalar::Int4Symmetric raw_format(const kvfolia::Int4Symmetric<Group>&) {
  return {Group};
}
template <int Tokens>
scalar::Int4Channels raw_format(const kvfolia::Int4Channels<Tokens>&) {
  return {Tokens};
}
template <int Tokens>
scalar::Compact4Channels raw_format(const kvfolia::Compact4Channels<Tokens>&) {
  return {Tokens};
}
inline scalar::Byte raw_byte(kvfolia::fp8_e4m3) { return scalar::e4m3; }
inline scalar::Byte raw_byte(kvfolia::fp8_e5m2) { return scalar::e5m2; }
template <class Code>
scalar::Fp8 raw_format(const kvfolia::Fp8<Code>&) {
  return {raw_byte(Code{})};
}
template <class Code>
scalar::Fp8Tensor raw_format(const kvfolia::Fp8Tensor<Code>& quant) {
  return {raw_byte(Code{}), double{quant.scale}};
}
template <class Code, int Group>
scalar::Fp8Blocks raw_format(const kvfolia::Fp8Blocks<Code, Group>&) {
  return {raw_byte(Code{}), Group};
}
inline scalar::Nvfp4 raw_format(const kvfolia::Nvfp4& quant) { return {double{quant.global}}; }
inline scalar::Mxfp4 raw_format(const kvfolia::Mxfp4&) { return {}; }
inline scalar::Q8_0 raw_format(const kvfolia::Q8_0&) { return {}; }
inline scalar::Q4_0 raw_format(const kvfolia::Q4_0&) { return {}; }
template <class Q, int Tokens>
auto raw_format(const kvfolia::Centered<Q, Tokens>& quant) {
  return scalar::Centered<decltype(raw_format(quant.inner))>{raw_format(quant.inner), Tokens};
}
template <class Q, int Block>
auto raw_format(const kvfolia::Rotated<Q, Block>& quant) {
  const Q& inner = quant;
  return scalar::Rotated<decltype(raw_format(inner))>{raw_format(inner), Block};
}

/// One tile of a quantizer, packed, between guards.
template <class Quant, class Order = kvfolia::SlotMajor>
class PackedTile {
 public:
  PackedTile(const Quant& quant, int dims, int tokens, std::byte poison = std::byte{0xa5})
      : quant_(quant),
        dims_(dims),
        tokens_(tokens),
        poison_(poison),
        code_bytes_(kvfolia::code_bytes<Quant>(dims) * tokens),
        param_bytes_(static_cast<int>(Quant::param_bytes(dims, tokens))),
        code_memory_(static_cast<std::size_t>(code_bytes_ + 2 * guard), poison),
        param_memory_(static_cast<std::size_t>(param_bytes_ + 2 * guard), poison) {}

  kvfolia::Tile<Order, std::byte> tile() {
    return {codes(), params(), dims_, tokens_, code_bytes_ / tokens_, param_bytes_ / tokens_};
  }
  kvfolia::Tile<Order, const std::byte> const_tile() {
    return {codes(), params(), dims_, tokens_, code_bytes_ / tokens_, param_bytes_ / tokens_};
  }
  scalar::RawTile raw() {
    return {codes(), params(), dims_, tokens_, code_bytes_ / tokens_, param_bytes_ / tokens_};
  }

  /// `values` are those of `tokens` tokens, from slot `slot` on.
  void encode(const std::vector<float>& values, int slot, int tokens) {
    quant_.encode(tile(), slot, tokens, kvfolia::Rows{values.data(), dims_});
  }
  void encode(const std::vector<float>& values) { encode(values, 0, tokens_); }
  std::vector<float> decode_slot(int slot) {
    std::vector<float> values(static_cast<std::size_t>(dims_));
    quant_.decode(const_tile(), slot, values.data());
    return values;
  }
  std::vector<float> decode() {
    std::vector<float> values(static_cast<std::size_t>(tokens_ * dims_));
    for (int t = 0; t < tokens_; ++t) quant_.decode(const_tile(), t, values.data() + t * dims_);
    return values;
  }
  bool guards_intact() const { return intact(code_memory_) && intact(param_memory_); }

  std::byte* codes() { return code_memory_.data() + guard; }
  std::byte* params() { return param_memory_.data() + guard; }
  int code_bytes() const { return code_bytes_; }
  int param_bytes() const { return param_bytes_; }
  std::vector<std::byte> all_codes() { return {codes(), codes() + code_bytes_}; }
  std::vector<std::byte> all_params() { return {params(), params() + param_bytes_}; }

 private:
  static constexpr int guard = 64;

  bool intact(const std::vector<std::byte>& memory) const {
    for (std::size_t i = 0; i < guard; ++i)
      if (memory[i] != poison_ || memory[memory.size() - 1 - i] != poison_) return false;
    return true;
  }

  Quant quant_;
  int dims_, tokens_;
  std::byte poison_;
  int code_bytes_, param_bytes_;
  std::vector<std::byte> code_memory_, param_memory_;
};

}  // namespace kvfolia_tests
