// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// A committed step: what kernels read, and the pages it keeps from being reused.

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvfolia/cache/cache_state.hpp"
#include "kvfolia/core/batch_view.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/ids.hpp"

namespace kvfolia::inline KVF_ABI {

/// Owns the arrays of one step; they never change. Rows are the sequences that the step extended, in
/// the order of their first extend. Pages that the step gave up stay readable until this batch and
/// all earlier ones have been destroyed. Batches run in the order of their commits. Move-only;
/// destroyed by the thread that writes to the cache.
class Batch {
 public:
  Batch() : query_indptr_{0}, entry_indptr_{0} {}  // of no rows

  std::int32_t rows() const { return static_cast<std::int32_t>(sequences_.size()); }
  /// New tokens over all rows: what the packed arrays of append and attend hold.
  std::int32_t tokens() const { return query_indptr_.empty() ? 0 : query_indptr_.back(); }
  SeqId sequence(std::int32_t row) const { return sequences_[static_cast<std::size_t>(row)]; }
  /// To be carried out before the batch's tokens are appended: store.copy(batch.copies(), ...).
  std::span<const PageCopy> copies() const { return copies_; }
  /// Whether append() has anything to do: also where there are no new tokens, pages may change their
  /// format.
  bool has_appends() const { return tokens() > 0 || !recodes_.empty(); }

  BatchView view() const {
    BatchView view;
    view.rows = rows();
    view.query_indptr = query_indptr_.data();
    view.table = {entries_.data(), entry_indptr_.data()};
    view.lengths = lengths_.data();
    view.query_pos = query_pos_.data();
    view.entry_pos = entry_pos_.data();
    view.slots = slots_.data();
    view.recodes = recodes_.data();
    view.recode_count = static_cast<std::int32_t>(recodes_.size());
    return view;
  }
  operator BatchView() const { return view(); }

 private:
  friend class Step;

  /// Ends the batch when it is destroyed or replaced.
  struct Registration {
    std::shared_ptr<detail::CacheState> state;
    std::int64_t number = 0;

    Registration() = default;
    Registration(std::shared_ptr<detail::CacheState> s, std::int64_t n) : state(std::move(s)), number(n) {}
    Registration(Registration&& other) noexcept = default;
    Registration& operator=(Registration&& other) noexcept {
      Registration replaced(std::move(other));
      std::swap(state, replaced.state);
      std::swap(number, replaced.number);
      return *this;
    }
    ~Registration() {
      if (state) state->end_batch(number);
    }
  };

  void add_move(const detail::PageMove& move) {
    if (move.from.format() == move.to.format())
      copies_.push_back({move.from.format(), move.from.page(), move.to.page()});
    else
      recodes_.push_back({move.from, move.to, move.kept, 0, 0});
  }

  /// Pages that the row fills and that are coded as a whole take what they keep from `moves`.
  void add_row(SeqId id, const Sequence& sequence, std::int32_t start, const TableRules& rules,
               const std::vector<detail::PageMove>& moves) {
    const std::int32_t size = rules.page_tokens;
    const std::int32_t first_query = tokens();
    sequences_.push_back(id);
    query_indptr_.push_back(tokens() + sequence.length - start);
    entry_indptr_.push_back(entry_indptr_.back() + static_cast<std::int32_t>(sequence.pages.size()));
    lengths_.push_back(sequence.retained());
    query_pos_.push_back(start);
    for (const TablePage& page : sequence.pages) {
      entries_.push_back(page.entry.raw);
      entry_pos_.push_back(page.begin.value);
    }
    // New tokens are the newest ones, so their pages are the last ones.
    auto page = sequence.pages.end() - ((sequence.length + size - 1) / size - start / size);
    for (std::int32_t pos = start; pos < sequence.length; ++pos) {
      if (pos - page->begin.value == size) ++page;
      slots_.push_back(PhysSlot::make(page->entry, pos - page->begin.value, size).raw);
      const bool first_of_page = pos == start || pos == page->begin.value;
      if (!rules.seals || !first_of_page || page->entry.format() != rules.coded_format) continue;
      PageRecode seal{{}, page->entry, pos - page->begin.value, first_query + pos - start, 0};
      seal.new_tokens = size - seal.kept;
      for (const detail::PageMove& move : moves)
        if (seal.kept > 0 && move.to == seal.to) seal.from = move.from;
      recodes_.push_back(seal);
    }
  }

  Registration registration_;
  std::vector<SeqId> sequences_;
  std::vector<PageCopy> copies_;
  std::vector<PageRecode> recodes_;
  std::vector<std::int32_t> query_indptr_;
  std::vector<std::int32_t> entry_indptr_;
  std::vector<std::int32_t> entries_;
  std::vector<std::int32_t> entry_pos_;
  std::vector<std::int32_t> lengths_;
  std::vector<std::int32_t> query_pos_;
  std::vector<std::int64_t> slots_;
};

}  // namespace kvfolia::inline KVF_ABI
