// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Partial results: merging and finishing.

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/hand.hpp"

using namespace kvfolia_tests;

TEST_CASE("a prefix of eight zeros and a suffix of one 1 merge to a ninth") {
  Hand<64> prefix(8, 1), suffix(1, 1);
  prefix.row(1, {0}, 8);
  suffix.row(1, {0}, 1);
  for (int slot = 0; slot < 8; ++slot) prefix.store(0, slot, 0.0f, 0.0f);
  suffix.store(0, 0, 0.0f, 1.0f);
  AttendArgs partial;
  partial.partial = true;
  prefix.attend(partial);
  suffix.attend(partial);
  CHECK(prefix.lse[0].value == Approx(2.0794415f));
  MergeArgs merge{1,
                  1,
                  64,
                  {prefix.out.data(), 64, 64},
                  {prefix.lse.data(), 1, 1},
                  {suffix.out.data(), 64, 64},
                  {suffix.lse.data(), 1, 1}};
  REQUIRE(cpu::merge(merge, cpu::serial));
  prefix.check(0, 1.0f / 9.0f);
  CHECK(prefix.lse[0].value == Approx(std::log(9.0f)));
}

TEST_CASE("merging two results without keys gives 0 and -infinity") {
  std::vector<float> a(64, 0.0f), b(64, 0.0f);
  NaturalLse x{-INFINITY}, y{-INFINITY};
  REQUIRE(
      cpu::merge({1, 1, 64, {a.data(), 64, 64}, {&x, 1, 1}, {b.data(), 64, 64}, {&y, 1, 1}}, cpu::serial));
  for (const float v : a) CHECK(v == 0.0f);
  CHECK(x.value == -INFINITY);
}

TEST_CASE("partial results keep float's precision") {
  const float step = 0x1p-7f;
  Hand<64> left(2, 1), right(2, 1);
  left.row(1, {0}, 2);
  right.row(1, {0}, 2);
  left.store(0, 0, 0.0f, 1.0f);
  left.store(0, 1, 0.0f, 1.0f + step);
  right.store(0, 0, 0.0f, 1.0f + step);
  right.store(0, 1, 0.0f, 1.0f + step);
  AttendArgs partial;
  partial.partial = true;
  left.attend(partial);
  right.attend(partial);
  REQUIRE(cpu::merge({1,
                      1,
                      64,
                      {left.out.data(), 64, 64},
                      {left.lse.data(), 1, 1},
                      {right.out.data(), 64, 64},
                      {right.lse.data(), 1, 1}},
                     cpu::serial));
  std::vector<bf16> out(64);
  REQUIRE(cpu::finish({1, 1, 64, {left.out.data(), 64, 64}, {left.lse.data(), 1, 1}, {out.data(), 64, 64}},
                      cpu::serial));
  for (const bf16 x : out) CHECK(static_cast<float>(x) == 1.0078125f);
}

TEST_CASE("any partition of the keys finishes to the same result, the sink logit counted once") {
  using Layout = Gqa<64, 16>;
  PagedCache<Layout, Identity<float>> cache({.shape = {1, 1, dynamic}, .pages = 16});
  Random random(4);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 200));
  run_step(cache, std::move(step), random);
  Step next = cache.begin_step();
  REQUIRE(next.extend(id, 3));
  const Batch batch = run_step(cache, std::move(next), random);
  const auto view = cache.view(LayerId{0});
  const float sinks[] = {0.5f, -1.0f, 3.0f};
  Attention a = Attention::make<Layout>(random, 3, 3);
  a.args.sink_logits = sinks;
  check_attend(view, batch, a, 3);

  const BatchView whole = batch;
  const std::vector<float> queries = a.queries;
  std::vector<float> merged(a.out.size());
  std::vector<NaturalLse> lse(a.lse.size());
  for (int begin = 0, part = 0; begin < 13; begin += 5, ++part) {
    const int end = std::min(begin + 5, 13);
    const std::int32_t indptr[] = {begin, end}, length[] = {end == 13 ? 203 - begin * 16 : 80};
    BatchView some = whole;
    some.table.indptr = indptr;
    some.lengths = length;
    Attention p = Attention::make<Layout>(random, 3, 3);
    p.queries = queries;
    p.args.queries = {p.queries.data(), 3 * 64, 64};
    p.args.sink_logits = sinks;
    p.args.partial = true;
    check_attend(view, some, p, 3);
    if (part == 0) {
      merged = p.out;
      lse = p.lse;
    } else {
      REQUIRE(cpu::merge({3,
                          3,
                          64,
                          {merged.data(), 192, 64},
                          {lse.data(), 3, 1},
                          {p.out.data(), 192, 64},
                          {p.lse.data(), 3, 1}},
                         cpu::serial));
    }
  }
  REQUIRE(cpu::finish({3,
                       3,
                       64,
                       {merged.data(), 192, 64},
                       {lse.data(), 3, 1},
                       {merged.data(), 192, 64},
                       {lse.data(), 3, 1},
                       sinks},
                      cpu::serial));
  ref::Attention expected{{a.out.begin(), a.out.end()}, {}};
  for (const NaturalLse& l : a.lse) expected.lse.push_back(l.value);
  check_close(compare(merged, lse, expected));
}

TEST_CASE("a sink logit of -infinity is no sink, directly and through finish") {
  Hand<64> hand(4, 1);
  hand.row(1, {}, 0);
  hand.row(1, {0}, 1);
  hand.store(0, 0, 0.0f, 3.0f);
  const float sink = -INFINITY;
  AttendArgs args;
  args.sink_logits = &sink;
  hand.attend(args);
  hand.check(0, 0.0f);
  hand.check(1, 3.0f);
  CHECK(hand.lse[0].value == -INFINITY);
  args.partial = true;
  hand.attend(args);
  REQUIRE(cpu::finish({2,
                       1,
                       64,
                       {hand.out.data(), 64, 64},
                       {hand.lse.data(), 1, 1},
                       {hand.out.data(), 64, 64},
                       {hand.lse.data(), 1, 1},
                       &sink},
                      cpu::serial));
  hand.check(0, 0.0f);
  hand.check(1, 3.0f);
  CHECK(hand.lse[0].value == -INFINITY);
  CHECK(hand.lse[1].value == 0.0f);
}

TEST_CASE("a score that overflows to -infinity weighs nothing, first or last") {
  for (const bool first : {true, false}) {
    Hand<64> hand(2, 1);
    hand.row(1, {0}, 2);
    hand.store(0, first ? 0 : 1, -3e38f, 1.0f);
    hand.store(0, first ? 1 : 0, 0.0f, 2.0f);
    hand.queries.assign(64, 0.0f);
    hand.queries[0] = 3e38f;
    hand.attend();
    hand.check(0, 2.0f);
  }
}

TEST_CASE("merging does not swallow NaN") {
  for (const bool left : {true, false}) {
    NaturalLse a{left ? NAN : -INFINITY};
    const NaturalLse b{left ? -INFINITY : NAN};
    const auto weights = merge_lse(a, b);
    CHECK(std::isnan(a.value));
    CHECK((std::isnan(weights.old_part) || std::isnan(weights.new_part)));
  }
}
