// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// A transaction on the cache's block tables.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kvfolia/cache/batch.hpp"
#include "kvfolia/cache/cache_state.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"

namespace kvfolia::inline KVF_ABI {

/// Plans one engine step: reserves pages, touches no page's bytes. An operation that fails changes
/// nothing, and the step goes on. Without commit() the destructor takes everything back.
///
/// Nothing here throws but std::bad_alloc. One step is open at a time. A second one, a committed or a
/// moved-from one answers every operation with Errc::step_not_open. Pages that a step gives up can be had
/// again when its batch has ended.
class Step {
 public:
  Step(Step&&) noexcept = default;
  Step& operator=(Step&&) = delete;
  ~Step() {
    if (state_) state_->undo_step();
  }

  /// A new sequence of length 0.
  Result<SeqId> create() {
    if (!state_) return closed();
    make_room(0, 0);
    const std::size_t index = state_->new_slot();
    log(index, detail::Created{});
    return state_->id_of(index);
  }

  /// Makes room for `tokens` more. The sequence becomes a row of the batch, also for 0 tokens. A
  /// last page that is shared is replaced by a copy (see Batch::copies), and pages that no query from
  /// here on can see leave. out_of_pages names the format that is short.
  Result<> extend(SeqId id, std::int32_t tokens) {
    if (!state_) return closed();
    detail::CacheState::Slot* slot = state_->find(id);
    if (!slot) return unknown(id);
    Sequence& s = slot->sequence;
    const TableRules& rules = state_->rules();
    const std::int32_t size = rules.page_tokens;
    const std::int32_t room = std::numeric_limits<std::int32_t>::max() - size - s.length;
    if (tokens < 0 || tokens > room) return detail::bad_argument("tokens", tokens, room);

    const bool copies_tail = tokens > 0 && s.has_tail(rules) && state_->references(s.pages.back().entry) > 1;
    const std::int32_t first_new = (s.length + size - 1) / size;
    const std::int32_t end_new = (s.length + tokens + size - 1) / size;
    std::int64_t needed[TableEntry::max_formats] = {};
    const std::int32_t sinks_end = std::clamp(rules.exact_sink_pages, first_new, end_new);
    needed[rules.exact_format] += sinks_end - first_new;
    needed[rules.coded_format] += end_new - sinks_end;
    if (copies_tail) ++needed[s.pages.back().entry.format()];
    for (int format = 0; format < static_cast<int>(state_->pools().size()); ++format)
      if (needed[format] > state_->free_pages(format))
        return Error{Errc::out_of_pages, format == rules.coded_format ? "coded pages" : "exact pages",
                     needed[format], state_->free_pages(format)};

    // Only the row's first query decides who leaves: it sees furthest back.
    const Sequence::Dead dead = slot->row < 0 ? s.dead_pages(s.length, rules) : Sequence::Dead{0, 0};
    make_room(dead.count + 1, static_cast<std::size_t>(end_new - first_new));
    detail::make_room(s.pages, static_cast<std::size_t>(end_new - first_new));
    const std::size_t index = state_->index_of(*slot);
    if (dead.count > 0) {
      const std::int32_t begin = s.pages[dead.first].begin.value;
      const std::int32_t end = s.pages[dead.first + dead.count - 1].begin.value + size;
      remove_pages(index, dead.first, dead.count);
      s.gap_begin = s.gap_begin == s.gap_end ? begin : s.gap_begin;
      s.gap_end = end;
    }
    if (slot->row < 0) {
      slot->row = static_cast<std::int32_t>(work().rows.size());
      work().rows.push_back({id, s.length});
    }
    if (copies_tail) {
      const TablePage old = s.pages.back();
      const TableEntry fresh = state_->allocate(old.entry.format());
      work().copies.push_back({old.entry.format(), original(old.entry), fresh.page()});
      log(index, detail::ReplacedTail{old});
      state_->give_up(old.entry);
      s.pages.back().entry = fresh;
    }
    for (std::int32_t page = first_new; page < end_new; ++page) {
      s.pages.push_back({state_->allocate(rules.format_at(page * size)), LogicalPos{page * size}});
      log(index, detail::PushedPage{});
    }
    log(index, detail::Resized{s.length});
    s.length += tokens;
    return {};
  }

  /// A new sequence that shares all pages of its parent. A parent with tokens of this step is
  /// refused (pending_tokens): no kernel has written them yet. Takes no page; the first of the two
  /// that extends a shared last page copies it.
  Result<SeqId> fork(SeqId parent) {
    if (!state_) return closed();
    const detail::CacheState::Slot* from = state_->find(parent);
    if (!from) return unknown(parent);
    if (from->row >= 0 && from->sequence.length > row(*from).start)
      return Error{Errc::pending_tokens, "parent", from->sequence.length, row(*from).start};
    make_room(0, 0);
    Sequence copy = from->sequence;
    const std::size_t index = state_->new_slot();
    for (const TablePage& page : copy.pages) state_->add_ref(page.entry);
    state_->slot(index).sequence = std::move(copy);
    log(index, detail::Created{});
    return state_->id_of(index);
  }

  /// Forgets the positions from `length` on. position_evicted when what a query there would see has
  /// left already.
  Result<> truncate(SeqId id, std::int32_t length) {
    if (!state_) return closed();
    detail::CacheState::Slot* slot = state_->find(id);
    if (!slot) return unknown(id);
    Sequence& s = slot->sequence;
    const TableRules& rules = state_->rules();
    if (length < 0 || length > s.length) return detail::bad_argument("length", length, s.length);
    if (!s.can_truncate(length, rules))
      return Error{Errc::position_evicted, "length", length, s.gap_end + rules.window.left};
    make_room(s.pages.size(), 0);
    const std::size_t index = state_->index_of(*slot);
    std::size_t keep = s.pages.size();
    while (keep > 0 && s.pages[keep - 1].begin.value >= length) --keep;
    remove_pages(index, keep, s.pages.size() - keep);
    if (length <= s.gap_begin) s.gap_begin = s.gap_end = 0;
    log(index, detail::Resized{s.length});
    s.length = length;
    if (slot->row >= 0) row(*slot).start = std::min(row(*slot).start, length);
    return {};
  }

  /// The sequence ends; its id stays invalid for ever.
  Result<> release(SeqId id) {
    if (!state_) return closed();
    detail::CacheState::Slot* slot = state_->find(id);
    if (!slot) return unknown(id);
    make_room(slot->sequence.pages.size(), 0);
    if (slot->row >= 0) row(*slot).start = released_row;
    for (const TablePage& page : slot->sequence.pages) state_->give_up(page.entry);
    slot->alive = false;
    log(state_->index_of(*slot), detail::Released{std::exchange(slot->sequence, {})});
    return {};
  }

  /// Makes the step's plan the cache's state. Cannot fail; a step that is not open gives an empty
  /// batch.
  Batch commit() {
    if (!state_) return {};
    // A page that was given up again needs no copy.
    std::erase_if(work().copies, [&](const PageCopy& copy) {
      return state_->references(TableEntry::make(copy.format, copy.to)) == 0;
    });
    Batch batch(work().copies);
    for (const StepRow& row : work().rows)
      if (row.start != released_row)
        batch.add_row(row.seq, state_->find(row.seq)->sequence, row.start, state_->rules());
    const std::int64_t number = state_->commit_step();
    batch.registration_ = {std::move(state_), number};
    return batch;
  }

 private:
  template <LayoutPolicy, QuantPolicy, EvictPolicy, SelectPolicy, PageStore>
  friend class PagedCache;

  static constexpr std::int32_t released_row = -1;

  explicit Step(const std::shared_ptr<detail::CacheState>& state) {
    if (std::exchange(state->step_open, true)) return;
    state_ = state;
  }

  static Error closed() { return {Errc::step_not_open}; }
  static Error unknown(SeqId id) { return {Errc::unknown_sequence, "sequence", id.value, 0}; }
  detail::StepWork& work() { return state_->work; }
  StepRow& row(const detail::CacheState::Slot& slot) {
    return work().rows[static_cast<std::size_t>(slot.row)];
  }

  /// All allocations of an operation that gives up and takes so many pages: what throws, throws
  /// before anything has changed.
  void make_room(std::size_t given_up, std::size_t taken) {
    detail::make_room(work().undo, taken + 4);
    detail::make_room(work().given_up, given_up);
    detail::make_room(work().rows, 1);
    detail::make_room(work().copies, 1);
  }

  template <class What>
  void log(std::size_t index, What&& what) {
    work().undo.push_back({index, std::forward<What>(what)});
  }

  /// The page whose bytes `entry` has once the step's copies are carried out: copies of one step do
  /// not depend on each other.
  PageId original(TableEntry entry) {
    for (const PageCopy& copy : work().copies)
      if (copy.format == entry.format() && copy.to == entry.page()) return copy.from;
    return entry.page();
  }

  /// Logs the gap as it is now; the caller moves it.
  void remove_pages(std::size_t index, std::size_t first, std::size_t count) {
    Sequence& s = state_->slot(index).sequence;
    const auto begin = s.pages.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = begin + static_cast<std::ptrdiff_t>(count);
    detail::RemovedPages removed{first, {begin, end}, s.gap_begin, s.gap_end};
    for (const TablePage& page : removed.pages) state_->give_up(page.entry);
    s.pages.erase(begin, end);
    log(index, std::move(removed));
  }

  std::shared_ptr<detail::CacheState> state_;
};

}  // namespace kvfolia::inline KVF_ABI
