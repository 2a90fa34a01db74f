// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "support/scenario.hpp"

using namespace kvfolia_tests;

namespace {

struct Setup {
  int kv_heads = 2;
  int group = 3;
  int page_tokens = dynamic;
  int exact_sink_pages = 0;
  StorageOrder order = StorageOrder::layer_major;
};

/// Ragged sequences grow by chunks and single tokens; after every step all of them attend.
template <class Layout, class Quant, class Evict = KeepAll>
void check_ragged(const Setup& setup, Evict evict = {}) {
  Random random(2024);
  CacheConfig config;
  config.shape = {2, setup.kv_heads, setup.page_tokens};
  config.pages = 600;
  config.exact_pages = setup.exact_sink_pages > 0 ? 60 : 0;
  config.exact_sink_pages = setup.exact_sink_pages;
  config.order = setup.order;
  PagedCache<Layout, Quant, Evict> cache(config, {}, evict);
  poison(cache);
  const int page = cache.page_tokens();

  std::vector<SeqId> sequences;
  const std::vector<std::vector<int>> steps = {{1, page - 1, page, page + 1, 3 * page + 2, 300, 0},
                                               {1, 1, 1, 1, 1, 1, 1},
                                               {5, 1, 0, page, 2, 1, 1},
                                               {1, 1, 1, 1, 1, 40, 1}};
  for (const std::vector<int>& tokens : steps) {
    Step step = cache.begin_step();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (sequences.size() == i) sequences.push_back(*step.create());
      REQUIRE(step.extend(sequences[i], tokens[i]));
    }
    const Batch batch = run_step(cache, std::move(step), random);
    for (int layer = 0; layer < 2; ++layer) {
      const int heads = setup.kv_heads * setup.group;
      Attention a = Attention::make<Layout>(random, batch.tokens(), heads);
      check_attend(cache.view(LayerId{layer}), batch, a, heads);
    }
    CHECK(cache.verify().empty());
  }
}

}  // namespace

// The full cross of layouts and evictions for one quantizer, pairs for the others.

TEST_CASE("Gqa with Int8 agrees with ref") {
  check_ragged<Gqa<64, 16>, Int8>({});
  check_ragged<Gqa<64, dynamic, DimMajor<4>, SlotPairs<4>>, Int8>({.page_tokens = 32, .exact_sink_pages = 1});
}

TEST_CASE("Gqa with Int8 and a window agrees with ref") {
  check_ragged<Gqa<64, 16>, Int8>({.exact_sink_pages = 2}, SinkWindow{4, 20});
  check_ragged<Gqa<64, 16>, Int8>({.order = StorageOrder::page_major}, SinkWindow{0, 1});
}

TEST_CASE("Mla with Int8 agrees with ref") {
  check_ragged<Mla<64, 16, 16>, Int8>({.kv_heads = 1, .group = 16});
  check_ragged<Mla<64, 16, 16, DimMajor<4>>, Int8>({.kv_heads = 1, .group = 5, .exact_sink_pages = 1});
}

TEST_CASE("Mla with Int8 and a window agrees with ref") {
  check_ragged<Mla<64, 16, 16>, Int8>({.kv_heads = 1, .group = 16, .exact_sink_pages = 1}, SinkWindow{4, 33});
}

TEST_CASE("Gqa with fp32 and a window agrees with ref") {
  check_ragged<Gqa<40, dynamic>, Identity<float>>({.page_tokens = 3}, SinkWindow{5, 50});
}

TEST_CASE("Mla with fp32 agrees with ref") {
  check_ragged<Mla<96, 24, 8, SlotPairs<2>>, Identity<float>>({.kv_heads = 1, .group = 7});
}

TEST_CASE("Gqa with fp16 agrees with ref") {
  check_ragged<Gqa<128, 1>, Identity<fp16>>({.kv_heads = 1, .group = 8, .order = StorageOrder::page_major});
}

TEST_CASE("Mla with fp16 and a window agrees with ref") {
  check_ragged<Mla<64, 0, 64>, Identity<fp16>>({.kv_heads = 2, .group = 2}, SinkWindow{64, 64});
}

TEST_CASE("Gqa with bf16 and a window agrees with ref") {
  check_ragged<Gqa<80, 32, DimMajor<2>, SlotPairs<2>>, Identity<bf16>>({.kv_heads = 3, .group = 1},
                                                                       SinkWindow{1, 128});
}

TEST_CASE("Mla with bf16 agrees with ref") {
  check_ragged<Mla<72, 8, dynamic, DimMajor<8>>, Identity<bf16>>(
      {.kv_heads = 1, .group = 3, .page_tokens = 19});
}

namespace {

using Layout = Gqa<64, 16>;
using Cache = PagedCache<Layout, Identity<float>>;

/// Two sequences, the second of several pages, with a prefill row and a decode row in the last batch.
struct Small {
  static constexpr int heads = 6;
  Cache cache{CacheConfig{.shape = {1, 2, dynamic}, .pages = 64}};
  Random random{7};
  Batch batch;
  Attention a;

  Small() : batch(prepare()), a(Attention::make<Layout>(random, batch.tokens(), heads)) {}

  Batch prepare() {
    poison(cache);
    Step step = cache.begin_step();
    const SeqId first = *step.create(), second = *step.create();
    REQUIRE((step.extend(first, 5) && step.extend(second, 100)));
    run_step(cache, std::move(step), random);
    Step next = cache.begin_step();
    REQUIRE((next.extend(first, 20) && next.extend(second, 1)));
    return run_step(cache, std::move(next), random);
  }
  PagedView<Layout, Identity<float>> view() const { return cache.view(LayerId{0}); }
  void check() { check_attend(view(), batch, a, heads); }
};

}  // namespace

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
}

TEST_CASE_METHOD(Small, "attention without a causal mask agrees with ref") {
  a.args.causal = false;
  check();
}

TEST_CASE_METHOD(Small, "an engine's own window on the view agrees with ref") {
  auto windowed = view();
  windowed.window = {.left = 7, .sink_tokens = 2};
  check_attend(windowed, batch, a, heads);
}

TEST_CASE_METHOD(Small, "a custom mask decides bit by bit") {
  // Row 0 has 20 queries on 25 positions, row 1 one query on 101.
  std::vector<std::uint8_t> bits((20 * 25 + 7) / 8 + (101 + 7) / 8);
  for (std::uint8_t& byte : bits) byte = static_cast<std::uint8_t>(random.next());
  const std::int64_t offsets[] = {0, (20 * 25 + 7) / 8};
  a.args.mask = {bits.data(), offsets};
  SECTION("with the causal mask") { check(); }
  SECTION("alone") {
    a.args.causal = false;
    check();
  }
  SECTION("of one key a query") {
    for (std::uint8_t& byte : bits) byte = 0;
    for (int q = 0; q < 20; ++q)
      bits[static_cast<std::size_t>((q * 25 + q) / 8)] |= static_cast<std::uint8_t>(1 << ((q * 25 + q) % 8));
    bits[static_cast<std::size_t>(offsets[1])] = 8;  // key 3
    check();
    const auto value = view().value_tile(TableEntry{batch.view().table.entries[0]}, 0);
    for (int d = 0; d < 64; ++d) CHECK(a.out[static_cast<std::size_t>(d)] == value.code<float>(0, d));
  }
}

TEST_CASE("keys that have no bit in a custom mask are not seen") {
  // One query at position 1 over four tokens: its row of the mask has two bits, the rest is out of it.
  PagedCache<Layout, Identity<float>> cache({.shape = {1, 1, dynamic}, .pages = 1});
  Random random(1);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 4));
  run_step(cache, std::move(step), random);
  const std::int32_t entry[] = {0}, indptr[] = {0, 1}, length[] = {4}, query[] = {1};
  BatchView batch;
  batch.rows = 1;
  batch.table = {entry, indptr};
  batch.lengths = length;
  batch.query_pos = query;
  const std::vector<std::uint8_t> bits(1, 0b11111110);
  const std::int64_t offset[] = {0};
  Attention a = Attention::make<Layout>(random, 1, 1);
  a.args.causal = false;
  a.args.mask = {bits.data(), offset};
  check_attend(cache.view(LayerId{0}), batch, a, 1);
  const auto value = cache.view(LayerId{0}).value_tile(TableEntry{0}, 0);
  for (int d = 0; d < 64; ++d) CHECK(a.out[static_cast<std::size_t>(d)] == value.code<float>(1, d));
}

TEST_CASE("a latent cache has no default scale") {
  PagedCache<Mla<64, 16, 16>, Int8> cache({.shape = {1, 1, dynamic}, .pages = 2});
  Random random(1);
  Step step = cache.begin_step();
  REQUIRE(step.extend(*step.create(), 4));
  const Batch batch = run_step(cache, std::move(step), random);
  Attention a = Attention::make<Mla<64, 16>>(random, 4, 2);
  a.args.scale = 0.0f;
  const auto view = cache.view(LayerId{0});
  const auto plan = cpu::plan_attend(view, batch, {2, 1});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  CHECK(cpu::attend(view, batch, a.args, *plan, workspace, cpu::serial).error().code ==
        Errc::invalid_argument);
  CHECK(ref::attend(view, batch, a.args, 2).error().code == Errc::invalid_argument);
}

TEST_CASE_METHOD(Small, "all features together agree with ref") {
  const float slopes[heads] = {0.5f, 0.25f, 0.125f, 0.0625f, 0.0f, 1.0f};
  const float sinks[heads] = {-2.0f, 0.0f, 1.0f, 4.0f, 3.0f, -100.0f};
  a.args.alibi_slopes = slopes;
  a.args.sink_logits = sinks;
  a.args.soft_cap = 3.0f;
  a.args.scale = 0.2f;
  auto windowed = view();
  windowed.window = {.left = 30, .sink_tokens = 4};
  check_attend(windowed, batch, a, heads);
}

TEST_CASE_METHOD(Small, "16-bit queries and outputs are widened and rounded") {
  std::vector<fp16> queries;
  for (float& q : a.queries) {
    queries.emplace_back(q);
    q = static_cast<float>(queries.back());
  }
  check();  // in float, on the rounded queries
  std::vector<bf16> out(a.out.size());
  a.args.queries = {queries.data(), heads * 64, 64};
  a.args.out = {out.data(), heads * 64, 64};
  const auto plan = cpu::plan_attend(view(), batch, {heads, 1});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  REQUIRE(cpu::attend(view(), batch, a.args, *plan, workspace, cpu::serial));
  int wrong = 0;
  for (std::size_t i = 0; i < out.size(); ++i) wrong += out[i].bits != bf16(a.out[i]).bits;
  CHECK(wrong == 0);
}

TEST_CASE_METHOD(Small, "strided queries, outputs and log-sum-exps stay in their places") {
  check();
  const int stride = heads * 80 + 16;
  const auto rows = static_cast<std::size_t>(batch.tokens());
  std::vector<float> queries(rows * stride, NAN), out(rows * stride, -7.0f);
  std::vector<NaturalLse> lse(rows * 10, NaturalLse{-7.0f});
  for (std::size_t t = 0; t < rows; ++t)
    for (std::size_t h = 0; h < heads; ++h)
      for (std::size_t d = 0; d < 64; ++d)
        queries[t * stride + h * 80 + d] = a.queries[(t * heads + h) * 64 + d];
  AttendArgs args;
  args.queries = {queries.data(), stride, 80};
  args.out = {out.data(), stride, 80};
  args.lse = {lse.data(), 10, 1};
  const auto plan = cpu::plan_attend(view(), batch, {heads, 1});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  REQUIRE(cpu::attend(view(), batch, args, *plan, workspace, cpu::serial));
  int wrong = 0;
  for (std::size_t t = 0; t < rows; ++t)
    for (std::size_t i = 0; i < stride; ++i) {
      const std::size_t h = i / 80, d = i % 80;
      const float expected = h < heads && d < 64 ? a.out[(t * heads + h) * 64 + d] : -7.0f;
      wrong += out[t * stride + i] != expected;
    }
  for (std::size_t t = 0; t < rows; ++t)
    for (std::size_t h = 0; h < 10; ++h)
      wrong += lse[t * 10 + h].value != (h < heads ? a.lse[t * heads + h].value : -7.0f);
  CHECK(wrong == 0);
}

TEST_CASE_METHOD(Small, "bad arguments are named and nothing is written") {
  const auto plan = cpu::plan_attend(view(), batch, {heads, 1});
  std::vector<std::byte> workspace(plan->workspace_bytes() + 64);
  const auto run = [&](const AttendArgs& args, std::span<std::byte> space) {
    return cpu::attend(view(), batch, args, *plan, space, cpu::serial);
  };
  AttendArgs args = a.args;
  SECTION("no queries") {
    args.queries.data = nullptr;
    CHECK(std::string(run(args, workspace).error().subject) == "args.queries");
  }
  SECTION("no output") {
    args.out.data = nullptr;
    CHECK(std::string(run(args, workspace).error().subject) == "args.out");
  }
  SECTION("workspace one byte short") {
    const auto error = run(args, std::span(workspace).first(plan->workspace_bytes() - 1)).error();
    CHECK(error.code == Errc::workspace_too_small);
    CHECK(error.needed == static_cast<std::int64_t>(plan->workspace_bytes()));
  }
  SECTION("workspace misaligned") {
    CHECK(run(args, std::span(workspace).subspan(4)).error().code == Errc::invalid_argument);
  }
  SECTION("partial output that is not float") {
    args.partial = true;
    args.out.type = DType::fp16;
    CHECK(run(args, workspace).error().code == Errc::invalid_argument);
  }
  SECTION("a plan for another layout, or another view") {
    PagedCache<Gqa<8, 16>, Identity<float>> narrow({.shape = {1, 2, dynamic}, .pages = 64});
    PagedCache<Gqa<64, 32>, Identity<float>> larger({.shape = {1, 2, dynamic}, .pages = 64});
    PagedCache<Gqa<64, 16>, Identity<float>> fewer({.shape = {1, 1, dynamic}, .pages = 64});
    const auto refused = [&](const auto& with) {
      const auto other = cpu::plan_attend(with.view(LayerId{0}), BatchView{}, {heads, 1});
      return cpu::attend(view(), batch, args, *other, workspace, cpu::serial).error().message();
    };
    const std::string words = "invalid argument: plan (made for another view)";
    CHECK(refused(narrow) == words);
    CHECK(refused(larger) == words);
    CHECK(refused(fewer) == words);
  }
  SECTION("a plan for the same rows, one token ago") {
    BatchView earlier = batch;
    const std::int32_t lengths[] = {earlier.lengths[0], earlier.lengths[1] - 1};
    earlier.lengths = lengths;
    const auto old = cpu::plan_attend(view(), earlier, {heads, 1});
    REQUIRE(old);
    CHECK(cpu::attend(view(), batch, args, *old, workspace, cpu::serial).error().code ==
          Errc::invalid_argument);
  }
  SECTION("a plan for the same lengths at other positions") {
    BatchView later = batch;
    const std::int32_t query[] = {5, 1100}, positions[] = {0, 16, 0, 16, 32, 48, 64, 80, 1096};
    later.query_pos = query;
    later.entry_pos = positions;
    const auto old = cpu::plan_attend(view(), later, {heads, 1});
    REQUIRE(old);
    later.query_pos = batch.view().query_pos;
    CHECK(cpu::attend(view(), batch, args, *old, workspace, cpu::serial).error().code ==
          Errc::invalid_argument);
    later.query_pos = query;
    later.entry_pos = batch.view().entry_pos;
    CHECK(cpu::attend(view(), later, args, *old, workspace, cpu::serial).error().code ==
          Errc::invalid_argument);
  }
  SECTION("strides of zero, which would put all results in one place") {
    args.lse.token_stride = 0;
    CHECK(std::string(run(args, workspace).error().subject) == "args.lse (strides)");
    args.out.head_stride = 0;
    CHECK(std::string(run(args, workspace).error().subject) == "args.out (strides)");
  }
  SECTION("a plan for another batch") {
    const BatchView empty;
    CHECK(cpu::attend(view(), empty, args, *plan, workspace, cpu::serial).error().code ==
          Errc::invalid_argument);
  }
  SECTION("query heads that are no multiple of the KV heads") {
    CHECK(cpu::supported<Layout, Identity<float>>(5, 2) == cpu::AttendKernel::none);
    CHECK(cpu::plan_attend(view(), batch, {5, 1}).error().code == Errc::unsupported);
  }
  SECTION("append without slots") {
    BatchView no_slots = batch;
    no_slots.slots = nullptr;
    const auto tokens = random_tokens<Layout>(random, batch.tokens(), 2);
    CHECK(std::string(cpu::append(view(), no_slots, tokens.args(2), cpu::serial).error().subject) ==
          "batch.slots");
  }
  for (const float x : a.out) CHECK(std::isnan(x));
}
