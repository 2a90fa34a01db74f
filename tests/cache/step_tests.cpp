// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "support/small_caches.hpp"

using namespace kvfolia_tests;

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

TEST_CASE("a batch that is moved lives on, one that is replaced ends") {
  Cache cache(config(4));
  const SeqId a = sequence_of(cache, 4);
  Step step = cache.begin_step();
  REQUIRE(step.release(a));
  Batch batch = step.commit();
  Batch moved = std::move(batch);
  CHECK(cache.stats().retired == 1);
  Step next = cache.begin_step();
  REQUIRE(next.extend(*next.create(), 3));
  moved = next.commit();
  CHECK(cache.stats().retired == 0);
  CHECK(moved.tokens() == 3);
  CHECK(batch.tokens() == 0);
  batch = std::move(moved);
  CHECK(batch.view().lengths[0] == 3);
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
