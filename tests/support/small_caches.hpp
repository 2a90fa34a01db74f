// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Caches of four-token pages, for tests of bookkeeping.

#include <vector>

#include "support/scenario.hpp"

namespace kvfolia_tests {

using SmallLayout = Gqa<8, 4>;
using Cache = PagedCache<SmallLayout, Identity<float>>;
using Windowed = PagedCache<SmallLayout, Identity<float>, SinkWindow>;

inline CacheConfig config(std::int64_t pages) { return {.shape = {1, 1, dynamic}, .pages = pages}; }

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

}  // namespace kvfolia_tests
