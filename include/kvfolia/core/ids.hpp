// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Strong integer types: a position is not a slot, a page is not a layer.

#include <compare>
#include <cstdint>

#include "kvfolia/core/config.hpp"

namespace kvfolia::inline KVF_ABI {

template <class Tag, class Int>
struct StrongId {
  Int value{};

  constexpr StrongId() = default;
  KVF_HD constexpr explicit StrongId(Int v) : value(v) {}
  friend constexpr auto operator<=>(StrongId, StrongId) = default;
};

/// A layer of the model, from 0.
using LayerId = StrongId<struct LayerTag, std::int32_t>;
/// A page within its format.
using PageId = StrongId<struct PageTag, std::int32_t>;
/// A sequence of one cache. Never reused: an id whose sequence was released stays invalid.
using SeqId = StrongId<struct SeqTag, std::int64_t>;
/// A token's position in the text, from 0. Eviction does not renumber.
using LogicalPos = StrongId<struct LogicalPosTag, std::int32_t>;

/// One page of a block table: absent when negative, else a format (bits 30 and 29) and the page's
/// number within it. A plain page number is a page of format 0.
struct TableEntry {
  static constexpr int format_shift = 29;
  static constexpr int max_formats = 3;
  static constexpr std::int32_t max_pages = std::int32_t{1} << format_shift;

  std::int32_t raw = -1;

  KVF_HD static constexpr TableEntry make(int format, PageId page) {
    return {(format << format_shift) | page.value};
  }
  KVF_HD constexpr bool absent() const { return raw < 0; }
  KVF_HD constexpr int format() const { return raw >> format_shift; }
  KVF_HD constexpr PageId page() const { return PageId{raw & (max_pages - 1)}; }
  friend constexpr bool operator==(TableEntry, TableEntry) = default;
};

/// A copy of one page, all its layers, within a format.
struct PageCopy {
  int format;
  PageId from;
  PageId to;
  friend constexpr bool operator==(const PageCopy&, const PageCopy&) = default;
};

/// A page whose slots come from a page of another format, all its layers: slots [0, kept) from `from`,
/// the next new_tokens ones from the batch's tokens from first_token on. Sealing fills a coded page;
/// opening a coded page for more tokens fills a part of an exact one; demoting keeps all slots. No page
/// is `to` of two recodes of a batch, or `to` of one and `from` of another. One whose `to` is absent is none.
struct PageRecode {
  TableEntry from;  ///< absent where nothing is kept
  TableEntry to;
  std::int32_t kept;
  std::int32_t first_token;
  std::int32_t new_tokens;
  friend constexpr bool operator==(const PageRecode&, const PageRecode&) = default;
};

/// Where a token lies: table entry times page_tokens plus the slot in the page; -1 is nowhere.
/// For pages of format 0 this is the slot number that engines use.
struct PhysSlot {
  std::int64_t raw = -1;

  KVF_HD static constexpr PhysSlot make(TableEntry entry, int slot, int page_tokens) {
    return {std::int64_t{entry.raw} * page_tokens + slot};
  }
  KVF_HD constexpr bool absent() const { return raw < 0; }
  KVF_HD constexpr TableEntry entry(int page_tokens) const {
    return {static_cast<std::int32_t>(raw / page_tokens)};
  }
  KVF_HD constexpr int slot(int page_tokens) const { return static_cast<int>(raw % page_tokens); }
  friend constexpr bool operator==(PhysSlot, PhysSlot) = default;
};

static_assert(TableEntry::make(2, PageId{5}).format() == 2);
static_assert(TableEntry::make(2, PageId{5}).page() == PageId{5});
static_assert(PhysSlot::make(TableEntry::make(1, PageId{3}), 7, 16).entry(16).page() == PageId{3});

}  // namespace kvfolia::inline KVF_ABI
