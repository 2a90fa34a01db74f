// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// The bookkeeping behind a cache: sequences, pools, and pages that wait for a batch to end.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kvfolia/cache/sequence.hpp"
#include "kvfolia/core/config.hpp"
#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/page/host_store.hpp"
#include "kvfolia/page/page_pool.hpp"
#include "kvfolia/page/verify.hpp"

namespace kvfolia::inline KVF_ABI {

/// A sequence that this step extends.
struct StepRow {
  SeqId seq;
  std::int32_t start;  ///< its length before
};

namespace detail {

// What a step has done to a sequence, so that it can be taken back.
struct Created {};
struct Resized {
  std::int32_t old_length;
};
struct PushedPage {};
struct ReplacedPage {
  std::size_t page;
  TablePage old;
};
struct RemovedPages {
  std::size_t first;
  std::vector<TablePage> pages;
  std::int32_t gap_begin;
  std::int32_t gap_end;
};
struct Released {
  Sequence sequence;
};
struct Undo {
  std::size_t index;
  std::variant<Created, Resized, PushedPage, ReplacedPage, RemovedPages, Released> what;
};

/// Makes sure that the next `count` push_backs cannot throw.
template <class T>
void make_room(std::vector<T>& to, std::size_t count) {
  if (to.capacity() - to.size() < count) to.reserve(std::max(2 * to.capacity(), to.size() + count));
}

/// The first `kept` slots of a page, as they are before the step, become those of a fresh page.
struct PageMove {
  TableEntry from;
  TableEntry to;
  std::int32_t kept;
};

/// The open step's plan.
struct StepWork {
  std::vector<Undo> undo;
  std::vector<StepRow> rows;
  std::vector<PageMove> moves;
  std::vector<TableEntry> given_up;  ///< pages that lost their last reference
};

class CacheState {
 public:
  struct Slot {
    Sequence sequence;
    std::int32_t generation = 0;
    std::int32_t row = -1;  ///< in the open step
    bool alive = false;
  };

  CacheState(TableRules rules, const std::vector<std::int64_t>& pages) : rules_(rules) {
    for (const std::int64_t count : pages) pools_.emplace_back(count);
  }

  const TableRules& rules() const { return rules_; }
  const std::vector<PagePool>& pools() const { return pools_; }

  // Sequences.

  Slot* find(SeqId id) {
    const auto index = static_cast<std::size_t>(id.value & 0xffffffff);
    if (id.value < 0 || index >= slots_.size()) return nullptr;
    Slot& slot = slots_[index];
    return slot.alive && slot.generation == static_cast<std::int32_t>(id.value >> 32) ? &slot : nullptr;
  }
  std::size_t index_of(const Slot& slot) const { return static_cast<std::size_t>(&slot - slots_.data()); }
  Slot& slot(std::size_t index) { return slots_[index]; }
  SeqId id_of(std::size_t index) const {
    return SeqId{(std::int64_t{slots_[index].generation} << 32) | static_cast<std::int64_t>(index)};
  }

  std::size_t new_slot() {
    if (unused_slots_.empty()) {
      slots_.emplace_back();
      unused_slots_.reserve(slots_.capacity());  // giving a slot back never allocates
      unused_slots_.push_back(slots_.size() - 1);
    }
    const std::size_t index = unused_slots_.back();
    unused_slots_.pop_back();
    slots_[index].alive = true;
    return index;
  }
  /// The slot's id is spent: it will never name another sequence.
  void retire_slot(std::size_t index) {
    Slot& s = slots_[index];
    s.sequence = {};
    s.alive = false;
    s.row = -1;
    if (s.generation == std::numeric_limits<std::int32_t>::max()) return;  // no id is left for the slot
    ++s.generation;
    unused_slots_.push_back(index);
  }

  // Pages. Entries are the cache's own, so none of these can fail.

  PagePool& pool(TableEntry entry) { return pools_[static_cast<std::size_t>(entry.format())]; }
  std::int64_t free_pages(int format) const { return pools_[static_cast<std::size_t>(format)].free_pages(); }
  std::int32_t references(TableEntry entry) { return pool(entry).references(entry.page()); }

  TableEntry allocate(int format) {
    const auto page = pools_[static_cast<std::size_t>(format)].allocate();
    KVF_ASSERT(page);
    return TableEntry::make(format, *page);
  }
  void add_ref(TableEntry entry) { expect(pool(entry).add_ref(entry.page())); }
  /// Drops a reference; true when it was the last one.
  bool drop(TableEntry entry) {
    const auto last = pool(entry).drop_ref(entry.page());
    KVF_ASSERT(last);
    return *last;
  }
  void give_up(TableEntry entry) {
    if (drop(entry)) work.given_up.push_back(entry);
  }
  void take_back(TableEntry entry) {
    PagePool& p = pool(entry);
    expect(p.state(entry.page()) == PageState::retired ? p.revive(entry.page()) : p.add_ref(entry.page()));
  }
  /// Undoes allocate().
  void put_back(TableEntry entry) {
    drop(entry);
    expect(pool(entry).reclaim(entry.page()));
  }

  // Steps and batches.

  bool step_open = false;
  StepWork work;

  void undo_step() {
    for (; !work.undo.empty(); work.undo.pop_back()) {
      Undo& undo = work.undo.back();
      std::visit([&](auto& what) { revert(undo.index, what); }, undo.what);
    }
    close_step();
  }

  /// Pages that the step gave up become free when the batch that it gets the number of has ended,
  /// and all earlier ones.
  std::int64_t commit_step() {
    // All that may throw comes first.
    make_room(live_batches_, 1);
    waiting_.push_back({next_batch_, {}});
    const std::int64_t batch = next_batch_++;
    waiting_.back().pages = std::move(work.given_up);
    live_batches_.push_back(batch);
    for (Undo& undo : work.undo)
      if (std::holds_alternative<Released>(undo.what)) retire_slot(undo.index);
    close_step();
    return batch;
  }

  void end_batch(std::int64_t batch) {
    live_batches_.erase(std::find(live_batches_.begin(), live_batches_.end(), batch));
    while (!waiting_.empty() && (live_batches_.empty() || waiting_.front().batch < live_batches_.front())) {
      for (const TableEntry entry : waiting_.front().pages) expect(pool(entry).reclaim(entry.page()));
      waiting_.pop_front();
    }
  }

  /// See verify_pool. Holders are the sequences, the open step and the batches.
  std::vector<std::string> verify() const {
    std::vector<std::string> violations;
    for (std::size_t format = 0; format < pools_.size(); ++format) {
      const auto of_format = [&](const auto& entries, auto&& entry_of) {
        std::vector<PageId> pages;
        for (const auto& e : entries)
          if (entry_of(e).format() == static_cast<int>(format)) pages.push_back(entry_of(e).page());
        return pages;
      };
      const auto itself = [](TableEntry e) { return e; };
      std::vector<PageHolder> holders;
      for (std::size_t i = 0; i < slots_.size(); ++i)
        holders.push_back({"sequence " + std::to_string(id_of(i).value),
                           of_format(slots_[i].sequence.pages, [](const TablePage& p) { return p.entry; })});
      holders.push_back({"the open step", of_format(work.given_up, itself), true});
      for (const Waiting& w : waiting_)
        holders.push_back({"batch " + std::to_string(w.batch), of_format(w.pages, itself), true});
      for (std::string& v : verify_pool(pools_[format], holders))
        violations.push_back("format " + std::to_string(format) + ": " + std::move(v));
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) verify_table(i, violations);
    return violations;
  }

 private:
  struct Waiting {
    std::int64_t batch;
    std::vector<TableEntry> pages;
  };

  static void expect(const Result<>& ok) {
    KVF_ASSERT(ok);
    static_cast<void>(ok);
  }

  void close_step() {
    for (const StepRow& row : work.rows)
      if (Slot* s = find(row.seq)) s->row = -1;
    work.undo.clear();  // and keep the memory: the next step is much like this one
    work.rows.clear();
    work.moves.clear();
    work.given_up.clear();
    step_open = false;
  }

  void revert(std::size_t index, Created) {
    for (const TablePage& page : slots_[index].sequence.pages) {
      const bool last = drop(page.entry);
      KVF_ASSERT(!last);  // a fork's pages are its parent's, too
      static_cast<void>(last);
    }
    retire_slot(index);
  }
  void revert(std::size_t index, const Resized& what) { slots_[index].sequence.length = what.old_length; }
  void revert(std::size_t index, PushedPage) {
    put_back(slots_[index].sequence.pages.back().entry);
    slots_[index].sequence.pages.pop_back();
  }
  void revert(std::size_t index, const ReplacedPage& what) {
    TablePage& page = slots_[index].sequence.pages[what.page];
    put_back(page.entry);
    take_back(what.old.entry);
    page = what.old;
  }
  void revert(std::size_t index, const RemovedPages& what) {
    Sequence& s = slots_[index].sequence;
    for (const TablePage& page : what.pages) take_back(page.entry);
    s.pages.insert(s.pages.begin() + static_cast<std::ptrdiff_t>(what.first), what.pages.begin(),
                   what.pages.end());
    s.gap_begin = what.gap_begin;
    s.gap_end = what.gap_end;
  }
  void revert(std::size_t index, Released& what) {
    slots_[index].sequence = std::move(what.sequence);
    slots_[index].alive = true;
    for (const TablePage& page : slots_[index].sequence.pages) take_back(page.entry);
  }

  /// Positions run on without holes but the one gap, formats are those of their positions, no page
  /// stands twice in a table, and lengths match.
  void verify_table(std::size_t index, std::vector<std::string>& violations) const {
    const Sequence& s = slots_[index].sequence;
    const auto report = [&](bool wrong, const std::string& what) {
      if (wrong) violations.push_back("sequence " + std::to_string(id_of(index).value) + ": " + what);
    };
    const std::int32_t size = rules_.page_tokens;
    bool gap_met = s.gap_begin == s.gap_end;
    std::int32_t next = 0;
    const auto cross_gap = [&] {
      if (gap_met || next != s.gap_begin) return;
      gap_met = true;
      next = s.gap_end;
    };
    std::vector<std::int32_t> entries;
    for (const TablePage& page : s.pages) {
      cross_gap();
      const std::string name = "page " + std::to_string(page.entry.raw);
      report(page.entry.absent(), name + " is absent");
      report(page.begin.value != next,
             name + " begins at " + std::to_string(page.begin.value) + ", not at " + std::to_string(next));
      const bool full = page.begin.value + size <= s.length;
      report(!page.entry.absent() && !rules_.allows(page.entry.format(), page.begin.value, full),
             name + " has another format than its position");
      entries.push_back(page.entry.raw);
      next = page.begin.value + size;
    }
    cross_gap();
    std::sort(entries.begin(), entries.end());
    report(std::adjacent_find(entries.begin(), entries.end()) != entries.end(),
           "a page stands twice in its table");
    report(!gap_met || s.gap_begin > s.gap_end || s.gap_begin % size != 0 || s.gap_end % size != 0 ||
               (s.gap_begin != s.gap_end && rules_.window.left < 0),
           "the gap [" + std::to_string(s.gap_begin) + ", " + std::to_string(s.gap_end) +
               ") is none of its table's");
    report(s.length > next || s.length <= next - size,
           std::to_string(s.length) + " tokens do not fit pages that end at " + std::to_string(next));
  }

  TableRules rules_;
  std::vector<PagePool> pools_;
  std::vector<Slot> slots_;
  std::vector<std::size_t> unused_slots_;
  std::vector<std::int64_t> live_batches_;  ///< in order of commit
  std::deque<Waiting> waiting_;
  std::int64_t next_batch_ = 0;
};

}  // namespace detail
}  // namespace kvfolia::inline KVF_ABI
