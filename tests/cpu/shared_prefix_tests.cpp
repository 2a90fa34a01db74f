// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Rows whose tables begin alike read the pages that they share once, with the same results to the bit.

#include <algorithm>

#include "support/scenario.hpp"

using namespace kvfolia_tests;

namespace {

constexpr int kv_heads = 2, heads = 6;

/// A tree of sequences: a common beginning, some with more in common, all with an end of their own; and
/// one that shares nothing.
template <class Layout, class Quant, class Evict = KeepAll>
struct Tree {
  PagedCache<Layout, Quant, Evict> cache;
  Random random{5};
  std::vector<SeqId> sequences;
  Batch batch;

  explicit Tree(Evict evict = {})
      : cache(CacheConfig{.shape = {1, kv_heads, 16}, .pages = 1000}, {}, evict), batch(grow()) {}

  Batch grow() {
    poison(cache);
    step([&](Step& s) { extend(s, sequences.emplace_back(*s.create()), 600); });
    for (int i = 0; i < 5; ++i) {
      const SeqId parent = sequences[static_cast<std::size_t>(i) / 2];
      step([&](Step& s) { sequences.push_back(*s.fork(parent)); });
      step([&](Step& s) { extend(s, sequences.back(), 300 + 100 * i); });
      step([&](Step& s) { extend(s, sequences.front(), 90); });
    }
    return step([&](Step& s) {
      for (const SeqId id : sequences) extend(s, id, 1);
      extend(s, *s.create(), 9);
    });
  }
  static void extend(Step& s, SeqId id, int tokens) { REQUIRE(s.extend(id, tokens)); }
  template <class F>
  Batch step(F&& f) {
    Step s = cache.begin_step();
    f(s);
    return run_step(cache, std::move(s), random);
  }
};

template <class Layout, class Quant>
std::vector<float> attend(const PagedView<Layout, Quant>& view, const BatchView& batch, Attention& a,
                          int concurrency) {
  const auto plan = cpu::plan_attend(view, batch, {heads, concurrency});
  REQUIRE(plan);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  std::fill(a.out.begin(), a.out.end(), NAN);
  REQUIRE(cpu::attend(view, batch, a.args, *plan, workspace, Backwards{}));
  return a.out;
}

template <class Layout, class Quant, class Evict = KeepAll>
void check_tree(Evict evict = {}) {
  Tree<Layout, Quant, Evict> tree(evict);
  const auto view = tree.cache.view(LayerId{0});
  const BatchView batch = tree.batch;
  Attention a = Attention::make<Layout>(tree.random, tree.batch.tokens(), heads);
  check_attend(view, batch, a, heads);
  const std::vector<float> together = attend(view, batch, a, 1);
  CHECK(attend(view, batch, a, 3) == together);
  for (int row = 0; row < static_cast<int>(tree.sequences.size()); ++row) {
    const RowTable table = row_table(batch, row, 0, view.page_tokens);
    const std::int32_t indptr[] = {0, table.count}, length = table.length,
                       position = batch.first_query(row, view.page_tokens).value;
    BatchView alone;
    alone.rows = 1;
    alone.table = {.entries = table.entries, .indptr = indptr};
    alone.lengths = &length;
    alone.query_pos = &position;
    alone.entry_pos = table.pos;
    Attention one = Attention::make<Layout>(tree.random, 1, heads);
    std::copy_n(a.queries.begin() + row * heads * Layout::key_dim, heads * Layout::key_dim,
                one.queries.begin());
    const std::vector<float> out = attend(view, alone, one, 1);
    CHECK(std::equal(out.begin(), out.end(), together.begin() + row * heads * Layout::value_dim));
  }
}

}  // namespace

TEST_CASE("rows with common pages agree with ref, and bit for bit with themselves alone") {
  check_tree<Gqa<64, 16, DimMajor<4>>, Int8>();
  check_tree<Gqa<64, 16>, Identity<fp16>>(SinkWindow{4, 500});
}

TEST_CASE("what rows have in common is planned once, at every branch") {
  Tree<Gqa<64, 16>, Identity<fp16>> tree;
  const auto plan = cpu::plan_attend(tree.cache.view(LayerId{0}), tree.batch, {heads, 1});
  REQUIRE(plan);
  // 600 tokens of the root are 2 whole tiles for all six. Its first child left it there. Its second child,
  // which left it 90 tokens later, and the last row, a child of that, go on with it; so do others.
  std::int64_t tiles = 0, read = 0, of_all = 0;
  for (const cpu::AttendPlan::Task& task : plan->tasks) {
    if (task.head != 0) continue;
    read += task.tile_end - task.tile_begin;
    if (task.sharer_count == 6) of_all += task.tile_end - task.tile_begin;
  }
  for (const cpu::AttendPlan::Row& row : plan->rows) tiles += row.tiles;
  CHECK(of_all == 2);
  CHECK(read < tiles - 5 * of_all);
}

TEST_CASE("a plan for rows with common pages is refused once they have them no more") {
  Tree<Gqa<64, 16>, Identity<fp16>> tree;
  const auto view = tree.cache.view(LayerId{0});
  BatchView batch = tree.batch;
  Attention a = Attention::make<Gqa<64, 16>>(tree.random, tree.batch.tokens(), heads);
  const auto plan = cpu::plan_attend(view, batch, {heads, 1});
  REQUIRE(plan);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  std::vector<std::int32_t> entries(batch.table.entries,
                                    batch.table.entries + batch.table.indptr[batch.rows]);
  entries[static_cast<std::size_t>(batch.table.indptr[1])] = 999;
  batch.table.entries = entries.data();
  CHECK(cpu::attend(view, batch, a.args, *plan, workspace, cpu::serial).error().code ==
        Errc::invalid_argument);
}
