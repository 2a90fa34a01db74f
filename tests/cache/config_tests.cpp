// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Formats, configurations, costs, and what the verifier sees.

#include "support/small_caches.hpp"

using namespace kvfolia_tests;

TEST_CASE("the first pages of a sequence are exact, the others coded") {
  PagedCache<SmallLayout, Int8> cache(
      {.shape = {1, 1, dynamic}, .pages = 3, .exact_pages = 3, .exact_sink_pages = 2});
  const SeqId id = sequence_of(cache, 10);
  std::vector<int> formats;
  for (const TablePage& page : pages_of(cache, id)) formats.push_back(page.entry.format());
  CHECK(formats == std::vector<int>{1, 1, 0});
  CHECK(cache.stats(0).held == 1);
  CHECK(cache.stats(1).held == 2);
  Step step = cache.begin_step();
  const auto error = step.extend(*step.create(), 5);
  CHECK(error.error().code == Errc::out_of_pages);
  CHECK(std::string(error.error().subject) == "exact pages");
  CHECK(error.error().missing() == 1);
  CHECK(cache.verify().empty());
}

TEST_CASE("a forked exact tail is copied within its format") {
  PagedCache<SmallLayout, Int8> cache(
      {.shape = {1, 1, dynamic}, .pages = 3, .exact_pages = 3, .exact_sink_pages = 1});
  const SeqId parent = sequence_of(cache, 3);
  Step step = cache.begin_step();
  const SeqId child = *step.fork(parent);
  REQUIRE(step.extend(child, 1));
  const Batch batch = step.commit();
  REQUIRE(batch.copies().size() == 1);
  CHECK(batch.copies()[0].format == 1);
}

TEST_CASE("configurations that make no cache are refused by name") {
  const auto message = [](auto make) {
    try {
      make();
    } catch (const contract_error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const auto has = [](const std::string& text, const char* word) {
    return text.find(word) != std::string::npos;
  };
  using Dynamic = PagedCache<Gqa<8, dynamic, SlotMajor, SlotPairs<2>>, Int8, SinkWindow>;
  const auto make = [](CacheConfig c, SinkWindow w = {}) { return [=] { Dynamic cache(c, {}, w); }; };
  CHECK(has(message(make({.shape = {1, 1, dynamic}, .pages = 1})), "page_tokens"));
  CHECK(has(message(make({.shape = {1, 1, 3}, .pages = 1})), "page_tokens"));
  CHECK(has(message(make({.shape = {0, 1, 4}, .pages = 1})), "layers"));
  CHECK(has(message(make({.shape = {1, 0, 4}, .pages = 1})), "kv_heads"));
  CHECK(has(message(make({.shape = {1, 1, 4}, .pages = -1})), "pages"));
  CHECK(has(message(make({.shape = {1, 1, 4}, .pages = std::int64_t{1} << 30})), "2^29"));
  CHECK(has(message(make({.shape = {1, 1, 4}, .pages = 1, .exact_sink_pages = 1})), "exact_pages"));
  CHECK(has(message(make({.shape = {1, 1, 4}, .pages = 1}, SinkWindow{4, 0})), "window"));
  CHECK(has(message(make({.shape = {1, 1, 4}, .pages = 1}, SinkWindow{-1, 4})), "sink_tokens"));
  CHECK(has(message(make({.shape = {1, 1 << 28, 1 << 27}, .pages = 4})), "64 bits"));
  CHECK(has(message([] { Cache cache({.shape = {1, 1, 8}, .pages = 1}); }), "page_tokens"));
}

TEST_CASE("operations visit as many pages in a large pool as in a small one") {
  const auto visits = [](std::int64_t pages) {
    Cache cache(config(pages));
    const SeqId parent = sequence_of(cache, 100);
    std::vector<std::int64_t> counts{cache.pool().visits()};
    Step step = cache.begin_step();
    const SeqId child = *step.fork(parent);
    REQUIRE(step.extend(child, 50));
    REQUIRE(step.truncate(parent, 60));
    REQUIRE(step.release(child));
    step.commit();
    counts.push_back(cache.pool().visits());
    return counts;
  };
  CHECK(visits(100) == visits(1'000'000));
}

TEST_CASE("a cache whose pages are all exact, or that has none, works") {
  PagedCache<SmallLayout, Int8> exact(
      {.shape = {1, 1, dynamic}, .pages = 0, .exact_pages = 8, .exact_sink_pages = 100});
  Random random(1);
  Step step = exact.begin_step();
  REQUIRE(step.extend(*step.create(), 9));
  const Batch batch = run_step(exact, std::move(step), random);
  Attention a = Attention::make<SmallLayout>(random, 9, 2);
  check_attend(exact.view(LayerId{0}), batch, a, 2);

  Cache none(config(0));
  Step empty = none.begin_step();
  REQUIRE(empty.extend(*empty.create(), 0));
  CHECK(cpu::plan_attend(none.view(LayerId{0}), empty.commit(), {1, 1}));
}

TEST_CASE("a slot whose generations are used up gives no more ids") {
  detail::CacheState state({.page_tokens = 4}, {1});
  const std::size_t index = state.new_slot();
  state.slot(index).generation = INT32_MAX;
  CHECK(state.find(state.id_of(index)) != nullptr);
  state.retire_slot(index);
  CHECK(state.new_slot() != index);
}

TEST_CASE("the verifier sees tables that do not hold together") {
  detail::CacheState state(
      {.page_tokens = 4, .exact_sink_pages = 1, .exact_format = 1, .window = {.left = 7}}, {8, 8});
  Sequence& s = state.slot(state.new_slot()).sequence;
  for (const int begin : {0, 4, 8})
    s.pages.push_back({state.allocate(state.rules().format_at(begin, begin < 8)), LogicalPos{begin}});
  s.length = 10;
  REQUIRE(state.verify().empty());
  const auto violations = [&](auto corrupt) {
    const Sequence whole = s;
    corrupt();
    const std::size_t count = state.verify().size();
    s = whole;
    return count;
  };
  CHECK(violations([&] { s.gap_begin = 100, s.gap_end = 104; }) > 0);
  CHECK(violations([&] { s.gap_begin = 5, s.gap_end = 6; }) > 0);
  CHECK(violations([&] { s.pages[1].begin = LogicalPos{5}; }) > 0);
  CHECK(violations([&] { s.pages.pop_back(); }) > 0);
  CHECK(violations([&] { s.length = 13; }) > 0);
  CHECK(violations([&] { s.length = 8; }) > 0);
  CHECK(violations([&] { s.pages[1].entry = TableEntry{-1}; }) > 0);
  CHECK(violations([&] { s.pages[1].entry = TableEntry::make(1, PageId{3}); }) > 0);
  CHECK(violations([&] { s.pages[2].entry = TableEntry::make(3, PageId{0}); }) > 0);
  CHECK(violations([&] { s.pages[2].entry = s.pages[1].entry; }) > 0);
  state.add_ref(s.pages[1].entry);
  CHECK(violations([&] { s.pages[2].entry = s.pages[1].entry; }) > 0);
}
