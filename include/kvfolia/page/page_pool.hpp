// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Who holds which page of one format: states, reference counts, the free list.

#include <cstdint>
#include <vector>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"

namespace kvfolia::inline KVF_ABI {

/// A page is in exactly one of these. `cached` (findable, unreferenced) and `loading` belong to
/// prefix reuse and offload; no operation of the pool itself leads there.
enum class PageState : std::uint8_t { free, held, retired, cached, loading };

/// Every operation is O(1) and visits one page, however large the pool is. Not thread-safe.
///
///   free -- allocate --> held -- drop_ref, the last one --> retired -- reclaim --> free
///                         ^------------ revive ---------------'
class PagePool {
 public:
  /// Throws contract_error when a table entry cannot hold the page numbers.
  explicit PagePool(std::int64_t pages) {
    detail::require(pages >= 0, "pages must not be negative");
    detail::require(pages <= TableEntry::max_pages, "pages must fit a table entry (at most 2^29)");
    const auto count = static_cast<std::size_t>(pages);
    references_.assign(count, 0);
    states_.assign(count, PageState::free);
    free_list_.resize(count);
    // The lowest page number is taken first.
    for (std::size_t i = 0; i < count; ++i) free_list_[i] = static_cast<std::int32_t>(count - 1 - i);
  }

  std::int64_t pages() const { return static_cast<std::int64_t>(states_.size()); }
  std::int64_t free_pages() const { return static_cast<std::int64_t>(free_list_.size()); }
  std::int64_t retired_pages() const { return retired_; }
  std::int64_t held_pages() const { return pages() - free_pages() - retired_; }

  PageState state(PageId page) const { return states_[index(page)]; }
  std::int32_t references(PageId page) const { return references_[index(page)]; }
  /// The pages that allocate() would give, last one first.
  const std::vector<std::int32_t>& free_list() const { return free_list_; }

  /// A page with one reference.
  Result<PageId> allocate() {
    if (free_list_.empty()) return Error{Errc::out_of_pages, "pool", 1, 0};
    const PageId page{free_list_.back()};
    free_list_.pop_back();
    enter(page, PageState::held, 1);
    return page;
  }

  Result<> add_ref(PageId page) {
    if (!is(page, PageState::held)) return not_held(page);
    ++references_[index(page)];
    ++visits_;
    return {};
  }

  /// True when it was the last reference: the page is retired now, its bytes still readable. Dropping
  /// one that nobody holds is an error and changes nothing.
  Result<bool> drop_ref(PageId page) {
    if (!is(page, PageState::held)) return not_held(page);
    ++visits_;
    if (--references_[index(page)] > 0) return false;
    states_[index(page)] = PageState::retired;
    ++retired_;
    return true;
  }

  /// Takes back the drop_ref that retired the page.
  Result<> revive(PageId page) {
    if (!is(page, PageState::retired)) return not_held(page);
    --retired_;
    enter(page, PageState::held, 1);
    return {};
  }

  /// Makes a retired page available again.
  Result<> reclaim(PageId page) {
    if (!is(page, PageState::retired)) return not_held(page);
    --retired_;
    enter(page, PageState::free, 0);
    free_list_.push_back(page.value);
    return {};
  }

  /// How many pages all operations so far have looked at: what a cost test counts.
  std::int64_t visits() const { return visits_; }

 private:
  static std::size_t index(PageId page) { return static_cast<std::size_t>(page.value); }
  bool is(PageId page, PageState state) const {
    return 0 <= page.value && page.value < pages() && states_[index(page)] == state;
  }
  Error not_held(PageId page) const { return {Errc::page_not_held, "page", page.value, pages()}; }
  void enter(PageId page, PageState state, std::int32_t references) {
    states_[index(page)] = state;
    references_[index(page)] = references;
    ++visits_;
  }

  std::vector<std::int32_t> references_;
  std::vector<PageState> states_;
  std::vector<std::int32_t> free_list_;
  std::int64_t retired_ = 0;
  std::int64_t visits_ = 0;
};

}  // namespace kvfolia::inline KVF_ABI
