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

    const std::int32_t end = s.length + tokens;
    const std::int32_t first_new = (s.length + size - 1) / size;
    const std::int32_t end_new = (end + size - 1) / size;
    // A tail that gets full may have to be coded as a whole; one that is shared is copied.
    const bool grows_tail = tokens > 0 && s.has_tail(rules);
    const int tail_format =
        grows_tail ? rules.format_at(s.pages.back().begin.value, end >= first_new * size) : 0;
    const bool seals_tail = grows_tail && s.pages.back().entry.format() != tail_format;
    const bool copies_tail = grows_tail && !seals_tail && state_->references(s.pages.back().entry) > 1;
    const bool replaces_tail = seals_tail || copies_tail;
    std::int64_t needed[TableEntry::max_formats] = {};
    if (replaces_tail) ++needed[tail_format];
    for (std::int32_t page = first_new; page < end_new; ++page)
      ++needed[rules.format_at(page * size, (page + 1) * size <= end)];
    for (int format = 0; format < static_cast<int>(state_->pools().size()); ++format)
      if (needed[format] > state_->free_pages(format)) return out_of_pages(format, needed[format]);

    // Only the row's first query decides who leaves: it sees furthest back.
    const Sequence::Dead dead = slot->row < 0 ? s.dead_pages(s.length, rules) : Sequence::Dead{0, 0};
    make_room(dead.count + 1, static_cast<std::size_t>(end_new - first_new));
    detail::make_room(s.pages, static_cast<std::size_t>(end_new - first_new));
    const std::size_t index = state_->index_of(*slot);
    if (dead.count > 0) {
      const std::int32_t gap_begin = s.pages[dead.first].begin.value;
      const std::int32_t gap_end = s.pages[dead.first + dead.count - 1].begin.value + size;
      remove_pages(index, dead.first, dead.count);
      s.gap_begin = s.gap_begin == s.gap_end ? gap_begin : s.gap_begin;
      s.gap_end = gap_end;
    }
    if (slot->row < 0) {
      slot->row = static_cast<std::int32_t>(work().rows.size());
      work().rows.push_back({id, s.length});
    }
    if (replaces_tail) {
      const std::int32_t begin = s.pages.back().begin.value;
      // Tokens of this step are nowhere yet.
      const std::int32_t kept = std::min(s.length, row(*slot).start) - begin;
      replace_page(index, s.pages.size() - 1, tail_format, kept);
    }
    for (std::int32_t page = first_new; page < end_new; ++page) {
      const int format = rules.format_at(page * size, (page + 1) * size <= end);
      s.pages.push_back({state_->allocate(format), LogicalPos{page * size}});
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
  /// left already. A cut through a page that was coded as a whole takes an exact page: out_of_pages
  /// where there is none.
  Result<> truncate(SeqId id, std::int32_t length) {
    if (!state_) return closed();
    detail::CacheState::Slot* slot = state_->find(id);
    if (!slot) return unknown(id);
    Sequence& s = slot->sequence;
    const TableRules& rules = state_->rules();
    if (length < 0 || length > s.length) return detail::bad_argument("length", length, s.length);
    if (!s.can_truncate(length, rules))
      return Error{Errc::position_evicted, "length", length, s.gap_end + rules.window.left};
    std::size_t keep = s.pages.size();
    while (keep > 0 && s.pages[keep - 1].begin.value >= length) --keep;
    // A page that was coded as a whole is opened again for the tokens to come.
    const bool cuts = keep > 0 && length % rules.page_tokens != 0;
    const int format = cuts ? rules.format_at(s.pages[keep - 1].begin.value, false) : 0;
    const bool opens = cuts && s.pages[keep - 1].entry.format() != format;
    if (opens && state_->free_pages(format) == 0) return out_of_pages(format, 1);
    make_room(s.pages.size() + 1, 1);
    const std::size_t index = state_->index_of(*slot);
    remove_pages(index, keep, s.pages.size() - keep);
    if (opens) {
      const std::int32_t written = slot->row >= 0 ? std::min(row(*slot).start, length) : length;
      replace_page(index, keep - 1, format, written - s.pages[keep - 1].begin.value);
    }
    if (length <= s.gap_begin) s.gap_begin = s.gap_end = 0;
    log(index, detail::Resized{s.length});
    s.length = length;
    if (slot->row >= 0) row(*slot).start = std::min(row(*slot).start, length);
    return {};
  }

  /// Moves one full page, the `page`-th of the sequence's table, to the low format of a Mixed quantizer.
  /// Other sequences that share it keep theirs. Refused for a page that is not in the high format, that is an
  /// exact sink, or that is not full of tokens of earlier steps (pending_tokens).
  Result<> demote(SeqId id, std::int32_t page) {
    if (!state_) return closed();
    detail::CacheState::Slot* slot = state_->find(id);
    if (!slot) return unknown(id);
    const Sequence& s = slot->sequence;
    const TableRules& rules = state_->rules();
    if (rules.low_format < 0) return Error{Errc::unsupported, "Quant (Mixed has a low format)"};
    if (page < 0 || page >= static_cast<std::int32_t>(s.pages.size()))
      return detail::bad_argument("page", page, static_cast<std::int64_t>(s.pages.size()) - 1);
    const TablePage& old = s.pages[static_cast<std::size_t>(page)];
    const std::int32_t end = old.begin.value + rules.page_tokens;
    const std::int32_t written = slot->row >= 0 ? row(*slot).start : s.length;
    if (end > s.length) return detail::bad_argument("page (not full)", end, s.length);
    if (end > written) return Error{Errc::pending_tokens, "page", end, written};
    if (rules.is_sink(old.begin.value)) return detail::bad_argument("page (an exact sink)", page);
    if (old.entry.format() != rules.coded_format)
      return detail::bad_argument("page (its format is not the high one)", old.entry.format(),
                                  rules.coded_format);
    if (state_->free_pages(rules.low_format) == 0) return out_of_pages(rules.low_format, 1);
    make_room(1, 1);
    replace_page(state_->index_of(*slot), static_cast<std::size_t>(page), rules.low_format,
                 rules.page_tokens);
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
    const TableRules& rules = state_->rules();
    Batch batch;
    for (const detail::PageMove& move : work().moves) {
      // A page that was given up again needs no bytes; sealed pages belong to the rows that fill them.
      const bool seals = rules.seals && move.to.format() == rules.coded_format;
      if (!seals && state_->references(move.to) > 0) batch.add_move(move);
    }
    for (const StepRow& row : work().rows)
      if (row.start != released_row)
        batch.add_row(row.seq, state_->find(row.seq)->sequence, row.start, rules, work().moves);
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
    detail::make_room(work().moves, 1);
  }

  template <class What>
  void log(std::size_t index, What&& what) {
    work().undo.push_back({index, std::forward<What>(what)});
  }

  Error out_of_pages(int format, std::int64_t needed) const {
    const TableRules& rules = state_->rules();
    const char* subject = format == rules.coded_format ? "coded pages"
                          : format == rules.low_format ? "low pages"
                                                       : "exact pages";
    return {Errc::out_of_pages, subject, needed, state_->free_pages(format)};
  }

  /// Puts a fresh page in a page's place; its first `kept` slots will be those of the old one.
  void replace_page(std::size_t index, std::size_t page, int format, std::int32_t kept) {
    TablePage& at = state_->slot(index).sequence.pages[page];
    const TablePage old = at;
    const TableEntry fresh = state_->allocate(format);
    if (kept > 0) work().moves.push_back({original(old.entry), fresh, kept});
    log(index, detail::ReplacedPage{page, old});
    state_->give_up(old.entry);
    at.entry = fresh;
  }

  /// The page whose bytes `entry` has once the step's moves are carried out: moves of one step do not
  /// depend on each other.
  TableEntry original(TableEntry entry) {
    for (const detail::PageMove& move : work().moves)
      if (move.to == entry) return move.from;
    return entry;
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
