// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <string>
#include <type_traits>

#include "kvfolia/core/error.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/core/softmax_state.hpp"
#include "support/catch.hpp"

using namespace kvfolia;

static_assert(!std::is_convertible_v<LogicalPos, PageId> && !std::is_convertible_v<int, LogicalPos>);
static_assert(!std::is_constructible_v<PhysSlot, LogicalPos>, "a position is not a slot");
static_assert(!std::is_same_v<decltype(SoftmaxState{}.lse()), float>, "the base is part of the type");

TEST_CASE("a result holds a value or the numbers that explain its error") {
  const Result<int> value = 7;
  CHECK(value);
  CHECK(*value == 7);
  const Result<int> error = Error{Errc::out_of_pages, "coded pages", 5, 3};
  CHECK(!error);
  CHECK(error.error().missing() == 2);
  CHECK(error.error().message() == "out of pages: coded pages (needed 5, available 3)");
  const Result<> nothing;
  CHECK(nothing);
}

TEST_CASE("a plain page number is a page of format 0") {
  CHECK(TableEntry{12345}.format() == 0);
  CHECK(TableEntry{12345}.page() == PageId{12345});
  const TableEntry last = TableEntry::make(2, PageId{TableEntry::max_pages - 1});
  CHECK(!last.absent());
  CHECK(last.format() == 2);
  CHECK(last.page() == PageId{TableEntry::max_pages - 1});
  CHECK(TableEntry{-1}.absent());
}

TEST_CASE("a slot past 2^31 keeps its page and offset") {
  const TableEntry entry = TableEntry::make(1, PageId{400'000'000});
  const PhysSlot slot = PhysSlot::make(entry, 511, 512);
  CHECK(slot.raw > (std::int64_t{1} << 38));
  CHECK(slot.entry(512) == entry);
  CHECK(slot.slot(512) == 511);
}

TEST_CASE("merging two empty softmax states gives an empty one") {
  SoftmaxState a;
  a.merge({});
  CHECK(a.empty());
  CHECK(a.normalizer() == 0.0f);
  CHECK(std::isinf(a.lse().value));
  NaturalLse x{-INFINITY};
  const auto weights = merge_lse(x, {-INFINITY});
  CHECK(weights.old_part == 0.0f);
  CHECK(weights.new_part == 0.0f);
  CHECK(x.value == -INFINITY);
}

TEST_CASE("a state merged with an empty one keeps every bit") {
  SoftmaxState a;
  for (const float score : {0.25f, 3.5f, -1.0f}) a.add(score);
  SoftmaxState b = a;
  const auto right = b.merge({});
  CHECK((b.max == a.max && b.sum == a.sum && right.old_part == 1.0f && right.new_part == 0.0f));
  SoftmaxState c;
  const auto left = c.merge(a);
  CHECK((c.max == a.max && c.sum == a.sum && left.old_part == 0.0f && left.new_part == 1.0f));
}

TEST_CASE("NaN scores reach the log-sum-exp") {
  SoftmaxState first, second;
  first.add(NAN);
  CHECK(std::isnan(first.lse().value));
  second.add(1.0f);
  second.add(NAN);
  CHECK(std::isnan(second.lse().value));
}
