// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Sequences whose pages leave.

#include "support/small_caches.hpp"

using namespace kvfolia_tests;

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

TEST_CASE("more sink tokens than there will ever be evict nothing") {
  Windowed cache(config(16), {}, SinkWindow{INT32_MAX, 1});
  const SeqId id = sequence_of(cache, 20);
  extend(cache, id, 1);
  CHECK(page_begins(cache, id).size() == 6);
}
