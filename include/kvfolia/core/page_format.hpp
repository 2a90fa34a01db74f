// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How many bytes a page takes and where its planes lie: the only source of sizes.

#include <cstdint>
#include <type_traits>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

/// Formats a cache with this quantizer has. Format 0 is the quantizer's own; format 1, where they
/// differ, holds exact pages.
template <QuantPolicy Quant>
inline constexpr int format_count = std::is_same_v<Quant, typename Quant::Exact> ? 1 : 2;

inline constexpr int coded_format = 0;
template <QuantPolicy Quant>
inline constexpr int exact_format = format_count<Quant> - 1;

/// Bytes of one page and layer: for every plane, one tile a head. Tiles are padded to 16 bytes.
struct PageFormat {
  std::int64_t key_bytes = 0;  ///< of one tile, as are the next three
  std::int64_t value_bytes = 0;
  std::int64_t key_param_bytes = 0;
  std::int64_t value_param_bytes = 0;
  std::int64_t key_stride = 0;  ///< bytes between slots in slot-major order
  std::int64_t value_stride = 0;
  std::int64_t param_stride = 0;  ///< bytes between the parameters of consecutive slots
  int heads = 0;

  constexpr std::int64_t key_offset() const { return 0; }
  constexpr std::int64_t value_offset() const { return heads * key_bytes; }
  constexpr std::int64_t key_param_offset() const { return value_offset() + heads * value_bytes; }
  constexpr std::int64_t value_param_offset() const { return key_param_offset() + heads * key_param_bytes; }
  constexpr std::int64_t slice_bytes() const { return value_param_offset() + heads * value_param_bytes; }
};

namespace detail {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

template <class Quant>
constexpr std::int64_t tile_bytes(int dims, int page_tokens) {
  return round_up((std::int64_t{dims} * page_tokens * Quant::code_bits + 7) / 8, 16);
}

}  // namespace detail

/// The format that pages coded by `Quant` have. A layout that shares key and value stores no values.
template <LayoutPolicy Layout, QuantPolicy Quant>
constexpr PageFormat page_format(int kv_heads, int page_tokens) {
  PageFormat format;
  format.heads = kv_heads;
  format.key_stride = std::int64_t{Layout::key_dim} * Quant::code_bits / 8;
  format.value_stride = std::int64_t{Layout::value_dim} * Quant::code_bits / 8;
  format.key_bytes = detail::tile_bytes<Quant>(Layout::key_dim, page_tokens);
  format.key_param_bytes = detail::round_up(Quant::param_bytes(Layout::key_dim, page_tokens), 16);
  if (!Layout::shares_key_value) {
    format.value_bytes = detail::tile_bytes<Quant>(Layout::value_dim, page_tokens);
    format.value_param_bytes = detail::round_up(Quant::param_bytes(Layout::value_dim, page_tokens), 16);
  }
  format.param_stride = Quant::param_bytes(Layout::key_dim, page_tokens) / page_tokens;
  return format;
}

/// Whether pages of this size can be laid out: the orders ask for whole groups of slots.
template <LayoutPolicy Layout>
constexpr bool page_tokens_fit(int page_tokens) {
  return page_tokens > 0 && (Layout::page_tokens == dynamic || Layout::page_tokens == page_tokens) &&
         page_tokens % Layout::KeyOrder::slot_multiple == 0 &&
         page_tokens % Layout::ValueOrder::slot_multiple == 0;
}

}  // namespace kvfolia::inline KVF_ABI
