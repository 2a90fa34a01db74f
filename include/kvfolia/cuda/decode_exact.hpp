// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Tokens of pages that are not coded, in a cache that codes its pages: few, so read element by element from
// where they lie.

#include <cstddef>
#include <cstdint>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/formats.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/paged_view.hpp"
#include "kvfolia/cuda/context.hpp"
#include "kvfolia/cuda/unpack.hpp"

namespace kvfolia::inline KVF_ABI::cuda::detail {

/// A lane's operands of mma for such tokens of a part of a tile; 0 for all others.
template <class Ctx, class Layout, class Quant, class Shape>
class ExactTokens {
 public:
  using KeyShape = typename Shape::KeyShape;
  using ValueShape = typename Shape::ValueShape;

  KVF_INLINE KVF_HD ExactTokens(Ctx& ctx, const PagedView<Layout, Quant>& view, int head, SharedOffset stage,
                                int part)
      : ctx_(ctx), line_(ctx.lane() / 4), quad_(ctx.lane() % 4) {
    const FormatView& format = view.formats[exact];
    KVF_UNROLLED (half, 2) {
      const int first = 16 * part + 8 * half;
      keys_[half] = row(format.keys, head, stage, first + line_);
      KVF_UNROLLED (i, 2) values_[half][i] = row(format.values, head, stage, first + 2 * quad_ + i);
    }
  }

  /// Whether the token of a row of products that this lane has, line or line + 8, is such a one.
  KVF_INLINE KVF_HD bool has(int half) const { return keys_[half] != nullptr; }

  KVF_INLINE KVF_HD void key_operand(int step, std::uint32_t (&a)[4]) {
    KVF_UNROLLED (r, 4) {
      const int first = key_dim_of(KeyShape::kind, step, quad_, r / 2, 0);
      const int second = key_dim_of(KeyShape::kind, step, quad_, r / 2, 1);
      a[r] = pack<Ctx, false>(element<KeyCode>(keys_[r % 2], first, Layout::key_dim),
                              element<KeyCode>(keys_[r % 2], second, Layout::key_dim));
    }
  }
  KVF_INLINE KVF_HD void value_operand(int tile, std::uint32_t (&a)[4]) {
    KVF_UNROLLED (r, 4) {
      const int dim = value_dim_of(ValueShape::kind, tile, line_, r % 2);
      a[r] = pack<Ctx, false>(element<ValueCode>(values_[r / 2][0], dim, Layout::value_dim),
                              element<ValueCode>(values_[r / 2][1], dim, Layout::value_dim));
    }
  }

 private:
  static constexpr int exact = exact_format<Quant>;
  using KeyCode = typename KeySide<typename Quant::Exact>::Code;
  using ValueCode = typename ValueSide<typename Quant::Exact>::Code;

  /// Where a token's row begins; null if it is none of such a page.
  KVF_INLINE KVF_HD const std::byte* row(const PlaneView& plane, int head, SharedOffset stage, int token) {
    const auto at = stage + static_cast<SharedOffset>(token * 4);
    const TableEntry entry{ctx_.template load_shared<std::int32_t>(at + Shape::entries)};
    if (entry.absent()) return nullptr;
    return plane.tile(entry.page(), head) +
           ctx_.template load_shared<std::int32_t>(at + Shape::slots) * plane.slot_stride;
  }
  template <class Code>
  KVF_INLINE KVF_HD float element(const std::byte* row, int dim, int dims) {
    if (!row || dim >= dims) return 0.0f;
    return static_cast<float>(ctx_.load(reinterpret_cast<const Code*>(row) + dim));
  }

  Ctx& ctx_;
  const int line_;
  const int quad_;
  const std::byte* keys_[2];
  const std::byte* values_[2][2];
};

}  // namespace kvfolia::inline KVF_ABI::cuda::detail
