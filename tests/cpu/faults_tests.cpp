// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Faults that attention kernels and caches have shipped with, each with the right value. One KV head,
// head dim 64, scale 1 and zero keys unless stated.

#include <sys/mman.h>

#include <cmath>
#include <vector>

#include "support/hand.hpp"

using namespace kvfolia_tests;

TEST_CASE("a page beyond 2^32 bytes is read where it lies") {
  PlaneView plane{nullptr, 16384, 0, 0};
  CHECK(reinterpret_cast<std::uintptr_t>(plane.tile(PageId{262144}, 0)) == 4294967296u);
  CHECK(reinterpret_cast<std::uintptr_t>(plane.tile(PageId{131072}, 0)) == 2147483648u);

  // Address space only: the two pages that are touched take memory.
  const std::size_t bytes = std::size_t{262145} * 16384;
  void* memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  PagedView<Gqa<64, 32>, Identity<float>> view{};
  auto* base = static_cast<std::byte*>(memory);
  view.formats[0] = {{base, 16384, 0, 256}, {base + 8192, 16384, 0, 256}, {}, {}, 262145};
  for (const std::int32_t page : {131072, 262144}) {
    Random random(1);
    const auto tokens = random_tokens<Gqa<64>>(random, 1, 1);
    const std::int32_t indptr[] = {0, 1}, length[] = {1};
    const std::int64_t slot[] = {std::int64_t{page} * 32};
    BatchView batch;
    batch.rows = 1;
    batch.table = {&page, indptr};
    batch.lengths = length;
    batch.slots = slot;
    REQUIRE(cpu::append(view, batch, tokens.args(1), cpu::serial));
    CHECK(reinterpret_cast<const float*>(base + std::int64_t{page} * 16384)[0] == tokens.keys[0]);
    Attention a = Attention::make<Gqa<64>>(random, 1, 1);
    check_attend(view, batch, a, 1);
    for (std::size_t d = 0; d < 64; ++d) CHECK(a.out[d] == tokens.values[d]);
  }
  CHECK(reinterpret_cast<const float*>(base)[0] == 0.0f);
  ::munmap(memory, bytes);
}

TEST_CASE("slots that nobody filled reach no result") {
  Hand<64> hand(4, 1);
  hand.row(1, {0}, 1);
  hand.store(0, 0, 0.0f, 2.5f);
  hand.attend();
  hand.check(0, 2.5f);
  CHECK(hand.lse[0].value == 0.0f);
}

TEST_CASE("lengths 0 and 1 in one batch") {
  Hand<64> hand(4, 1);
  hand.row(1, {}, 0);
  hand.row(1, {0}, 1);
  hand.store(0, 0, 0.0f, 3.0f);
  const BatchView batch = hand.batch();
  std::vector<float> queries(128, 1.0f), out(128, NAN);
  std::vector<NaturalLse> lse(2, NaturalLse{NAN});
  AttendArgs args;
  args.queries = {queries.data(), 64, 64};
  args.out = {out.data(), 64, 64};
  args.lse = {lse.data(), 1, 1};
  const float sink = 1.25f;
  for (const bool with_sink : {false, true}) {
    args.sink_logits = with_sink ? &sink : nullptr;
    const auto plan = cpu::plan_attend(hand.view, batch, {1, 1});
    std::vector<std::byte> workspace(plan->workspace_bytes());
    REQUIRE(cpu::attend(hand.view, batch, args, *plan, workspace, cpu::serial));
    for (int d = 0; d < 64; ++d) CHECK(out[static_cast<std::size_t>(d)] == 0.0f);
    if (with_sink)
      CHECK(lse[0].value == sink);
    else
      CHECK((std::isinf(lse[0].value) && lse[0].value < 0));
  }
  CHECK(out[64] == Approx(3.0f / (1.0f + std::exp(1.25f))));
}

TEST_CASE("query heads of any group size get their own weights") {
  for (const int group : {3, 5, 6, 7, 12, 16}) {
    CAPTURE(group);
    Hand<64> hand(2, 1);
    hand.heads = group;
    hand.row(1, {0}, 2);
    hand.store(0, 0, 1.0f, 1.0f);
    hand.store(0, 1, 0.0f, 0.0f);
    hand.queries.assign(static_cast<std::size_t>(group * 64), 0.0f);
    for (int i = 0; i < group; ++i) hand.queries[static_cast<std::size_t>(i * 64)] = static_cast<float>(i);
    hand.attend();
    for (int i = 0; i < group; ++i)
      hand.check(static_cast<std::size_t>(i), 1.0f / (1.0f + std::exp(static_cast<float>(-i))));
  }
}

TEST_CASE("query head 24 of 48 over 2 KV heads reads KV head 1") {
  PagedCache<Gqa<64, 4>, Identity<float>> cache({.shape = {1, 2, dynamic}, .pages = 1});
  Random random(1);
  Step step = cache.begin_step();
  REQUIRE(step.extend(*step.create(), 1));
  const Batch batch = run_step(cache, std::move(step), random);
  Attention a = Attention::make<Gqa<64>>(random, 1, 48);
  check_attend(cache.view(LayerId{0}), batch, a, 48);
  const auto value = [&](int head, int d) {
    return cache.view(LayerId{0}).value_tile(TableEntry{0}, head).code<float>(0, d);
  };
  for (int d = 0; d < 64; ++d) {
    CHECK(a.out[static_cast<std::size_t>(23 * 64 + d)] == value(0, d));
    CHECK(a.out[static_cast<std::size_t>(24 * 64 + d)] == value(1, d));
  }
}

TEMPLATE_TEST_CASE_SIG("unusual head dims are exact and every element is written", "", ((int Dim), Dim), 40,
                       72, 80, 96, 112, 192, 256, 576) {
  Hand<Dim> hand(4, 2);
  hand.row(2, {0, 1}, 5);
  for (int i = 0; i < 5; ++i) hand.store(i / 4, i % 4, static_cast<float>(i), static_cast<float>(i));
  hand.attend();
  hand.check(0, 1.5f);  // positions 0..3
  hand.check(1, 2.0f);
}

TEST_CASE("an append with slots 5 and -1 changes slot 5 alone") {
  Hand<64> hand(4, 2);
  hand.row(2, {0, 1}, 6);
  Random random(1);
  const auto tokens = random_tokens<Gqa<64>>(random, 2, 1);
  const std::int64_t slots[] = {5, -1};
  BatchView batch = hand.batch();
  batch.slots = slots;
  REQUIRE(cpu::append(hand.view, batch, tokens.args(1), cpu::serial));
  for (std::size_t i = 0; i < hand.keys.size(); ++i) {
    const bool written = i / 64 == 5;
    CHECK(std::isnan(hand.keys[i]) == !written);
    CHECK(std::isnan(hand.values[i]) == !written);
  }
  CHECK(hand.keys[5 * 64] == tokens.keys[0]);
}

TEST_CASE("an append to a page that does not exist writes nothing") {
  Hand<64> hand(4, 2);
  hand.row(2, {0}, 2);
  Random random(1);
  const auto tokens = random_tokens<Gqa<64>>(random, 2, 1);
  BatchView batch = hand.batch();
  for (const std::int64_t bad :
       {std::int64_t{8}, std::int64_t{1} << 31, (std::int64_t{1} << 29) * 4, std::int64_t{1} << 60}) {
    const std::int64_t slots[] = {0, bad};
    batch.slots = slots;
    CHECK(cpu::append(hand.view, batch, tokens.args(1), cpu::serial).error().code == Errc::invalid_argument);
    for (const float x : hand.keys) CHECK(std::isnan(x));
  }
}

TEST_CASE("non-finite input is an error where checks are on, and visible where they are not") {
  Hand<64> hand(4, 1);
  hand.row(2, {0}, 2);
  std::vector<float> x(128, 1.0f);
  x[70] = INFINITY;
  const std::int64_t slots[] = {0, 1};
  BatchView batch = hand.batch();
  batch.slots = slots;
  AppendArgs args;
  args.keys = args.values = {x.data(), 64, 64};
  const auto ok = cpu::append(hand.view, batch, args, cpu::serial);
  CHECK(ok.has_value() == !is_checked);
  if (!ok) {
    CHECK(ok.error().code == Errc::non_finite_input);
    CHECK(ok.error().needed == 1);
    for (const float k : hand.keys) CHECK(std::isnan(k));
  } else {
    CHECK(std::isinf(hand.keys[70]));
  }
}

TEST_CASE("ragged rows, pages and splits give the same numbers, every row written") {
  Hand<64> hand(16, 80);
  std::vector<int> first, second;
  for (int i = 0; i < 40; ++i) first.push_back(i), second.push_back(79 - i);
  hand.row(3, first, 40 * 16 - 5);
  hand.row(1, {40, 41}, 20);
  hand.row(2, second, 600 + 33);
  Random random(8);
  for (float& x : hand.keys) x = random.gauss();
  for (float& x : hand.values) x = random.gauss();
  hand.queries = random.gauss(6 * 64);
  hand.attend({}, 1);
  const std::vector<float> whole = hand.out;
  hand.attend({}, 2);
  CHECK(hand.out == whole);
  for (const float x : whole) CHECK(std::isfinite(x));
}

TEST_CASE("pages are read in the table's order: the mean of logical page numbers") {
  for (const int page : {1, 3, 16, 19, 64, 128, 256, 512}) {
    CAPTURE(page);
    constexpr int pages = 5;
    Hand<64> hand(page, 16);
    const std::vector<int> table = {11, 2, 7, 0, 13};
    hand.row(1, table, pages * page);
    for (int i = 0; i < pages; ++i)
      for (int slot = 0; slot < page; ++slot)
        hand.store(table[static_cast<std::size_t>(i)], slot, 0.0f, static_cast<float>(i));
    hand.attend();
    hand.check(0, 2.0f);
    CHECK(hand.lse[0].value == Approx(std::log(static_cast<float>(pages * page))));
  }
}

TEST_CASE("a last page of length 0, or longer than a page, is refused") {
  Hand<64> hand(4, 2);
  hand.row(1, {0, 1}, 8);
  BatchView batch = hand.batch();
  batch.lengths = nullptr;
  for (const std::int32_t last : {0, -1, 5, 100}) {
    batch.last_page_tokens = &last;
    CHECK(cpu::plan_attend(hand.view, batch, {1, 1}).error().code == Errc::invalid_argument);
    CHECK(std::string(cpu::plan_attend(hand.view, batch, {1, 1}).error().subject) ==
          "batch.last_page_tokens");
  }
  const std::int32_t fine = 4;
  batch.last_page_tokens = &fine;
  CHECK(cpu::plan_attend(hand.view, batch, {1, 1}));
  for (const std::int32_t length : {4, 9, -1}) {
    batch.last_page_tokens = nullptr;
    batch.lengths = &length;
    CHECK(std::string(cpu::plan_attend(hand.view, batch, {1, 1}).error().subject) == "batch.lengths");
  }
}

TEST_CASE("errors cross no boundary as exceptions and do not vanish in release builds") {
  using View = PagedView<Gqa<64>, Int8>;
  CHECK(std::string(Error{Errc::invalid_argument, "args.out"}.message()) == "invalid argument: args.out");
  static_assert(noexcept(cpu::append(View{}, BatchView{}, AppendArgs{}, cpu::serial)));
  static_assert(noexcept(cpu::attend(View{}, BatchView{}, AttendArgs{}, cpu::AttendPlan{}, {}, cpu::serial)));
  static_assert(
      noexcept(cpu::merge(MergeArgs{}, cpu::serial))&& noexcept(cpu::finish(FinishArgs{}, cpu::serial)));
  Hand<64> hand(4, 2);
  hand.row(1, {0, 2}, 8);  // page 2 of 2
  CHECK(std::string(cpu::plan_attend(hand.view, hand.batch(), {1, 1}).error().subject) ==
        "batch.table.entries (page)");
  hand.entries[1] = TableEntry::make(1, PageId{0}).raw;
  CHECK(std::string(cpu::plan_attend(hand.view, hand.batch(), {1, 1}).error().subject) ==
        "batch.table.entries (format)");
}

TEST_CASE("a page copied into a fresh pool carries its scales: the output is the same") {
  using Layout = Gqa<64, 8>;
  using Cache = PagedCache<Layout, Int8>;
  Random random(6);
  const CacheConfig config{.shape = {2, 2, dynamic}, .pages = 8, .exact_pages = 4, .exact_sink_pages = 1};
  Cache cache(config);
  poison(cache);
  Step step = cache.begin_step();
  const SeqId parent = *step.create();
  REQUIRE(step.extend(parent, 20));
  run_step(cache, std::move(step), random);
  Attention a = Attention::make<Layout>(random, 1, 4);
  const auto attend = [&](const Cache& c, SeqId id) {
    std::vector<std::int32_t> entries;
    const auto pages = c.sequence(id)->pages;
    for (const TablePage& page : pages) entries.push_back(page.entry.raw);
    const std::int32_t indptr[] = {0, static_cast<std::int32_t>(entries.size())}, length[] = {20};
    BatchView batch;
    batch.rows = 1;
    batch.table = {entries.data(), indptr};
    batch.lengths = length;
    check_attend(c.view(LayerId{1}), batch, a, 4);
    return a.out;
  };
  const std::vector<float> before = attend(cache, parent);

  // Copy-on-write: the child's last page is a copy, cut back to the same 20 tokens.
  Step fork = cache.begin_step();
  const SeqId child = *fork.fork(parent);
  REQUIRE(fork.extend(child, 1));
  run_step(cache, std::move(fork), random);
  Step cut = cache.begin_step();
  REQUIRE(cut.truncate(child, 20));
  cut.commit();
  CHECK(cache.sequence(child)->pages[2] != cache.sequence(parent)->pages[2]);
  CHECK(attend(cache, child) == before);

  // The same bytes in another cache's memory.
  Cache other(config);
  Step same = other.begin_step();
  const SeqId id = *same.create();
  REQUIRE(same.extend(id, 20));
  same.commit();
  const auto from = cache.sequence(parent)->pages, to = other.sequence(id)->pages;
  for (std::size_t i = 0; i < from.size(); ++i)
    for (int layer = 0; layer < 2; ++layer) {
      const int format = from[i].entry.format();
      const std::int64_t stride = cache.store().page_stride(format);
      std::memcpy(other.store().data(format, layer) + to[i].entry.page().value * stride,
                  cache.store().data(format, layer) + from[i].entry.page().value * stride,
                  static_cast<std::size_t>(cache.store().page_bytes(format) / 2));
    }
  CHECK(attend(other, id) == before);
}
