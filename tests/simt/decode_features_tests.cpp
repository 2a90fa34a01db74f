// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What the general kernel does beside: masks, positions, scores that are bent, and results that are merged.

#include "simt/decode_check.hpp"
#include "support/hand.hpp"

using namespace kvfolia_tests;

namespace {

using Layout = Gqa<64, 16>;
using Cache = PagedCache<Layout, Int8>;

struct Small : simt::TwoRows<Layout> {
  void check(const PagedView<Layout, Int8>& v, const BatchView& b) { simt::check_attend(v, b, a, heads); }
  void check(const PagedView<Layout, Int8>& v) { check(v, batch); }
  void check_batch(const BatchView& b) { check(view(), b); }
  void check() { check(view()); }
};

}  // namespace

TEST_CASE_METHOD(Small, "several queries of a row see what is in front of them") { check(); }

TEST_CASE_METHOD(Small, "without a causal mask queries see all") {
  a.args.causal = false;
  check();
}
TEST_CASE_METHOD(Small, "an own scale agrees with ref") {
  a.args.scale = 0.3f;
  check();
}
TEST_CASE_METHOD(Small, "soft-cap agrees with ref") {
  a.args.soft_cap = 1.5f;
  check();
}
TEST_CASE_METHOD(Small, "ALiBi slopes agree with ref") {
  const float slopes[heads] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.0f, 1.0f};
  a.args.alibi_slopes = slopes;
  check();
}
TEST_CASE_METHOD(Small, "sink logits join the denominator only") {
  const float sinks[heads] = {-2.0f, 0.0f, 1.0f, 4.0f, 30.0f, -100.0f};
  a.args.sink_logits = sinks;
  check();
  a.args.partial = true;
  check();
}
TEST_CASE_METHOD(Small, "windows agree with ref") {
  for (const Window window : {Window{0, 0}, Window{3, 0}, Window{20, 4}, Window{300, 17}}) {
    auto v = view();
    v.window = window;
    check(v);
  }
}
TEST_CASE_METHOD(Small, "a window that spans all changes no bit") {
  check();
  const std::vector<float> plain = a.out;
  auto v = view();
  v.window = {1 << 20, 0};
  check(v);
  CHECK(a.out == plain);
}
TEST_CASE_METHOD(Small, "absent pages are skipped") {
  const BatchView all = batch;
  std::vector<std::int32_t> entries(all.table.entries, all.table.entries + all.table.indptr[2]);
  for (const std::size_t i : {1u, 5u, 6u, 7u, 8u, 9u, 20u}) entries[i] = -1;
  BatchView some = all;
  some.table.entries = entries.data();
  check_batch(some);
}
TEST_CASE_METHOD(Small, "tables of a KV head each agree with ref") {
  const BatchView all = batch;
  const auto count = static_cast<std::size_t>(all.table.indptr[2]);
  // The second head has lost some pages.
  std::vector<std::int32_t> entries(all.table.entries, all.table.entries + count), positions;
  entries.insert(entries.end(), entries.begin(), entries.end());
  for (const std::size_t i : {0u, 4u, 5u, 6u, 7u, 8u}) entries[count + i] = -1;
  positions.assign(all.entry_pos, all.entry_pos + count);
  positions.insert(positions.end(), positions.begin(), positions.end());
  BatchView some = all;
  some.table.entries = entries.data();
  some.table.head_stride = static_cast<std::int64_t>(count);
  some.entry_pos = positions.data();
  check_batch(some);
}
TEST_CASE_METHOD(Small,
                 "pages with fewer slots in use, and slots with positions of their own, agree with ref") {
  const BatchView all = batch;
  const auto count = static_cast<std::size_t>(all.table.indptr[2]);
  // What is left of pages that were compacted: every page's first slots, at every other position.
  std::vector<std::int32_t> used(count), slots(count * 16);
  std::vector<std::int32_t> lengths(2), positions = {80, 2000};
  for (int row = 0; row < 2; ++row) {
    std::int32_t next = 0;
    for (std::int32_t i = all.table.indptr[row]; i < all.table.indptr[row + 1]; ++i) {
      const auto entry = static_cast<std::size_t>(i);
      used[entry] = 1 + i % 9;  // no page has fewer
      lengths[static_cast<std::size_t>(row)] += used[entry];
      for (std::size_t slot = 0; slot < 16; ++slot) slots[entry * 16 + slot] = next += 1 + i % 2;
    }
  }
  BatchView some = all;
  some.entry_tokens = used.data();
  some.slot_pos = slots.data();
  some.lengths = lengths.data();
  some.query_pos = positions.data();
  check_batch(some);
  some.slot_pos = nullptr;
  check_batch(some);
}
TEST_CASE_METHOD(Small, "a custom mask agrees with ref") {
  std::vector<std::uint8_t> bits(std::size_t{1} << 20);
  for (auto& byte : bits) byte = static_cast<std::uint8_t>(random.next());
  const std::int64_t offsets[] = {3, 1000};
  a.args.mask = {bits.data(), offsets};
  check();
}
TEST_CASE_METHOD(Small, "results are rounded to what the engine wants") {
  std::vector<fp16> half(a.out.size());
  const Tensor floats = a.args.out;
  check();
  a.args.out = {half.data(), floats.token_stride, floats.head_stride};
  const auto plan = cuda::plan_attend(view(), simt::config_of(batch, 16, heads));
  REQUIRE(plan);
  simt::attend(view(), BatchView(batch), a.args, *plan, 2);
  for (std::size_t i = 0; i < half.size(); ++i) REQUIRE(half[i].bits == fp16(a.out[i]).bits);
}

TEST_CASE_METHOD(Small, "a plan serves smaller batches, and says what is beyond it") {
  auto config = simt::config_of(batch, 16, heads);
  config.rows += 3;
  config.row_slots += 5000;
  config.queries += 10;
  const auto plan = cuda::plan_attend(view(), config);
  REQUIRE(plan);
  const auto expected = ref::attend(view(), BatchView(batch), a.args, heads);
  simt::attend(view(), BatchView(batch), a.args, *plan, 3);
  check_close(compare(a.out, a.lse, *expected), fp16_tolerance);
  config.rows = 1;
  const auto small = cuda::plan_attend(view(), config);
  REQUIRE(small);
  const auto refused = cuda::detail::check_attend(view(), batch, a.args, *small, small->workspace_bytes());
  REQUIRE_FALSE(refused);
  CHECK(refused.error().subject == std::string("batch.rows"));
  a.args.out.token_stride = 0;
  const auto strides = cuda::detail::check_attend(view(), batch, a.args, *plan, plan->workspace_bytes());
  REQUIRE_FALSE(strides);
  CHECK(strides.error().subject == std::string("args.out (strides)"));
}

TEST_CASE_METHOD(Small, "a row's bits do not depend on its company") {
  // Five queries take blocks of sixteen columns, one query of three heads a block of eight.
  const auto plan = cuda::plan_attend(view(), simt::config_of(batch, 16, heads));
  REQUIRE(plan);
  simt::attend(view(), BatchView(batch), a.args, *plan, 1);
  const std::vector<float> together = a.out;
  BatchView one = batch;
  const std::int32_t queries[] = {0, 1};
  one.rows = 1;
  one.query_indptr = queries;
  one.table.indptr += 1;
  one.lengths += 1;
  if (one.query_pos) one.query_pos += 1;
  const auto alone = cuda::plan_attend(view(), simt::config_of(one, 16, heads));
  REQUIRE(alone);
  AttendArgs args = a.args;
  constexpr std::size_t begin = 5 * heads * 64;
  args.queries.data = a.queries.data() + begin;
  args.lse = {};
  std::fill(a.out.begin(), a.out.end(), NAN);
  simt::attend(view(), one, args, *alone, 2);
  for (std::size_t i = 0; i < heads * 64; ++i) REQUIRE(a.out[i] == together[begin + i]);
}

TEST_CASE_METHOD(Small, "a launch that is repeated follows lengths and rows that changed in between") {
  // As a captured graph is replayed: grid and arguments stay, what arrays hold does not. The last row is
  // none.
  const BatchView first = batch;
  std::vector<std::int32_t> queries(first.query_indptr, first.query_indptr + 3);
  std::vector<std::int32_t> entries(first.table.indptr, first.table.indptr + 3);
  std::vector<std::int32_t> lengths(first.lengths, first.lengths + 2);
  queries.push_back(queries.back());
  entries.push_back(entries.back());
  lengths.push_back(0);
  BatchView captured = first;
  captured.rows = 3;
  captured.query_indptr = queries.data();
  captured.table.indptr = entries.data();
  captured.lengths = lengths.data();
  captured.query_pos = nullptr;
  captured.entry_pos = nullptr;
  auto config = simt::config_of(captured, 16, heads);
  config.row_slots += 1000;
  const auto plan = cuda::plan_attend(view(), config);
  REQUIRE(plan);
  const auto replay = [&] {
    const auto expected = ref::attend(view(), captured, a.args, heads);
    REQUIRE(expected);
    std::fill(a.out.begin(), a.out.end(), NAN);
    simt::attend(view(), captured, a.args, *plan, 1);
    check_close(compare(a.out, a.lse, *expected), fp16_tolerance);
  };
  replay();
  // A sequence that is five pages shorter, the other one gone.
  entries[2] -= 5;
  entries[3] = entries[2];
  lengths[1] -= 80;
  replay();
  queries = {0, 5, 5, 5};
  a.args.out.data = a.out.data();
  std::fill(a.out.begin(), a.out.end(), NAN);
  simt::attend(view(), captured, a.args, *plan, 1);
  CHECK(std::isfinite(a.out[5 * heads * 64 - 1]));
  CHECK(std::isnan(a.out[5 * heads * 64]));
}

TEST_CASE("rows without keys get 0 and minus infinity") {
  Cache cache(CacheConfig{.shape = {1, 1, dynamic}, .pages = 8});
  Random random(1);
  poison(cache);
  Step step = cache.begin_step();
  const SeqId sequence = *step.create();
  REQUIRE(step.extend(sequence, 1));
  const Batch batch = run_step(cache, std::move(step), random);
  BatchView two{};
  const std::int32_t lengths[] = {0, 1}, indptr[] = {0, 0, 1}, queries[] = {0, 1, 2};
  two.rows = 2;
  two.lengths = lengths;
  two.table.indptr = indptr;
  two.query_indptr = queries;
  two.table.entries = BatchView(batch).table.entries;
  kvfolia_tests::Attention a = kvfolia_tests::Attention::make<Layout>(random, 2, 1);
  simt::check_attend(cache.view(LayerId{0}), two, a, 1);
  CHECK(a.out[0] == 0.0f);
  CHECK(a.lse[0].value == -INFINITY);
}
