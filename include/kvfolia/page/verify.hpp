// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Holds a pool against what its holders say they hold.

#include <cstdint>
#include <string>
#include <vector>

#include "kvfolia/core/config.hpp"
#include "kvfolia/core/ids.hpp"
#include "kvfolia/page/page_pool.hpp"

namespace kvfolia::inline KVF_ABI {

/// Somebody who has references to pages of one pool, by a name that a report can use. A holder of
/// retired pages lists pages that are waiting to become free: it has no references.
struct PageHolder {
  std::string name{};
  std::vector<PageId> pages{};  ///< a page held twice is listed twice
  bool retired = false;
};

/// Every violation in one readable line; empty when all is well. Any engine may call it with holders
/// of its own. Checks that each page is in exactly one state, that references add up over the
/// holders, and that free and retired pages are where they belong. O(pages + references).
inline std::vector<std::string> verify_pool(const PagePool& pool, const std::vector<PageHolder>& holders) {
  std::vector<std::string> violations;
  const auto count = static_cast<std::size_t>(pool.pages());
  std::vector<std::int32_t> references(count, 0);
  std::vector<std::int32_t> waiting(count, 0);
  std::vector<std::int32_t> listed_free(count, 0);
  std::vector<std::string> names(count);

  const auto known = [&](std::int32_t page, const std::string& where) {
    if (0 <= page && page < pool.pages()) return true;
    violations.push_back(where + " has page " + std::to_string(page) + ", the pool has " +
                         std::to_string(pool.pages()));
    return false;
  };
  for (const std::int32_t page : pool.free_list())
    if (known(page, "the free list")) ++listed_free[static_cast<std::size_t>(page)];
  for (const PageHolder& holder : holders) {
    for (const PageId page : holder.pages) {
      if (!known(page.value, holder.name)) continue;
      const auto i = static_cast<std::size_t>(page.value);
      ++(holder.retired ? waiting : references)[i];
      names[i] += (names[i].empty() ? "" : ", ") + holder.name;
    }
  }

  for (std::size_t i = 0; i < count; ++i) {
    const PageId page{static_cast<std::int32_t>(i)};
    const PageState state = pool.state(page);
    const bool free = state == PageState::free;
    const bool held = state == PageState::held;
    const bool retired = state == PageState::retired;
    const std::string subject =
        "page " + std::to_string(i) + " (holders: " + (names[i].empty() ? "none" : names[i]) + ") ";
    const auto report = [&](bool wrong, const std::string& what) {
      if (wrong) violations.push_back(subject + what);
    };
    report(listed_free[i] != (free ? 1 : 0),
           "is " + std::to_string(listed_free[i]) + " times on the free list");
    report(pool.references(page) != references[i], "counts " + std::to_string(pool.references(page)) +
                                                       " references, holders have " +
                                                       std::to_string(references[i]));
    report(held && references[i] == 0, "is held by nobody");
    report(!held && references[i] > 0, "is referenced but not held");
    report(waiting[i] != (retired ? 1 : 0), "waits " + std::to_string(waiting[i]) + " times to be freed");
  }
  return violations;
}

}  // namespace kvfolia::inline KVF_ABI
