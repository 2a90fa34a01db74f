// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "support/scenario.hpp"

using namespace kvfolia_tests;

namespace {

using Layout = Gqa<8, 4>;
using Cache = PagedCache<Layout, Identity<float>>;
using Windowed = PagedCache<Layout, Identity<float>, SinkWindow>;

CacheConfig config(std::int64_t pages) { return {.shape = {1, 1, dynamic}, .pages = pages}; }

/// A sequence of so many tokens, its batch already over.
template <class C>
SeqId sequence_of(C& cache, int tokens) {
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, tokens));
  step.commit();
  return id;
}

template <class C>
void extend(C& cache, SeqId id, int tokens) {
  Step step = cache.begin_step();
  REQUIRE(step.extend(id, tokens));
  step.commit();
}

template <class C>
std::vector<TablePage> pages_of(const C& cache, SeqId id) {
  const auto pages = cache.sequence(id)->pages;
  return {pages.begin(), pages.end()};
}

template <class C>
std::vector<int> page_begins(const C& cache, SeqId id) {
  std::vector<int> begins;
  for (const TablePage& page : pages_of(cache, id)) begins.push_back(page.begin.value);
  return begins;
}

}  // namespace

TEST_CASE("a sequence holds as many pages as its tokens need") {
  Cache cache(config(8));
  for (const int tokens : {0, 1, 3, 4, 5, 12}) {
    const SeqId id = sequence_of(cache, tokens);
    CHECK(static_cast<int>(pages_of(cache, id).size()) == (tokens + 3) / 4);
    CHECK(cache.stats().held == (tokens + 3) / 4);
    CHECK(cache.verify().empty());
    Step step = cache.begin_step();
    REQUIRE(step.release(id));
    step.commit();
    CHECK(cache.stats().free == 8);
  }
}

TEST_CASE("a batch has the arrays worked out by hand") {
  Cache cache(config(8));
  const SeqId a = sequence_of(cache, 5);  // pages 0, 1
  const SeqId b = sequence_of(cache, 2);  // page 2
  Step step = cache.begin_step();
  REQUIRE((step.extend(b, 3) && step.extend(a, 1)));  // b takes page 3
  const Batch batch = step.commit();
  CHECK(batch.rows() == 2);
  CHECK(batch.sequence(0) == b);
  CHECK(batch.tokens() == 4);
  const BatchView view = batch;
  const auto list = [](const auto* values, int n) { return std::vector<std::int64_t>(values, values + n); };
  CHECK(list(view.query_indptr, 3) == std::vector<std::int64_t>{0, 3, 4});
  CHECK(list(view.table.indptr, 3) == std::vector<std::int64_t>{0, 2, 4});
  CHECK(list(view.table.entries, 4) == std::vector<std::int64_t>{2, 3, 0, 1});
  CHECK(list(view.entry_pos, 4) == std::vector<std::int64_t>{0, 4, 0, 4});
  CHECK(list(view.lengths, 2) == std::vector<std::int64_t>{5, 6});
  CHECK(list(view.query_pos, 2) == std::vector<std::int64_t>{2, 5});
  CHECK(list(view.slots, 4) == std::vector<std::int64_t>{2 * 4 + 2, 2 * 4 + 3, 3 * 4, 1 * 4 + 1});
}

TEST_CASE("a step that is not committed leaves no trace") {
  Cache cache(config(8));
  const SeqId a = sequence_of(cache, 6), gone = sequence_of(cache, 4);
  const auto before = pages_of(cache, a);
  {
    Step step = cache.begin_step();
    const SeqId child = *step.fork(a);
    REQUIRE(step.extend(a, 5));
    REQUIRE(step.extend(child, 1));
    REQUIRE(step.truncate(a, 2));
    REQUIRE(step.extend(a, 1));
    REQUIRE(step.release(gone));
    REQUIRE(step.extend(*step.create(), 4));
    CHECK(cache.verify().empty());
  }
  CHECK(cache.verify().empty());
  CHECK(cache.sequence(a)->length == 6);
  CHECK(pages_of(cache, a) == before);
  CHECK(cache.sequence(gone)->length == 4);
  CHECK(cache.stats().free == 8 - 3);
  CHECK(cache.stats().retired == 0);
}

TEST_CASE("out of pages says how many are missing and changes nothing") {
  Cache cache(config(3));
  const SeqId a = sequence_of(cache, 4);
  Step step = cache.begin_step();
  const auto error = step.extend(a, 13);
  REQUIRE(!error);
  CHECK(error.error().code == Errc::out_of_pages);
  CHECK(error.error().needed == 4);
  CHECK(error.error().available == 2);
  CHECK(error.error().missing() == 2);
  CHECK(cache.verify().empty());
  CHECK(step.extend(a, 8));  // the step goes on
  CHECK(step.commit().tokens() == 8);
}

TEST_CASE("a fork shares pages until either side appends") {
  for (const bool child_first : {true, false}) {
    Cache cache(config(8));
    const SeqId parent = sequence_of(cache, 6);
    Step step = cache.begin_step();
    const SeqId child = *step.fork(parent);
    step.commit();
    CHECK(cache.stats().held == 2);
    CHECK(cache.stats().shared == 2);
    CHECK(pages_of(cache, child) == pages_of(cache, parent));

    const SeqId writer = child_first ? child : parent, other = child_first ? parent : child;
    const auto old = pages_of(cache, other);
    Step next = cache.begin_step();
    REQUIRE(next.extend(writer, 1));
    const Batch batch = next.commit();
    CHECK(pages_of(cache, other) == old);
    CHECK(pages_of(cache, writer)[0] == old[0]);
    CHECK(pages_of(cache, writer)[1] != old[1]);
    REQUIRE(batch.copies().size() == 1);
    CHECK(batch.copies()[0] == PageCopy{0, old[1].entry.page(), pages_of(cache, writer)[1].entry.page()});
    CHECK(cache.verify().empty());

    // The other one is alone now: no further copy.
    Step last = cache.begin_step();
    REQUIRE(last.extend(other, 1));
    CHECK(last.commit().copies().empty());
    CHECK(pages_of(cache, other) == old);
  }
}

TEST_CASE("both sides of a fork that append in one step make one copy") {
  Cache cache(config(4));
  const SeqId parent = sequence_of(cache, 6);
  Step step = cache.begin_step();
  const SeqId child = *step.fork(parent);
  REQUIRE((step.extend(parent, 1) && step.extend(child, 1)));
  const Batch batch = step.commit();
  CHECK(batch.copies().size() == 1);
  CHECK(cache.stats().held == 3);
  CHECK(cache.verify().empty());
}

TEST_CASE("a copy of a copy within one step reads the original page") {
  Cache cache(config(8));
  const SeqId parent = sequence_of(cache, 6);
  Step first = cache.begin_step();
  REQUIRE(first.fork(parent));
  first.commit();
  const PageId original = pages_of(cache, parent)[1].entry.page();
  Step step = cache.begin_step();
  REQUIRE((step.extend(parent, 1) && step.truncate(parent, 6)));  // the parent's last page is a copy now
  const SeqId second = *step.fork(parent);
  REQUIRE(step.extend(second, 1));
  const Batch batch = step.commit();
  REQUIRE(batch.copies().size() == 2);
  for (const PageCopy& copy : batch.copies()) CHECK(copy.from == original);
  CHECK(cache.verify().empty());
}

TEST_CASE("a fork of full pages needs no copy") {
  Cache cache(config(4));
  const SeqId parent = sequence_of(cache, 8);
  Step step = cache.begin_step();
  const SeqId child = *step.fork(parent);
  REQUIRE(step.extend(child, 1));
  CHECK(step.commit().copies().empty());
}

TEST_CASE("with no page left a fork's append is an error and the parent is intact") {
  Cache cache(config(2));
  const SeqId parent = sequence_of(cache, 6);
  const auto before = pages_of(cache, parent);
  Step step = cache.begin_step();
  const SeqId child = *step.fork(parent);
  const auto error = step.extend(child, 1);
  REQUIRE(!error);
  CHECK(error.error().code == Errc::out_of_pages);
  CHECK(error.error().missing() == 1);
  CHECK(pages_of(cache, parent) == before);
  CHECK(cache.sequence(child)->length == 6);
  CHECK(cache.verify().empty());
  REQUIRE(step.release(child));
  step.commit();
  CHECK(pages_of(cache, parent) == before);
  CHECK(cache.stats().shared == 0);
  extend(cache, parent, 2);
  CHECK(cache.verify().empty());
}

TEST_CASE("a parent whose tokens are not written yet cannot be forked") {
  Cache cache(config(4));
  const SeqId parent = sequence_of(cache, 2);
  Step step = cache.begin_step();
  REQUIRE(step.extend(parent, 1));
  CHECK(step.fork(parent).error().code == Errc::pending_tokens);
}

TEST_CASE("truncating in mid-page frees the pages behind and nothing else") {
  Cache cache(config(8));
  const SeqId id = sequence_of(cache, 2 * 4 + 2);
  const auto before = pages_of(cache, id);
  Step step = cache.begin_step();
  REQUIRE(step.truncate(id, 4 + 1));
  REQUIRE(step.extend(id, 1));
  const Batch batch = step.commit();
  CHECK(cache.sequence(id)->length == 4 + 2);
  CHECK(pages_of(cache, id) == std::vector<TablePage>{before[0], before[1]});
  CHECK(batch.view().slots[0] == before[1].entry.page().value * 4 + 1);
  CHECK(cache.pool().state(before[2].entry.page()) == PageState::retired);
  CHECK(cache.verify().empty());
}

TEST_CASE("truncation stops at page borders, at zero, and refuses what is not there") {
  Cache cache(config(8));
  const SeqId id = sequence_of(cache, 10);
  Step step = cache.begin_step();
  CHECK(step.truncate(id, 11).error().code == Errc::invalid_argument);
  CHECK(step.truncate(id, -1).error().code == Errc::invalid_argument);
  REQUIRE(step.truncate(id, 8));
  CHECK(page_begins(cache, id) == std::vector<int>{0, 4});
  REQUIRE(step.truncate(id, 0));
  CHECK(page_begins(cache, id).empty());
  step.commit();
  CHECK(cache.stats().free == 8);
}

TEST_CASE("a page given up is not reused before its batch and all earlier ones end") {
  Cache cache(config(2));
  const SeqId a = sequence_of(cache, 8);
  Step first = cache.begin_step();
  REQUIRE(first.extend(a, 0));
  auto reader = std::make_optional(first.commit());  // still reads a's pages
  Step second = cache.begin_step();
  REQUIRE(second.release(a));
  auto releasing = std::make_optional(second.commit());
  CHECK(cache.stats().retired == 2);
  releasing.reset();
  CHECK(cache.stats().retired == 2);
  {
    Step step = cache.begin_step();
    CHECK(step.extend(*step.create(), 1).error().code == Errc::out_of_pages);
  }
  CHECK(cache.verify().empty());
  reader.reset();
  CHECK(cache.stats().retired == 0);
  CHECK(cache.stats().free == 2);
}

TEST_CASE("a batch outlives its cache") {
  auto cache = std::make_optional<Cache>(config(2));
  Step step = cache->begin_step();
  REQUIRE(step.extend(*step.create(), 3));
  const Batch batch = step.commit();
  cache.reset();
  CHECK(batch.view().lengths[0] == 3);
}

TEST_CASE("one step is open at a time") {
  Cache cache(config(2));
  Step step = cache.begin_step();
  Step second = cache.begin_step();
  CHECK(second.create().error().code == Errc::step_not_open);
  CHECK(second.commit().rows() == 0);
  const SeqId id = *step.create();
  Step moved = std::move(step);
  CHECK(moved.extend(id, 1));
  CHECK(moved.commit().rows() == 1);
  CHECK(moved.extend(id, 1).error().code == Errc::step_not_open);
  CHECK(cache.begin_step().extend(id, 1));
}

TEST_CASE("ids of released sequences stay invalid") {
  Cache cache(config(4));
  const SeqId old = sequence_of(cache, 1);
  Step step = cache.begin_step();
  REQUIRE(step.release(old));
  CHECK(step.release(old).error().code == Errc::unknown_sequence);
  CHECK(step.extend(old, 1).error().code == Errc::unknown_sequence);
  step.commit();
  const SeqId fresh = sequence_of(cache, 1);
  CHECK(fresh != old);
  Step next = cache.begin_step();
  CHECK(next.fork(old).error().code == Errc::unknown_sequence);
  CHECK(next.truncate(SeqId{-1}, 0).error().code == Errc::unknown_sequence);
  CHECK(next.truncate(SeqId{77}, 0).error().code == Errc::unknown_sequence);
  CHECK(!cache.sequence(old));
}

TEST_CASE("whoever is extended and then released in one step has no row") {
  Cache cache(config(4));
  const SeqId a = sequence_of(cache, 2), b = sequence_of(cache, 2);
  Step step = cache.begin_step();
  REQUIRE((step.extend(a, 3) && step.extend(b, 1) && step.release(a)));
  const Batch batch = step.commit();
  CHECK(batch.rows() == 1);
  CHECK(batch.sequence(0) == b);
  CHECK(cache.verify().empty());
}

TEST_CASE("extending twice makes one row, truncating shortens it") {
  Cache cache(config(4));
  const SeqId a = sequence_of(cache, 2);
  Step step = cache.begin_step();
  REQUIRE((step.extend(a, 3) && step.extend(a, 4) && step.truncate(a, 6)));
  const Batch batch = step.commit();
  CHECK(batch.rows() == 1);
  CHECK(batch.tokens() == 4);
  CHECK(batch.view().query_pos[0] == 2);
}

TEST_CASE("window pages leave when no query can see them, sinks stay, positions go on") {
  Windowed cache(config(16), {}, SinkWindow{2, 5});
  const SeqId id = sequence_of(cache, 12);
  CHECK(page_begins(cache, id) == std::vector<int>{0, 4, 8});
  // The query at 12 sees 8..12 and the sinks: page 4..7 is dead. At 11 it was not.
  extend(cache, id, 1);
  CHECK(page_begins(cache, id) == std::vector<int>{0, 8, 12});
  CHECK(cache.sequence(id)->length == 13);
  CHECK(cache.sequence(id)->retained == 9);
  for (int i = 0; i < 200; ++i) {
    extend(cache, id, 1);
    CHECK(pages_of(cache, id).size() <= 4);
    CHECK(cache.verify().empty());
  }
  CHECK(cache.sequence(id)->length == 213);
}

TEST_CASE("a budget of retained tokens does not renumber: the next position is the text's") {
  Windowed cache(config(80), {}, SinkWindow{4, 28});
  const SeqId id = sequence_of(cache, 264);
  Step step = cache.begin_step();
  REQUIRE(step.extend(id, 1));
  const Batch batch = step.commit();
  CHECK(batch.view().query_pos[0] == 264);
  // Sinks 0..3 and 237..264: pages 0, 236..264.
  CHECK(batch.view().lengths[0] == 4 + 29);
  CHECK(batch.view().first_query(0, 4) == LogicalPos{264});
}

TEST_CASE("truncating below what has left is an error, above it is not") {
  Windowed cache(config(16), {}, SinkWindow{2, 5});
  const SeqId id = sequence_of(cache, 20);
  extend(cache, id, 4);  // [4, 16) has left
  REQUIRE(page_begins(cache, id) == std::vector<int>{0, 16, 20});
  Step step = cache.begin_step();
  for (const int to : {5, 12, 16, 19}) {
    CAPTURE(to);
    CHECK(step.truncate(id, to).error().code == Errc::position_evicted);
  }
  CHECK(step.truncate(id, 19).error().available == 20);
  CHECK(step.truncate(id, 20));
  CHECK(page_begins(cache, id) == std::vector<int>{0, 16});
  CHECK(step.truncate(id, 3));  // all that position 3 can see is there
  CHECK(page_begins(cache, id) == std::vector<int>{0});
  CHECK(step.extend(id, 2));
  step.commit();
  CHECK(cache.verify().empty());
}

TEST_CASE("a prefill longer than the window keeps what its first query sees") {
  Windowed cache(config(64), {}, SinkWindow{0, 5});
  const SeqId id = sequence_of(cache, 9);
  Step step = cache.begin_step();
  REQUIRE(step.extend(id, 40));
  const Batch batch = step.commit();
  CHECK(page_begins(cache, id).front() == 4);  // the query at 9 sees 5..9
  CHECK(page_begins(cache, id).size() == 12);
}

TEST_CASE("the first pages of a sequence are exact, the others coded") {
  PagedCache<Layout, Int8> cache(
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
  PagedCache<Layout, Int8> cache(
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
