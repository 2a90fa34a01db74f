// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// How many bytes a page takes and where its planes lie: the only source of sizes.

#include <cstdint>

#include "kvfolia/core/concepts.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"

namespace kvfolia::inline KVF_ABI {

/// One plane of a page: codes or parameters, one tile a head. Tiles of codes are padded to 16 bytes, those
/// of parameters to 4; planes begin at multiples of 16.
struct PlaneFormat {
  std::int64_t tile_bytes = 0;
  std::int64_t slot_stride = 0;  ///< bytes between consecutive slots, in slot-major order; 0 for the
                                 ///< parameters of blocks
};

/// Bytes of one page and layer: keys, values, keys' parameters, values' parameters.
struct PageFormat {
  PlaneFormat keys{};
  PlaneFormat values{};
  PlaneFormat key_params{};
  PlaneFormat value_params{};
  int heads = 0;

  constexpr std::int64_t key_offset() const { return 0; }
  constexpr std::int64_t value_offset() const { return behind(key_offset(), keys); }
  constexpr std::int64_t key_param_offset() const { return behind(value_offset(), values); }
  constexpr std::int64_t value_param_offset() const { return behind(key_param_offset(), key_params); }
  constexpr std::int64_t slice_bytes() const { return behind(value_param_offset(), value_params); }

 private:
  constexpr std::int64_t behind(std::int64_t offset, const PlaneFormat& plane) const {
    return (offset + heads * plane.tile_bytes + 15) / 16 * 16;
  }
};

namespace detail {

constexpr std::int64_t to_multiple(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

template <class Q>
constexpr PlaneFormat code_plane(int dims, int page_tokens) {
  const std::int64_t stride = kvfolia::code_bytes<Q>(dims);
  return {to_multiple(stride * page_tokens, 16), stride};
}
template <class Q>
constexpr PlaneFormat param_plane(int dims, int page_tokens) {
  const std::int64_t bytes = Q::param_bytes(dims, page_tokens);
  return {to_multiple(bytes, 4), Q::seal_tokens == 1 ? bytes / page_tokens : 0};
}

}  // namespace detail

/// The format of pages coded by `Quant`, which is no Mixed: that has two. A layout that shares key and
/// value stores no values.
template <LayoutPolicy Layout, QuantPolicy Quant>
requires(!is_mixed<Quant>) constexpr PageFormat page_format(int kv_heads, int page_tokens) {
  using Key = KeySide<Quant>;
  using Value = ValueSide<Quant>;
  static_assert(fits<Key>(Layout::key_dim), "the quantizer of keys cannot code so many dims");
  static_assert(Layout::shares_key_value || fits<Value>(Layout::value_dim),
                "the quantizer of values cannot code so many dims");
  PageFormat format;
  format.heads = kv_heads;
  format.keys = detail::code_plane<Key>(Layout::key_dim, page_tokens);
  format.key_params = detail::param_plane<Key>(Layout::key_dim, page_tokens);
  if (!Layout::shares_key_value) {
    format.values = detail::code_plane<Value>(Layout::value_dim, page_tokens);
    format.value_params = detail::param_plane<Value>(Layout::value_dim, page_tokens);
  }
  return format;
}

/// Bits that a value costs, parameters included, over a full page: the mean of keys and values.
template <LayoutPolicy Layout, QuantPolicy Quant>
constexpr double bits_per_value(int page_tokens) {
  const PageFormat f = page_format<Layout, Quant>(1, page_tokens);
  const int dims = Layout::key_dim + (Layout::shares_key_value ? 0 : Layout::value_dim);
  const std::int64_t bytes =
      f.keys.tile_bytes + f.values.tile_bytes + f.key_params.tile_bytes + f.value_params.tile_bytes;
  return 8.0 * static_cast<double>(bytes) / (static_cast<double>(dims) * page_tokens);
}

/// Whether pages of this size can be laid out: the orders ask for whole groups of slots.
template <LayoutPolicy Layout>
constexpr bool page_tokens_fit(int page_tokens) {
  return page_tokens > 0 && (Layout::page_tokens == dynamic || Layout::page_tokens == page_tokens) &&
         page_tokens % Layout::KeyOrder::slot_multiple == 0 &&
         page_tokens % Layout::ValueOrder::slot_multiple == 0;
}

namespace detail {

template <QuantPolicy Quant>
inline constexpr int largest_block =
    CodedOf<Quant>::High::seal_tokens > CodedOf<Quant>::Low::seal_tokens ? CodedOf<Quant>::High::seal_tokens
                                                                         : CodedOf<Quant>::Low::seal_tokens;

}  // namespace detail

/// Whether they can be coded: in whole blocks.
template <QuantPolicy Quant>
constexpr bool blocks_fit(int page_tokens) {
  using Coded = detail::CodedOf<Quant>;
  return page_tokens % Coded::High::seal_tokens == 0 && page_tokens % Coded::Low::seal_tokens == 0;
}

}  // namespace kvfolia::inline KVF_ABI
