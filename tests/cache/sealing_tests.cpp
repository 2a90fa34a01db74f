// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Which page has which format: tails, sealed, opened, demoted and exact sink pages.

#include <algorithm>
#include <string>
#include <vector>

#include "support/small_caches.hpp"

using namespace kvfolia_tests;

namespace {

using Blocks = Int4Channels<4>;
using Sealing = PagedCache<SmallLayout, Blocks>;
using SealingWindow = PagedCache<SmallLayout, Blocks, SinkWindow>;
using Two = Mixed<Int8, Int4<0>>;                             // high pages are coded token by token
using TwoBlocks = Mixed<Centered<Int8, 4>, Int4Channels<2>>;  // both as a whole
using TwoSealing = PagedCache<SmallLayout, TwoBlocks>;

constexpr int coded = 0, exact = 1, low = 2;
static_assert(exact_format<Blocks> == exact && exact_format<Two> == exact && low_format<TwoBlocks> == low);

CacheConfig sealing(std::int64_t pages, std::int64_t exact_pages, std::int32_t sinks = 0) {
  return {.shape = {1, 1, dynamic}, .pages = pages, .exact_pages = exact_pages, .exact_sink_pages = sinks};
}
CacheConfig mixed(std::int64_t pages, std::int64_t exact_pages, std::int64_t low_pages,
                  std::int32_t sinks = 0) {
  return {.shape = {1, 1, dynamic},
          .pages = pages,
          .exact_pages = exact_pages,
          .low_pages = low_pages,
          .exact_sink_pages = sinks};
}

using Formats = std::vector<int>;

template <class C>
Formats formats_of(const C& cache, SeqId id) {
  Formats formats;
  for (const TablePage& page : pages_of(cache, id)) formats.push_back(page.entry.format());
  return formats;
}

template <class C>
TableEntry entry_of(const C& cache, SeqId id, std::size_t page) {
  return pages_of(cache, id).at(page).entry;
}

/// Pages held of each format.
template <class C>
Formats held(const C& cache) {
  Formats counts;
  for (int f = 0; f < format_count<typename C::Quant>; ++f)
    counts.push_back(static_cast<int>(cache.stats(f).held));
  return counts;
}

std::vector<PageRecode> recodes_of(const Batch& batch) {
  const BatchView view = batch;
  return {view.recodes, view.recodes + view.recode_count};
}

/// One operation, a step of its own, the batch over.
template <class C, class F>
Batch step_of(C& cache, F&& operations) {
  Step step = cache.begin_step();
  operations(step);
  Batch batch = step.commit();
  CHECK(cache.verify().empty());
  return batch;
}

template <class C>
void truncate(C& cache, SeqId id, int length) {
  step_of(cache, [&](Step& step) { REQUIRE(step.truncate(id, length)); });
}

template <class C>
SeqId fork_of(C& cache, SeqId parent) {
  SeqId child{};
  step_of(cache, [&](Step& step) { child = *step.fork(parent); });
  return child;
}

void check_short(const Result<>& result, const char* subject, std::int64_t needed, std::int64_t available) {
  REQUIRE(!result);
  CHECK(result.error().code == Errc::out_of_pages);
  CHECK(std::string(result.error().subject) == subject);
  CHECK(result.error().needed == needed);
  CHECK(result.error().available == available);
}

std::string refusal(const Result<>& result) {
  REQUIRE(!result);
  return result.error().message();
}

}  // namespace

TEST_CASE("full pages are coded, the unfinished last one is exact") {
  Sealing cache(sealing(8, 2));
  const std::vector<std::pair<int, Formats>> cases = {{0, {}},
                                                      {1, {exact}},
                                                      {3, {exact}},
                                                      {4, {coded}},
                                                      {5, {coded, exact}},
                                                      {8, {coded, coded}},
                                                      {13, {coded, coded, coded, exact}}};
  for (const auto& [tokens, formats] : cases) {
    CAPTURE(tokens);
    const SeqId id = sequence_of(cache, tokens);
    CHECK(formats_of(cache, id) == formats);
    CHECK(cache.verify().empty());
    step_of(cache, [&](Step& step) { REQUIRE(step.release(id)); });
    CHECK(cache.stats(coded).free == 8);
    CHECK(cache.stats(exact).free == 2);
  }
}

TEST_CASE("one by one or at once, a table has the same formats") {
  Sealing cache(sealing(8, 4));
  const SeqId slow = sequence_of(cache, 0);
  for (int length = 1; length <= 14; ++length) {
    extend(cache, slow, 1);
    const SeqId fast = sequence_of(cache, length);
    CHECK(formats_of(cache, slow) == formats_of(cache, fast));
    step_of(cache, [&](Step& step) { REQUIRE(step.release(fast)); });
    CHECK(held(cache) == Formats{length / 4, length % 4 != 0});
  }
}

TEST_CASE("the append that fills a page encodes it from the exact page and the new tokens") {
  Sealing cache(sealing(8, 4));
  const SeqId id = sequence_of(cache, 3);
  const TableEntry tail = entry_of(cache, id, 0);
  const Batch batch = step_of(cache, [&](Step& step) { REQUIRE(step.extend(id, 7)); });
  REQUIRE(formats_of(cache, id) == Formats{coded, coded, exact});
  CHECK(batch.copies().empty());
  CHECK(batch.has_appends());
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{tail, entry_of(cache, id, 0), 3, 0, 1},
                                                     {{}, entry_of(cache, id, 1), 0, 1, 4}});
  const BatchView view = batch;
  for (int token = 0; token < 7; ++token)
    CHECK(view.slots[token] ==
          PhysSlot::make(entry_of(cache, id, static_cast<std::size_t>((3 + token) / 4)), (3 + token) % 4, 4)
              .raw);
  // The exact page is still read when the batch is appended.
  CHECK(cache.pool(exact).state(tail.page()) == PageState::retired);
}

TEST_CASE("a second row's recodes count the batch's tokens, not the row's") {
  Sealing cache(sealing(8, 4));
  const SeqId first = sequence_of(cache, 1), second = sequence_of(cache, 2);
  const TableEntry tails[] = {entry_of(cache, first, 0), entry_of(cache, second, 0)};
  const Batch batch = step_of(cache, [&](Step& step) {
    REQUIRE(step.extend(second, 3));
    REQUIRE(step.extend(first, 3));
  });
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{tails[1], entry_of(cache, second, 0), 2, 0, 2},
                                                     {tails[0], entry_of(cache, first, 0), 1, 3, 3}});
}

TEST_CASE("out of pages names the format that is short and changes nothing") {
  SECTION("coded") {
    Sealing cache(sealing(2, 2));
    const SeqId id = sequence_of(cache, 6);
    const auto before = pages_of(cache, id);
    Step step = cache.begin_step();
    check_short(step.extend(id, 7), "coded pages", 2, 1);
    CHECK(pages_of(cache, id) == before);
    CHECK(cache.sequence(id)->length == 6);
    CHECK(cache.verify().empty());
    CHECK(step.extend(id, 2));  // the step goes on
    CHECK(step.commit().tokens() == 2);
    CHECK(held(cache) == Formats{2, 0});
  }
  SECTION("exact, to extend") {
    Sealing cache(sealing(8, 1));
    const SeqId id = sequence_of(cache, 6), other = sequence_of(cache, 4);
    Step step = cache.begin_step();
    check_short(step.extend(other, 1), "exact pages", 1, 0);
    check_short(step.extend(id, 3), "exact pages", 1,
                0);  // its own is given up, but not before the batch ends
    CHECK(step.extend(id, 6));
    CHECK(formats_of(cache, id) == Formats{coded, coded, coded});
  }
  SECTION("exact, to open a coded page") {
    Sealing cache(sealing(8, 1));
    const SeqId id = sequence_of(cache, 8), other = sequence_of(cache, 1);
    const auto before = pages_of(cache, id);
    Step step = cache.begin_step();
    check_short(step.truncate(id, 6), "exact pages", 1, 0);
    CHECK(pages_of(cache, id) == before);
    CHECK(cache.sequence(id)->length == 8);
    CHECK(cache.verify().empty());
    CHECK(step.truncate(id, 4));  // a border opens nothing
    REQUIRE(step.release(other));
    check_short(step.truncate(id, 2), "exact pages", 1, 0);  // only when the batch has ended
  }
  SECTION("low") {
    TwoSealing cache(mixed(4, 1, 1));
    const SeqId id = sequence_of(cache, 8);
    Step step = cache.begin_step();
    REQUIRE(step.demote(id, 0));
    const auto before = pages_of(cache, id);
    check_short(step.demote(id, 1), "low pages", 1, 0);
    CHECK(pages_of(cache, id) == before);
    CHECK(cache.verify().empty());
  }
  SECTION("a copy of a shared exact tail") {
    Sealing cache(sealing(4, 1));
    const SeqId parent = sequence_of(cache, 2), child = fork_of(cache, parent);
    Step step = cache.begin_step();
    check_short(step.extend(child, 1), "exact pages", 1, 0);
    CHECK(step.extend(child, 2));  // whoever fills the page needs a coded one
    CHECK(formats_of(cache, child) == Formats{coded});
    CHECK(formats_of(cache, parent) == Formats{exact});
  }
}

TEST_CASE("a rolled back step that sealed, opened, demoted and forked leaves no trace") {
  TwoSealing cache(mixed(32, 16, 8));
  const SeqId a = sequence_of(cache, 10), b = sequence_of(cache, 8), c = sequence_of(cache, 9);
  const SeqId shared = fork_of(cache, a);
  step_of(cache, [&](Step& step) { REQUIRE(step.demote(c, 0)); });
  std::vector<std::vector<TablePage>> before;
  for (const SeqId id : {a, b, c, shared}) before.push_back(pages_of(cache, id));
  const Formats held_before = held(cache);
  {
    Step step = cache.begin_step();
    REQUIRE(step.extend(a, 3));    // seals a shared tail
    REQUIRE(step.truncate(a, 9));  // opens what it has just sealed
    REQUIRE(step.extend(a, 4));    // and seals again
    REQUIRE(step.truncate(b, 6));  // opens
    const SeqId child = *step.fork(b);
    REQUIRE(step.extend(child, 2));  // seals a page that was opened in this step
    REQUIRE(step.extend(b, 1));
    REQUIRE(step.demote(a, 0));  // shared
    REQUIRE(step.demote(a, 1));
    REQUIRE(step.truncate(a, 7));  // opens what it has just demoted
    REQUIRE(step.truncate(c, 2));  // opens what was demoted before
    const SeqId again = *step.fork(c);
    REQUIRE(step.extend(again, 2));
    REQUIRE(step.extend(shared, 2));  // seals
    REQUIRE(step.release(c));
    REQUIRE(step.release(shared));
    REQUIRE(step.extend(*step.create(), 5));
    CHECK(cache.verify().empty());
  }
  CHECK(cache.verify().empty());
  std::size_t i = 0;
  for (const SeqId id : {a, b, c, shared}) CHECK(pages_of(cache, id) == before[i++]);
  CHECK(cache.sequence(a)->length == 10);
  CHECK(cache.sequence(b)->length == 8);
  CHECK(cache.sequence(c)->length == 9);
  CHECK(held(cache) == held_before);
  for (int format = 0; format < 3; ++format) CHECK(cache.stats(format).retired == 0);
}

TEST_CASE("one owner of a shared tail seals it, the other keeps it") {
  for (const bool child_seals : {true, false}) {
    Sealing cache(sealing(8, 4));
    const SeqId parent = sequence_of(cache, 6), child = fork_of(cache, parent);
    const SeqId writer = child_seals ? child : parent, other = child_seals ? parent : child;
    const auto old = pages_of(cache, other);
    const Batch batch = step_of(cache, [&](Step& step) { REQUIRE(step.extend(writer, 2)); });
    CHECK(formats_of(cache, writer) == Formats{coded, coded});
    CHECK(pages_of(cache, other) == old);
    CHECK(entry_of(cache, writer, 0) == old[0].entry);
    CHECK(batch.copies().empty());
    CHECK(recodes_of(batch) == std::vector<PageRecode>{{old[1].entry, entry_of(cache, writer, 1), 2, 0, 2}});
    CHECK(cache.stats(exact).held == 1);
    CHECK(cache.stats(exact).retired == 0);
    CHECK(cache.stats(exact).shared == 0);
    // The other one is alone now and needs no copy.
    CHECK(step_of(cache, [&](Step& step) { REQUIRE(step.extend(other, 1)); }).copies().empty());
    CHECK(pages_of(cache, other) == old);
  }
}

TEST_CASE("both owners of a shared tail seal it in one step") {
  Sealing cache(sealing(8, 1));
  const SeqId parent = sequence_of(cache, 6), child = fork_of(cache, parent);
  const TableEntry tail = entry_of(cache, parent, 1);
  const Batch batch = step_of(cache, [&](Step& step) {
    REQUIRE(step.extend(parent, 2));
    REQUIRE(step.extend(child, 2));
  });
  const TableEntry mine = entry_of(cache, parent, 1), other = entry_of(cache, child, 1);
  CHECK(mine != other);
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{tail, mine, 2, 0, 2}, {tail, other, 2, 2, 2}});
  CHECK(cache.pool(exact).state(tail.page()) == PageState::retired);
  CHECK(held(cache) == Formats{3, 0});
}

TEST_CASE("one seals from a shared page while the other truncates and overwrites it in the same step") {
  for (const bool seals_first : {true, false}) {
    Sealing cache(sealing(8, 4));
    const SeqId parent = sequence_of(cache, 6);
    const TableEntry tail = entry_of(cache, parent, 1);
    SeqId child{};
    const Batch batch = step_of(cache, [&](Step& step) {
      child = *step.fork(parent);
      if (seals_first) REQUIRE(step.extend(parent, 2));
      REQUIRE(step.truncate(child, 5));
      REQUIRE(step.extend(child, 2));
      if (!seals_first) REQUIRE(step.extend(parent, 2));
    });
    CHECK(formats_of(cache, parent) == Formats{coded, coded});
    CHECK(formats_of(cache, child) == Formats{coded, exact});
    // Alone, the child writes in place; otherwise into a copy. Either way the sealing reads the old page.
    CHECK((entry_of(cache, child, 1) == tail) == seals_first);
    CHECK(batch.copies().size() == (seals_first ? 0 : 1));
    const PageRecode seal{tail, entry_of(cache, parent, 1), 2, seals_first ? 0 : 2, 2};
    CHECK(recodes_of(batch) == std::vector<PageRecode>{seal});
  }
}

TEST_CASE("truncating into a sealed page opens it, to a border opens nothing") {
  Sealing cache(sealing(8, 4));
  for (const int to : {11, 10, 9, 8, 7, 5, 4, 3, 1, 0}) {
    CAPTURE(to);
    const SeqId id = sequence_of(cache, 12);
    const auto before = pages_of(cache, id);
    const Batch batch = step_of(cache, [&](Step& step) { REQUIRE(step.truncate(id, to)); });
    Formats expected(static_cast<std::size_t>(to / 4), coded);
    if (to % 4 != 0) expected.push_back(exact);
    CHECK(formats_of(cache, id) == expected);
    CHECK(batch.rows() == 0);
    CHECK(batch.copies().empty());
    const auto page = static_cast<std::size_t>(to / 4);
    if (to % 4 != 0)
      CHECK(recodes_of(batch) ==
            std::vector<PageRecode>{{before[page].entry, entry_of(cache, id, page), to % 4, 0, 0}});
    else
      CHECK(recodes_of(batch).empty());
    CHECK(batch.has_appends() == (to % 4 != 0));
    step_of(cache, [&](Step& step) { REQUIRE(step.release(id)); });
  }
}

TEST_CASE("truncating into a page sealed in this very step goes back to its exact tokens") {
  Sealing cache(sealing(8, 8));
  const SeqId id = sequence_of(cache, 6);
  const TableEntry tail = entry_of(cache, id, 1);
  SECTION("above what was there") {
    const Batch batch = step_of(cache, [&](Step& step) {
      REQUIRE(step.extend(id, 2));
      REQUIRE(step.truncate(id, 7));
    });
    CHECK(formats_of(cache, id) == Formats{coded, exact});
    CHECK(recodes_of(batch).empty());
    CHECK(batch.copies().size() == 1);
    CHECK(batch.copies()[0] == PageCopy{exact, tail.page(), entry_of(cache, id, 1).page()});
    CHECK(batch.tokens() == 1);
    CHECK(batch.view().slots[0] == PhysSlot::make(entry_of(cache, id, 1), 2, 4).raw);
  }
  SECTION("below it, and sealed again") {
    const Batch batch = step_of(cache, [&](Step& step) {
      REQUIRE(step.extend(id, 2));
      REQUIRE(step.truncate(id, 5));
      REQUIRE(step.extend(id, 3));
    });
    CHECK(formats_of(cache, id) == Formats{coded, coded});
    CHECK(batch.copies().empty());
    CHECK(recodes_of(batch) == std::vector<PageRecode>{{tail, entry_of(cache, id, 1), 1, 0, 3}});
    CHECK(batch.view().query_pos[0] == 5);
  }
  SECTION("a page that is new altogether") {
    const Batch batch = step_of(cache, [&](Step& step) {
      REQUIRE(step.extend(id, 6));
      REQUIRE(step.truncate(id, 9));
    });
    CHECK(formats_of(cache, id) == Formats{coded, coded, exact});
    CHECK(batch.copies().empty());
    CHECK(recodes_of(batch) == std::vector<PageRecode>{{tail, entry_of(cache, id, 1), 2, 0, 2}});
  }
  SECTION("to nothing") {
    const Batch batch = step_of(cache, [&](Step& step) {
      REQUIRE(step.extend(id, 6));
      REQUIRE(step.truncate(id, 0));
    });
    CHECK(pages_of(cache, id).empty());
    CHECK(batch.rows() == 1);
    CHECK(!batch.has_appends());
    CHECK(batch.copies().empty());
    CHECK(held(cache) == Formats{0, 0});
  }
}

TEST_CASE("truncating and extending in one step decodes, then seals from the coded page") {
  Sealing cache(sealing(8, 4));
  const SeqId id = sequence_of(cache, 8);
  const TableEntry old = entry_of(cache, id, 1);
  SECTION("not full again") {
    const Batch batch = step_of(cache, [&](Step& step) {
      REQUIRE(step.truncate(id, 5));
      REQUIRE(step.extend(id, 2));
    });
    CHECK(formats_of(cache, id) == Formats{coded, exact});
    CHECK(recodes_of(batch) == std::vector<PageRecode>{{old, entry_of(cache, id, 1), 1, 0, 0}});
    CHECK(batch.view().slots[0] == PhysSlot::make(entry_of(cache, id, 1), 1, 4).raw);
  }
  SECTION("full again") {
    const Batch batch = step_of(cache, [&](Step& step) {
      REQUIRE(step.truncate(id, 5));
      REQUIRE(step.extend(id, 4));
    });
    CHECK(formats_of(cache, id) == Formats{coded, coded, exact});
    CHECK(entry_of(cache, id, 1) != old);
    CHECK(recodes_of(batch) == std::vector<PageRecode>{{old, entry_of(cache, id, 1), 1, 0, 3}});
  }
}

TEST_CASE("several extends in one step make one row and seal each page once") {
  Sealing cache(sealing(8, 8));
  const SeqId id = sequence_of(cache, 2);
  const TableEntry tail = entry_of(cache, id, 0);
  const Batch batch = step_of(cache, [&](Step& step) {
    for (const int tokens : {1, 0, 1, 3, 1, 2}) REQUIRE(step.extend(id, tokens));
  });
  CHECK(cache.sequence(id)->length == 10);
  CHECK(formats_of(cache, id) == Formats{coded, coded, exact});
  CHECK(batch.rows() == 1);
  CHECK(batch.copies().empty());
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{tail, entry_of(cache, id, 0), 2, 0, 2},
                                                     {{}, entry_of(cache, id, 1), 0, 2, 4}});
  CHECK(held(cache) == Formats{2, 1});
}

TEST_CASE("a parent that took its new tokens back can be forked, and both seal from the same page") {
  Sealing cache(sealing(8, 8));
  const SeqId parent = sequence_of(cache, 6);
  const TableEntry tail = entry_of(cache, parent, 1);
  SeqId child{};
  const Batch batch = step_of(cache, [&](Step& step) {
    REQUIRE(step.extend(parent, 2));
    CHECK(step.fork(parent).error().code == Errc::pending_tokens);
    REQUIRE(step.truncate(parent, 6));
    child = *step.fork(parent);
    REQUIRE(step.extend(child, 3));
    REQUIRE(step.extend(parent, 2));
  });
  CHECK(formats_of(cache, child) == Formats{coded, coded, exact});
  CHECK(formats_of(cache, parent) == Formats{coded, coded});
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{tail, entry_of(cache, parent, 1), 2, 0, 2},
                                                     {tail, entry_of(cache, child, 1), 2, 2, 2}});
  CHECK(batch.copies().empty());
  CHECK(held(cache) == Formats{4 - 1, 1});
}

TEST_CASE("a shared sealed page that one owner opens stays the other's") {
  Sealing cache(sealing(8, 4));
  const SeqId parent = sequence_of(cache, 8), child = fork_of(cache, parent);
  const auto old = pages_of(cache, parent);
  truncate(cache, child, 6);
  CHECK(pages_of(cache, parent) == old);
  CHECK(formats_of(cache, child) == Formats{coded, exact});
  CHECK(cache.stats(coded).retired == 0);
  CHECK(cache.stats(coded).references == 3);
}

TEST_CASE("exact sink pages are never sealed and never opened") {
  Sealing cache(sealing(8, 8, 1));
  const SeqId id = sequence_of(cache, 3);
  const TableEntry sink = entry_of(cache, id, 0);
  const Batch batch = step_of(cache, [&](Step& step) { REQUIRE(step.extend(id, 6)); });
  CHECK(formats_of(cache, id) == Formats{exact, coded, exact});
  CHECK(entry_of(cache, id, 0) == sink);
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{{}, entry_of(cache, id, 1), 0, 1, 4}});
  truncate(cache, id, 6);
  CHECK(formats_of(cache, id) == Formats{exact, exact});
  truncate(cache, id, 2);
  CHECK(formats_of(cache, id) == Formats{exact});
  CHECK(entry_of(cache, id, 0) == sink);

  // A shared one is copied within its format.
  const SeqId child = fork_of(cache, id);
  const Batch second = step_of(cache, [&](Step& step) { REQUIRE(step.extend(child, 2)); });
  CHECK(recodes_of(second).empty());
  REQUIRE(second.copies().size() == 1);
  CHECK(second.copies()[0] == PageCopy{exact, sink.page(), entry_of(cache, child, 0).page()});
}

TEST_CASE("a window drops sealed pages, and the tail is exact") {
  SealingWindow cache(sealing(16, 4), {}, SinkWindow{2, 5});
  const SeqId id = sequence_of(cache, 0);
  for (int length = 1; length <= 60; ++length) {
    extend(cache, id, 1);
    Formats expected(pages_of(cache, id).size(), coded);
    if (length % 4 != 0) expected.back() = exact;
    CHECK(formats_of(cache, id) == expected);
    CHECK(expected.size() <= 4);
    CHECK(cache.verify().empty());
    CHECK(cache.stats(exact).held == (length % 4 != 0));
  }
  // The query at 59 saw 55..59: [52, 60) is there. One at 56 would see 52..56, one at 55 needs 51.
  REQUIRE(page_begins(cache, id) == std::vector<int>{0, 52, 56});
  Step step = cache.begin_step();
  CHECK(step.truncate(id, 55).error().code == Errc::position_evicted);
  REQUIRE(step.truncate(id, 58));
  CHECK(formats_of(cache, id) == Formats{coded, coded, exact});
  REQUIRE(step.truncate(id, 3));
  CHECK(formats_of(cache, id) == Formats{exact});
  CHECK(cache.verify().empty());
}

TEST_CASE("a step that seals a tail and drops pages is rolled back as a whole") {
  SealingWindow cache(sealing(16, 4, 1), {}, SinkWindow{2, 3});
  const SeqId id = sequence_of(cache, 15);
  const auto before = pages_of(cache, id);
  {
    Step step = cache.begin_step();
    REQUIRE(step.extend(id, 6));
    CHECK(page_begins(cache, id) == std::vector<int>{0, 12, 16, 20});
    CHECK(formats_of(cache, id) == Formats{exact, coded, coded, exact});
    REQUIRE(step.truncate(id, 15));
    CHECK(formats_of(cache, id) == Formats{exact, exact});
    CHECK(cache.verify().empty());
  }
  CHECK(pages_of(cache, id) == before);
  CHECK(cache.sequence(id)->retained == 15);
  CHECK(cache.verify().empty());
  for (int format = 0; format < 2; ++format) CHECK(cache.stats(format).retired == 0);
}

TEST_CASE("a demoted page moves to the low format, for this sequence alone") {
  TwoSealing cache(mixed(8, 4, 4));
  const SeqId a = sequence_of(cache, 10), b = fork_of(cache, a);
  const auto old = pages_of(cache, a);
  const Batch batch = step_of(cache, [&](Step& step) { REQUIRE(step.demote(a, 1)); });
  CHECK(formats_of(cache, a) == Formats{coded, low, exact});
  CHECK(pages_of(cache, b) == old);
  CHECK(batch.rows() == 0);
  CHECK(batch.has_appends());
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{old[1].entry, entry_of(cache, a, 1), 4, 0, 0}});
  CHECK(cache.stats(coded).retired == 0);

  // The other owner may do the same: a page of its own, from the page that is nobody's now.
  const Batch second = step_of(cache, [&](Step& step) { REQUIRE(step.demote(b, 1)); });
  CHECK(recodes_of(second) == std::vector<PageRecode>{{old[1].entry, entry_of(cache, b, 1), 4, 0, 0}});
  CHECK(cache.stats(coded).retired == 1);
  CHECK(held(cache) == Formats{1, 1, 2});

  // A fork shares low pages like all others.
  const SeqId c = fork_of(cache, b);
  CHECK(cache.stats(low).references == 3);
  CHECK(formats_of(cache, c) == Formats{coded, low, exact});
}

TEST_CASE("what cannot be demoted is refused by name and changes nothing") {
  TwoSealing cache(mixed(8, 4, 4, 1));
  const SeqId id = sequence_of(cache, 14);
  REQUIRE(formats_of(cache, id) == Formats{exact, coded, coded, exact});
  Step step = cache.begin_step();
  REQUIRE(step.demote(id, 1));
  const auto before = pages_of(cache, id);
  CHECK(refusal(step.demote(id, 3)) == "invalid argument: page (not full) (is 16, bound 14)");
  CHECK(refusal(step.demote(id, 0)) == "invalid argument: page (an exact sink)");
  CHECK(refusal(step.demote(id, 1)) ==
        "invalid argument: page (its format is not the high one) (is 2, bound 0)");
  CHECK(refusal(step.demote(id, 4)) == "invalid argument: page (is 4, bound 3)");
  CHECK(refusal(step.demote(id, -1)) == "invalid argument: page (is -1, bound 3)");
  CHECK(step.demote(SeqId{99}, 0).error().code == Errc::unknown_sequence);
  REQUIRE(pages_of(cache, id) == before);
  REQUIRE(step.extend(id, 2));
  const auto error = step.demote(id, 3).error();  // sealed, but with tokens that nobody has written yet
  CHECK(error.code == Errc::pending_tokens);
  CHECK(error.needed == 16);
  CHECK(error.available == 14);
  CHECK(step.demote(id, 2));  // pages before them are all there
  step.commit();
  CHECK(cache.begin_step().demote(id, 3));
  CHECK(cache.verify().empty());

  Sealing plain(sealing(4, 2));
  const SeqId other = sequence_of(plain, 4);
  Step refused = plain.begin_step();
  CHECK(refused.demote(other, 0).error().code == Errc::unsupported);
  Step second = plain.begin_step();
  CHECK(second.demote(other, 0).error().code == Errc::step_not_open);
}

TEST_CASE("pages that are full of tokens taken back and added again in this step cannot be demoted") {
  TwoSealing cache(mixed(8, 4, 4));
  const SeqId id = sequence_of(cache, 8);
  Step step = cache.begin_step();
  REQUIRE(step.truncate(id, 7));
  REQUIRE(step.extend(id, 1));
  CHECK(step.demote(id, 1).error().code == Errc::pending_tokens);
  CHECK(step.demote(id, 0));
}

TEST_CASE("truncating into a demoted page opens it, exact where high pages are sealed") {
  TwoSealing cache(mixed(8, 4, 4));
  const SeqId id = sequence_of(cache, 8);
  step_of(cache, [&](Step& step) { REQUIRE((step.demote(id, 0) && step.demote(id, 1))); });
  const TableEntry old = entry_of(cache, id, 1);
  const Batch cut = step_of(cache, [&](Step& step) { REQUIRE(step.truncate(id, 7)); });
  CHECK(formats_of(cache, id) == Formats{low, exact});
  const TableEntry opened = entry_of(cache, id, 1);
  CHECK(recodes_of(cut) == std::vector<PageRecode>{{old, opened, 3, 0, 0}});
  const Batch sealed = step_of(cache, [&](Step& step) { REQUIRE(step.extend(id, 1)); });
  CHECK(formats_of(cache, id) == Formats{low, coded});
  CHECK(recodes_of(sealed) == std::vector<PageRecode>{{opened, entry_of(cache, id, 1), 3, 0, 1}});
  // To a border: low pages stay low, and new ones follow them.
  truncate(cache, id, 4);
  extend(cache, id, 5);
  CHECK(formats_of(cache, id) == Formats{low, coded, exact});
}

TEST_CASE("truncating into a demoted page opens it, high where tokens are coded one by one") {
  PagedCache<SmallLayout, Two> cache(mixed(8, 0, 4));
  const SeqId id = sequence_of(cache, 10);
  CHECK(formats_of(cache, id) == Formats{coded, coded, coded});
  CHECK(cache.begin_step().demote(id, 2).error().code == Errc::invalid_argument);
  step_of(cache, [&](Step& step) { REQUIRE(step.demote(id, 1)); });
  const TableEntry old = entry_of(cache, id, 1);
  const Batch batch = step_of(cache, [&](Step& step) {
    REQUIRE(step.truncate(id, 6));
    REQUIRE(step.extend(id, 1));
  });
  CHECK(formats_of(cache, id) == Formats{coded, coded});
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{old, entry_of(cache, id, 1), 2, 0, 0}});
  CHECK(batch.tokens() == 1);
}

TEST_CASE("truncating into a page demoted in this very step reads the high page") {
  TwoSealing cache(mixed(8, 4, 4));
  const SeqId id = sequence_of(cache, 8);
  const TableEntry high = entry_of(cache, id, 1);
  const Batch batch = step_of(cache, [&](Step& step) {
    REQUIRE(step.demote(id, 1));
    REQUIRE(step.truncate(id, 6));
  });
  CHECK(recodes_of(batch) == std::vector<PageRecode>{{high, entry_of(cache, id, 1), 2, 0, 0}});
  CHECK(held(cache) == Formats{1, 1, 0});
}

TEST_CASE("a page demoted and given up in one step is not encoded, one that a fork shares is") {
  TwoSealing cache(mixed(8, 4, 4));
  const SeqId id = sequence_of(cache, 8);
  const TableEntry high = entry_of(cache, id, 1);
  SeqId child{};
  const Batch batch = step_of(cache, [&](Step& step) {
    REQUIRE((step.demote(id, 0) && step.truncate(id, 8) && step.demote(id, 1)));
    child = *step.fork(id);
    REQUIRE(step.truncate(child, 4));
    REQUIRE(step.truncate(id, 0));
    REQUIRE(step.extend(child, 1));
  });
  REQUIRE(formats_of(cache, child) == Formats{low, exact});
  REQUIRE(recodes_of(batch).size() == 1);
  CHECK(recodes_of(batch)[0].to == entry_of(cache, child, 0));
  CHECK(recodes_of(batch)[0].from != high);
}

TEST_CASE("an exact high format leaves no format of its own for exact pages") {
  using Quant = Mixed<Identity<fp16>, Int4Channels<4>>;
  STATIC_REQUIRE(format_count<Quant> == 2);
  STATIC_REQUIRE(low_format<Quant> == 1);
  PagedCache<SmallLayout, Quant> cache(mixed(6, 0, 1, 1));
  const SeqId id = sequence_of(cache, 10);
  Step step = cache.begin_step();
  CHECK(step.demote(id, 0).error().code == Errc::invalid_argument);  // an exact sink
  REQUIRE(step.demote(id, 1));
  CHECK(formats_of(cache, id) == Formats{0, 1, 0});
  REQUIRE(step.extend(id, 2));
  step.commit();
  Step next = cache.begin_step();
  check_short(next.demote(id, 2), "low pages", 1, 0);
  REQUIRE(next.truncate(id, 7));
  CHECK(formats_of(cache, id) == Formats{0, 0});
  CHECK(cache.verify().empty());
}

namespace {

template <int PageTokens, class Quant>
void check_page_size() {
  CAPTURE(PageTokens);
  PagedCache<Gqa<8, PageTokens>, Quant> cache(sealing(8, 2));
  for (const int tokens : {0, 1, PageTokens - 1, PageTokens, PageTokens + 1, 2 * PageTokens,
                           3 * PageTokens + Quant::seal_tokens}) {
    const SeqId id = sequence_of(cache, tokens);
    Formats expected(static_cast<std::size_t>(tokens / PageTokens), coded);
    if (tokens % PageTokens != 0) expected.push_back(exact);
    CHECK(formats_of(cache, id) == expected);  // blocks that are full do not seal a page that is not
    step_of(cache, [&](Step& step) { REQUIRE(step.release(id)); });
  }
}

template <class C>
std::string configuration_error(const CacheConfig& config) {
  try {
    C cache(config);
  } catch (const contract_error& error) {
    return error.what();
  }
  return "none";
}

}  // namespace

TEST_CASE("pages of one, two and three blocks are sealed when they are full") {
  check_page_size<4, Int4Channels<4>>();
  check_page_size<8, Int4Channels<4>>();
  check_page_size<12, Int4Channels<4>>();
  check_page_size<12, KeyValue<Centered<Int8, 6>, Int4Channels<2>>>();
}

TEST_CASE("page sizes that are not whole blocks are refused with a message that says so") {
  const std::string message = "kvfolia: shape.page_tokens must be a multiple of the quantizer's seal_tokens";
  const CacheConfig six{.shape = {1, 1, 6}, .pages = 2, .exact_pages = 2};
  using Layout = Gqa<8, dynamic>;
  CHECK(configuration_error<PagedCache<Layout, Int4Channels<4>>>(six) == message);
  CHECK(configuration_error<PagedCache<Layout, Centered<Int8, 12>>>(six) == message);
  CHECK(configuration_error<PagedCache<Layout, KeyValue<Int8, Int4Channels<4>>>>(six) == message);
  CHECK(configuration_error<PagedCache<Layout, Mixed<Int8, Int4Channels<4>>>>(six) == message);
  CHECK(configuration_error<PagedCache<Layout, Mixed<Int4Channels<4>, Int8>>>(six) == message);
  // Each format has blocks of its own.
  CHECK(configuration_error<PagedCache<Layout, Mixed<Int4Channels<4>, Int4Channels<6>>>>(six) == message);
  CHECK(configuration_error<PagedCache<Layout, Int4Channels<3>>>(six) == "none");
  CHECK(configuration_error<PagedCache<Layout, Int4Channels<6>>>(six) == "none");
}

TEST_CASE("caches that seal need exact pages, and only Mixed has low ones") {
  const auto has = [](const std::string& text, const char* words) {
    return text.find(words) != std::string::npos;
  };
  CHECK(has(configuration_error<Sealing>(sealing(4, 0)), "exact_pages must be positive"));
  CHECK(has(configuration_error<Sealing>(mixed(4, 1, 1)), "low_pages"));
  CHECK(has(configuration_error<TwoSealing>(mixed(4, 0, 1)), "exact_pages must be positive"));
  CHECK(configuration_error<TwoSealing>(mixed(4, 1, 0)) == "none");
  CHECK(configuration_error<PagedCache<SmallLayout, Two>>(mixed(4, 0, 1)) == "none");
}

TEST_CASE("the bytes that a cache reports are those that its pages take") {
  const CacheConfig config{.shape = {3, 2, dynamic},
                           .pages = 5,
                           .exact_pages = 4,
                           .low_pages = 3,
                           .order = StorageOrder::page_major};
  using Quant = Mixed<KeyValue<Centered<Int8, 4>, Int8>, KeyValue<Int4Channels<4>, Int4<0>>>;
  PagedCache<Gqa<8, 8>, Quant> cache(config);
  // Two heads, eight tokens of eight dims. High: codes 64 and 64; two means of 16 bytes and eight scales
  // of 2; eight scales. Exact: 128 and 128. Low: codes 32 and 32; two blocks of 8 pairs of 4 bytes; 8 pairs.
  const std::int64_t slices[] = {2 * (64 + 64 + 48 + 16), 2 * (128 + 128), 2 * (32 + 32 + 64 + 32)};
  const std::int64_t pages[] = {5, 4, 3};
  const StoreSpec spec = decltype(cache)::store_spec(config);
  REQUIRE(spec.formats.size() == 3);
  for (int f = 0; f < 3; ++f) {
    CHECK(spec.formats[static_cast<std::size_t>(f)].slice_bytes == slices[f]);
    CHECK(spec.formats[static_cast<std::size_t>(f)].pages == pages[f]);
    CHECK(cache.stats(f).page_bytes == 3 * slices[f]);
    CHECK(cache.store().page_bytes(f) == 3 * slices[f]);
  }

  const SeqId id = sequence_of(cache, 24);
  step_of(cache, [&](Step& step) { REQUIRE((step.demote(id, 0) && step.demote(id, 2))); });
  extend(cache, id, 7);
  CHECK(held(cache) == Formats{1, 1, 2});
  CHECK(cache.stats(coded).bytes_held() == 3 * slices[0]);
  CHECK(cache.stats(exact).bytes_held() == 3 * slices[1]);
  CHECK(cache.stats(low).bytes_held() == 2 * 3 * slices[2]);
  const SeqId child = fork_of(cache, id);
  CHECK(cache.stats(low).bytes_saved() == 2 * 3 * slices[2]);
  CHECK(cache.sequence(child)->length == 31);
}

TEST_CASE("a sealed tail's exact page is had again when its batch has ended") {
  Sealing cache(sealing(8, 1));
  const SeqId id = sequence_of(cache, 3);
  {
    const Batch sealing_batch = step_of(cache, [&](Step& step) { REQUIRE(step.extend(id, 1)); });
    CHECK(cache.stats(exact).retired == 1);
    Step step = cache.begin_step();
    check_short(step.extend(id, 1), "exact pages", 1, 0);
  }
  CHECK(cache.stats(exact).free == 1);
  extend(cache, id, 1);
  CHECK(formats_of(cache, id) == Formats{coded, exact});
}

TEST_CASE("steps that seal visit as many pages in a large pool as in a small one") {
  const auto visits = [](std::int64_t pages) {
    TwoSealing cache(mixed(pages, pages, pages));
    const SeqId parent = sequence_of(cache, 101);
    step_of(cache, [&](Step& step) {
      const SeqId child = *step.fork(parent);
      REQUIRE(step.extend(child, 50));
      REQUIRE(step.truncate(parent, 62));
      REQUIRE(step.demote(parent, 3));
      REQUIRE(step.extend(parent, 2));
    });
    std::vector<std::int64_t> counts;
    for (int f = 0; f < 3; ++f) counts.push_back(cache.pool(f).visits());
    return counts;
  };
  CHECK(visits(100) == visits(100'000));
}
