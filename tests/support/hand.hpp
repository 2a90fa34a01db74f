// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Pages and tables filled in by hand, small enough for results to be worked out.

#include <cmath>
#include <vector>

#include "support/scenario.hpp"

namespace kvfolia_tests {

/// Pages of one KV head in plain memory, NaN wherever nothing was stored, and tables by hand.
template <int Dim, class T = float>
struct Hand {
  using Layout = Gqa<Dim, dynamic>;
  std::vector<T> keys, values;
  PagedView<Layout, Identity<T>> view{};
  std::vector<std::int32_t> query_indptr{0}, entries, indptr{0}, lengths;
  std::vector<float> queries, out;
  std::vector<NaturalLse> lse;
  int heads = 1;

  Hand(int page_tokens, int pages)
      : keys(static_cast<std::size_t>(page_tokens * pages * Dim), static_cast<T>(NAN)), values(keys) {
    const std::int64_t row = Dim * sizeof(T), page = row * page_tokens;
    view.kv_heads = 1;
    view.page_tokens = page_tokens;
    view.formats[0].keys = {reinterpret_cast<std::byte*>(keys.data()), page, 0, row};
    view.formats[0].values = {reinterpret_cast<std::byte*>(values.data()), page, 0, row};
    view.formats[0].pages = pages;
  }

  /// A row of `n` queries whose table is `pages`, `length` slots in use.
  void row(int n, const std::vector<int>& pages, int length) {
    query_indptr.push_back(query_indptr.back() + n);
    entries.insert(entries.end(), pages.begin(), pages.end());
    indptr.push_back(static_cast<std::int32_t>(entries.size()));
    lengths.push_back(length);
  }
  void store(int page, int slot, float key, float value) {
    const auto at = static_cast<std::size_t>((page * view.page_tokens + slot) * Dim);
    for (std::size_t d = 0; d < Dim; ++d)
      keys[at + d] = static_cast<T>(d == 0 ? key : 0.0f), values[at + d] = static_cast<T>(value);
  }
  BatchView batch() const {
    BatchView b;
    b.rows = static_cast<std::int32_t>(lengths.size());
    b.query_indptr = query_indptr.data();
    b.table = {entries.data(), indptr.data()};
    b.lengths = lengths.data();
    return b;
  }
  /// Queries default to zero: every key weighs the same.
  AttendArgs prepare(AttendArgs args = {}) {
    const auto rows = static_cast<std::size_t>(query_indptr.back() * heads);
    queries.resize(rows * Dim, 0.0f);
    out.assign(rows * Dim, NAN);
    lse.assign(rows, NaturalLse{NAN});
    args.queries = {queries.data(), heads * Dim, Dim};
    args.out = {out.data(), heads * Dim, Dim};
    args.lse = {lse.data(), heads, 1};
    args.scale = 1.0f;
    return args;
  }
  void attend(AttendArgs args = {}, int concurrency = 1) {
    args = prepare(args);
    const auto plan = cpu::plan_attend(view, batch(), {heads, concurrency});
    REQUIRE(plan);
    std::vector<std::byte> workspace(plan->workspace_bytes());
    REQUIRE(cpu::attend(view, batch(), args, *plan, workspace, cpu::serial));
  }
  void check(std::size_t row, float value, double margin = 1e-6) const {
    for (std::size_t d = 0; d < Dim; ++d) CHECK(out[row * Dim + d] == Approx(value).margin(margin));
  }
};

}  // namespace kvfolia_tests
