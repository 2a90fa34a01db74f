// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Views over memory and tables that an engine brings, with no PagedCache anywhere.

#include "support/scenario.hpp"

using namespace kvfolia_tests;

namespace {

constexpr int dim = 64, kv_heads = 2, heads = 4, page_tokens = 8, pages = 12;
using Layout = Gqa<dim, page_tokens>;

/// fp16 pages in one of the orders that engines use, filled at random.
struct EnginePages {
  std::vector<fp16> keys, values;
  PagedView<Layout, Identity<fp16>> view{};

  enum class Order { slot_head, head_slot, joint };
  explicit EnginePages(Order order) {
    Random random(12);
    constexpr std::int64_t page = page_tokens * kv_heads * dim;
    keys.resize(static_cast<std::size_t>(pages * page * (order == Order::joint ? 2 : 1)));
    values.resize(order == Order::joint ? 0 : keys.size());
    for (fp16& x : keys) x = fp16(random.gauss());
    for (fp16& x : values) x = fp16(random.gauss());
    auto* k = reinterpret_cast<std::byte*>(keys.data());
    auto* v = reinterpret_cast<std::byte*>(values.data());
    view.kv_heads = kv_heads;
    FormatView& f = view.formats[0];
    f.pages = pages;
    switch (order) {
      case Order::slot_head:  // [page][slot][head][dim]
        f.keys = {k, page * 2, dim * 2, kv_heads * dim * 2};
        f.values = {v, page * 2, dim * 2, kv_heads * dim * 2};
        break;
      case Order::head_slot:  // [page][head][slot][dim]
        f.keys = {k, page * 2, page_tokens * dim * 2, dim * 2};
        f.values = {v, page * 2, page_tokens * dim * 2, dim * 2};
        break;
      case Order::joint:  // [page][key or value][slot][head][dim]
        f.keys = {k, page * 4, dim * 2, kv_heads * dim * 2};
        f.values = {k + page * 2, page * 4, dim * 2, kv_heads * dim * 2};
        break;
    }
  }
  float key(int page, int head, int slot, int d) const {
    return static_cast<float>(view.key_tile(TableEntry{page}, head).code<fp16>(slot, d));
  }
};

}  // namespace

TEST_CASE("strides place every element of an engine's pages") {
  const EnginePages nhd(EnginePages::Order::slot_head), hnd(EnginePages::Order::head_slot),
      joint(EnginePages::Order::joint);
  const auto at = [](const std::vector<fp16>& from, int index) {
    return static_cast<float>(from[static_cast<std::size_t>(index)]);
  };
  for (const int page : {0, 3, 11})
    for (const int slot : {0, 5})
      for (const int head : {0, 1}) {
        CHECK(nhd.key(page, head, slot, 7) == at(nhd.keys, ((page * 8 + slot) * 2 + head) * 64 + 7));
        CHECK(hnd.key(page, head, slot, 7) == at(hnd.keys, ((page * 2 + head) * 8 + slot) * 64 + 7));
        CHECK(joint.key(page, head, slot, 7) == at(joint.keys, ((page * 2 * 8 + slot) * 2 + head) * 64 + 7));
      }
}

TEST_CASE("CSR pages with last-page lengths are read in place") {
  for (const auto order :
       {EnginePages::Order::slot_head, EnginePages::Order::head_slot, EnginePages::Order::joint}) {
    EnginePages engine(order);
    const std::int32_t query_indptr[] = {0, 1, 4, 5}, indptr[] = {0, 3, 7, 8}, last[] = {1, 8, 5};
    const std::int32_t entries[] = {4, 0, 9, 11, 2, 3, 10, 6};
    BatchView batch;
    batch.rows = 3;
    batch.query_indptr = query_indptr;
    batch.table = {entries, indptr};
    batch.last_page_tokens = last;
    CHECK(batch.length(0, page_tokens) == 17);
    Random random(1);
    Attention a = Attention::make<Layout>(random, 5, heads);
    check_attend(engine.view, batch, a, heads);
  }
}

TEST_CASE("padded tables with lengths give what CSR gives") {
  EnginePages engine(EnginePages::Order::slot_head);
  const std::int32_t csr[] = {4, 0, 9, 11, 2}, indptr[] = {0, 3, 5}, lengths[] = {20, 9};
  const std::int32_t padded[] = {4, 0, 9, -1, 77777, 11, 2, 99999, -5, 1};  // padding is never looked at
  BatchView one;
  one.rows = 2;
  one.table = {csr, indptr};
  one.lengths = lengths;
  BatchView other = one;
  other.table = {padded, nullptr, 5};
  Random random(1), same(1);
  Attention a = Attention::make<Layout>(random, 2, heads), b = Attention::make<Layout>(same, 2, heads);
  check_attend(engine.view, one, a, heads);
  check_attend(engine.view, other, b, heads);
  CHECK(a.out == b.out);
}

TEST_CASE("absent entries are skipped and keep their positions") {
  EnginePages engine(EnginePages::Order::head_slot);
  const std::int32_t entries[] = {4, -1, 9}, indptr[] = {0, 3}, lengths[] = {20};
  BatchView batch;
  batch.rows = 1;
  batch.table = {entries, indptr};
  batch.lengths = lengths;
  Random random(1), same(1);
  Attention a = Attention::make<Layout>(random, 1, heads);
  engine.view.window = {.left = 12};
  const float slopes[] = {0.5f, 0.1f, 0.01f, 0.0f};
  a.args.alibi_slopes = slopes;
  check_attend(engine.view, batch, a, heads);
  // The same as a table without the hole that says where its pages are.
  const std::int32_t dense[] = {4, 9}, two[] = {0, 2}, kept[] = {12}, positions[] = {0, 16}, query[] = {19};
  batch.table = {dense, two};
  batch.lengths = kept;
  batch.entry_pos = positions;
  batch.query_pos = query;
  Attention b = Attention::make<Layout>(same, 1, heads);
  b.args.alibi_slopes = slopes;
  check_attend(engine.view, batch, b, heads);
  CHECK(a.out == b.out);
}

TEST_CASE("every KV head may have a table of its own") {
  EnginePages engine(EnginePages::Order::slot_head);
  const std::int32_t entries[] = {4, 0, 9, 1, 2, 3};  // head 0: 4 0 9; head 1: 1 2 3
  const std::int32_t lengths[] = {20};
  BatchView batch;
  batch.rows = 1;
  batch.table = {entries, nullptr, 6, 3};
  batch.lengths = lengths;
  Random random(1), same(1);
  Attention both = Attention::make<Layout>(random, 1, heads),
            second = Attention::make<Layout>(same, 1, heads);
  check_attend(engine.view, batch, both, heads);
  batch.table = {entries + 3, nullptr, 6, 0};
  check_attend(engine.view, batch, second, heads);
  for (std::size_t i = 2 * dim; i < 4 * dim; ++i) CHECK(both.out[i] == second.out[i]);
  for (std::size_t i = 0; i < 2 * dim; ++i) CHECK(both.out[i] != second.out[i]);
}

TEST_CASE("heads that kept different numbers of tokens attend over their own") {
  EnginePages engine(EnginePages::Order::slot_head);
  const std::int32_t entries[] = {4, 9, 1}, indptr[] = {0, 1}, lengths[] = {5}, query[] = {20};
  const std::int32_t used[] = {5, 0, 3};  // head 0 kept five tokens of page 4, head 1 three of page 1
  std::int32_t slot_pos[24] = {0, 3, 4, 9, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 8, 19};
  BatchView batch;
  batch.rows = 1;
  batch.table = {entries, indptr, 0, 2};
  batch.lengths = lengths;
  batch.entry_tokens = used;
  batch.slot_pos = slot_pos;
  batch.query_pos = query;
  Random random(1);
  Attention a = Attention::make<Layout>(random, 1, heads);
  check_attend(engine.view, batch, a, heads);
  const std::int32_t more[] = {5, 0, 6};
  batch.entry_tokens = more;
  CHECK(cpu::plan_attend(engine.view, batch, {heads, 1}).error().code == Errc::invalid_argument);
}

TEST_CASE("compacted pages have a position for every slot") {
  EnginePages engine(EnginePages::Order::slot_head);
  const std::int32_t entries[] = {4, 9}, indptr[] = {0, 2}, lengths[] = {11}, used[] = {6, 5}, query[] = {40};
  const std::int32_t slot_pos[] = {0, 3, 4, 9, 17, 20, 0, 0, 21, 25, 30, 38, 40, 0, 0, 0};
  BatchView batch;
  batch.rows = 1;
  batch.table = {entries, indptr};
  batch.lengths = lengths;
  batch.entry_tokens = used;
  batch.slot_pos = slot_pos;
  batch.query_pos = query;
  engine.view.window = {.left = 20, .sink_tokens = 4};  // sees 0, 3 and 20 to 40
  Random random(1);
  Attention a = Attention::make<Layout>(random, 1, heads);
  check_attend(engine.view, batch, a, heads);
  const std::int32_t descending[] = {0, 3, 2, 9, 17, 20, 0, 0, 21, 25, 30, 38, 40, 0, 0, 0};
  batch.slot_pos = descending;
  CHECK(cpu::plan_attend(engine.view, batch, {heads, 1}).error().code == Errc::invalid_argument);
}

namespace {
constexpr std::int32_t entries_of_one[] = {4}, nine[] = {9};
}

TEST_CASE("a coded view is refused without its scales, or without its exact pages") {
  using View = PagedView<Gqa<64, 8>, Int8>;
  std::vector<std::byte> memory(4096);
  View whole{};
  for (FormatView& f : whole.formats)
    f = {{memory.data(), 512, 512, 64},
         {memory.data(), 512, 512, 64},
         {memory.data(), 16, 16, 2},
         {memory.data(), 16, 16, 2},
         2};
  CHECK(validate(whole));
  const auto refused = [&](auto change) {
    View view = whole;
    change(view);
    return !validate(view);
  };
  CHECK(refused([](View& v) { v.formats[0].key_params.base = nullptr; }));
  CHECK(refused([](View& v) { v.formats[0].value_params.slot_stride = 0; }));
  CHECK(refused([](View& v) { v.formats[0].value_params.slot_stride = 3; }));
  CHECK(refused([](View& v) { v.formats[0].key_params.base += 1; }));
  CHECK(refused([](View& v) { v.formats[1].keys.base = nullptr; }));
  CHECK(refused([](View& v) { v.formats[1].values.base = nullptr; }));
  CHECK(!refused([](View& v) { v.formats[1] = {}; }));
  CHECK(!refused([](View& v) { v.formats[1].key_params = {}; }));  // exact pages have none
}

TEST_CASE("a view or batch that is filled in wrongly is refused by name") {
  EnginePages engine(EnginePages::Order::slot_head);
  const std::int32_t entries[] = {4}, indptr[] = {0, 1}, lengths[] = {8};
  BatchView batch;
  batch.rows = 1;
  batch.table = {entries, indptr};
  batch.lengths = lengths;
  const auto subject = [&](auto change) {
    auto view = engine.view;
    BatchView b = batch;
    change(view, b);
    const auto plan = cpu::plan_attend(view, b, {heads, 1});
    return std::string(plan ? "no error" : plan.error().subject);
  };
  CHECK(subject([](auto&, auto&) {}) == "no error");
  CHECK(subject([](auto& v, auto&) { v.kv_heads = 0; }) == "view.kv_heads");
  CHECK(subject([](auto& v, auto&) { v.page_tokens = 7; }) == "view.page_tokens");
  CHECK(subject([](auto& v, auto&) { v.formats[0].keys.base = nullptr; }) == "view.formats.keys");
  CHECK(subject([](auto& v, auto&) { v.formats[0].values.base = nullptr; }) == "view.formats.values");
  CHECK(subject([](auto& v, auto&) { v.formats[0].keys.slot_stride = 0; }) == "view.formats.keys");
  CHECK(subject([](auto&, auto& b) { b.table.entries = nullptr; }) == "batch.table.entries");
  CHECK(subject([](auto&, auto& b) { b.lengths = nullptr; }) == "batch.lengths");
  CHECK(subject([](auto&, auto& b) { b.rows = -1; }) == "batch.rows");
  static const std::int32_t backwards[] = {0, -2}, late[] = {1, 2}, negative[] = {-3};
  CHECK(subject([](auto&, auto& b) { b.table.indptr = backwards; }) == "batch.table.indptr");
  CHECK(subject([](auto&, auto& b) { b.query_indptr = backwards; }) == "batch.query_indptr");
  CHECK(subject([](auto&, auto& b) { b.query_indptr = late; }) == "batch.query_indptr");
  CHECK(subject([](auto&, auto& b) { b.query_pos = negative; }) == "batch.query_pos");
  CHECK(subject([](auto& v, auto&) { v.formats[0].values.slot_stride = 0; }) == "view.formats.values");
  CHECK(subject([](auto& v, auto&) { v.formats[0].keys.slot_stride = 3; }) == "view.formats.keys");
  CHECK(subject([](auto& v, auto&) { v.formats[0].values.base += 1; }) == "view.formats.values");
  CHECK(subject([](auto&, auto& b) {
          b.table = {entries_of_one, nullptr, 1}, b.lengths = nine;
        }) == "batch.lengths (pages beyond table.row_stride)");
  static const std::int32_t zero[] = {0}, huge[] = {INT32_MAX}, five[] = {5};
  CHECK(subject([](auto& v, auto&) { v.formats[0].pages = 0; }) == "view.formats.pages");
  CHECK(subject([](auto&, auto& b) { b.lengths = huge; }) == "batch.lengths");
  CHECK(subject([](auto&, auto& b) { b.entry_pos = zero; }) ==
        "batch.query_pos (entry_pos, slot_pos and entry_tokens need it)");
  CHECK(subject([](auto&, auto& b) { b.entry_tokens = five, b.query_pos = five; }) ==
        "batch.lengths (entry_tokens add up to other ones)");
  CHECK(subject([](auto&, auto& b) {
          b.entry_tokens = five, b.table = {entries_of_one, nullptr, 1};
        }) == "batch.table.indptr (entry_tokens needs it)");
}
