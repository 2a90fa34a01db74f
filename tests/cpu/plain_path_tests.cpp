// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What must not change a bit on the plain path: page size, element order, storage order, chunking,
// threads, company in the batch, and evicted pages.

#include <cmath>
#include <cstring>
#include <thread>

#include "support/contiguous.hpp"
#include "support/scenario.hpp"

using namespace kvfolia_tests;

namespace {

constexpr int dims = 64, kv_heads = 2, heads = 6;

/// A text's keys, values and queries, and the attention of its last `count` positions.
struct Text {
  std::vector<float> keys, values, queries;
  int tokens;

  explicit Text(int n, std::uint64_t seed = 99) : tokens(n) {
    Random random(seed);
    keys = random.gauss(static_cast<std::size_t>(n * kv_heads * dims));
    values = random.gauss(keys.size());
    queries = random.gauss(static_cast<std::size_t>(n * heads * dims));
  }
};

struct Bits {
  std::vector<float> out;
  std::vector<NaturalLse> lse;
  friend bool operator==(const Bits& a, const Bits& b) {
    return a.out.size() == b.out.size() && std::memcmp(a.out.data(), b.out.data(), 4 * a.out.size()) == 0 &&
           std::memcmp(a.lse.data(), b.lse.data(), 4 * a.lse.size()) == 0;
  }
};

/// Threads that take work items in turn: what an engine's own parallel_for looks like.
struct Threads {
  int count;
  int concurrency() const { return count; }
  template <class F>
  void parallel_for(std::int64_t n, F&& f) const {
    std::vector<std::thread> threads;
    for (int w = 0; w < count; ++w)
      threads.emplace_back([&, w] {
        for (std::int64_t i = w; i < n; i += count) f(i, w);
      });
    for (std::thread& t : threads) t.join();
  }
};

/// Feeds the text through a cache in chunks and returns every query's output.
template <class Layout, class Quant, class Evict = KeepAll>
Bits through_cache(const Text& text, int page_tokens, const std::vector<int>& chunks, Evict evict = {},
                   StorageOrder order = StorageOrder::layer_major, int threads = 1) {
  PagedCache<Layout, Quant, Evict> cache(
      CacheConfig{
          .shape = {1, kv_heads, page_tokens}, .pages = text.tokens / page_tokens + 2, .order = order},
      {}, evict);
  poison(cache);
  Bits bits{std::vector<float>(static_cast<std::size_t>(text.tokens * heads * dims), NAN),
            std::vector<NaturalLse>(static_cast<std::size_t>(text.tokens * heads))};
  SeqId sequence;
  int done = 0;
  for (std::size_t i = 0; done < text.tokens; ++i) {
    const int n = std::min(chunks[i % chunks.size()], text.tokens - done);
    Step step = cache.begin_step();
    if (done == 0) sequence = *step.create();
    REQUIRE(step.extend(sequence, n));
    const Batch batch = step.commit();
    AppendArgs append;
    append.keys = {text.keys.data() + done * kv_heads * dims, kv_heads * dims, dims};
    append.values = {text.values.data() + done * kv_heads * dims, kv_heads * dims, dims};
    const auto view = cache.view(LayerId{0});
    REQUIRE(cpu::append(view, batch, append, cpu::serial));
    AttendArgs args;
    args.queries = {text.queries.data() + done * heads * dims, heads * dims, dims};
    args.out = {bits.out.data() + done * heads * dims, heads * dims, dims};
    args.lse = {bits.lse.data() + done * heads, heads, 1};
    const auto plan = cpu::plan_attend(view, batch, {heads, threads, cpu::AttendPath::plain});
    REQUIRE(plan);
    std::vector<std::byte> workspace(plan->workspace_bytes());
    if (threads == 1)
      REQUIRE(cpu::attend(view, batch, args, *plan, workspace, cpu::serial));
    else
      REQUIRE(cpu::attend(view, batch, args, *plan, workspace, Threads{threads}));
    done += n;
  }
  return bits;
}

template <class Quant>
void check_pages_and_orders() {
  const Text text(700);
  const Bits expected = through_cache<Gqa<dims, dynamic>, Quant>(text, 16, {700});
  const std::vector<int> chunks = {1, 33, 256, 7, 1, 1};
  for (const int page : {1, 3, 16, 19, 64, 256, 512})
    CHECK(through_cache<Gqa<dims, dynamic>, Quant>(text, page, chunks) == expected);
  CHECK(through_cache<Gqa<dims, 32, DimMajor<4>, SlotPairs<2>>, Quant>(text, 32, chunks) == expected);
  CHECK(through_cache<Gqa<dims, dynamic, DimMajor<2>, DimMajor<8>>, Quant>(text, 19, chunks) == expected);
  CHECK(through_cache<Gqa<dims, 16, SlotPairs<4>, SlotMajor>, Quant>(text, 16, chunks, {},
                                                                     StorageOrder::page_major) == expected);
}

}  // namespace

TEST_CASE("page sizes, orders and chunks change no bit: fp32") { check_pages_and_orders<Identity<float>>(); }
TEST_CASE("page sizes, orders and chunks change no bit: fp16") { check_pages_and_orders<Identity<fp16>>(); }
TEST_CASE("page sizes, orders and chunks change no bit: int8") { check_pages_and_orders<Int8>(); }

TEST_CASE("the paged result equals plain contiguous vectors bit for bit") {
  const Text text(600);
  const Bits paged = through_cache<Gqa<dims, dynamic>, Identity<float>>(text, 19, {5, 1, 300});
  Bits plain{std::vector<float>(paged.out.size()), std::vector<NaturalLse>(paged.lse.size())};
  for (int t = 0; t < text.tokens; ++t)
    for (int h = 0; h < heads; ++h) {
      const std::size_t at = static_cast<std::size_t>(t * heads + h);
      const std::size_t kv = static_cast<std::size_t>(h / (heads / kv_heads) * dims);
      plain.lse[at].value = contiguous_attention(
          {text.keys.data() + kv, text.values.data() + kv, kv_heads * dims, t + 1, dims, dims},
          text.queries.data() + at * dims, plain.out.data() + at * dims);
    }
  CHECK(paged == plain);
}

TEST_CASE("threads and splits change no bit") {
  const Text text(1500);
  const Bits expected = through_cache<Gqa<dims, 16>, Identity<fp16>>(text, 16, {1400, 1});
  for (const int threads : {2, 3, 8})
    CHECK(through_cache<Gqa<dims, 16>, Identity<fp16>>(text, 16, {1400, 1}, {}, StorageOrder::layer_major,
                                                       threads) == expected);
}

TEST_CASE("a window's evicted pages change no bit") {
  const Text text(900);
  const SinkWindow window{4, 100};
  const Bits expected = through_cache<Gqa<dims, dynamic>, Identity<float>>(text, 512, {900}, window);
  for (const int page : {1, 7, 64})
    CHECK(through_cache<Gqa<dims, dynamic>, Identity<float>>(text, page, {1, 90, 3}, window) == expected);
}

TEST_CASE("a sequence's bits do not depend on its company") {
  Random random(5);
  const auto alone_and_together = [&](int companions) {
    PagedCache<Gqa<dims, 16>, Identity<float>> cache(
        CacheConfig{.shape = {1, kv_heads, dynamic}, .pages = 400});
    const Text text(500);
    Step step = cache.begin_step();
    std::vector<int> lengths;
    for (int i = 0; i < companions; ++i) lengths.push_back(random.between(0, 300));
    for (const int n : lengths) REQUIRE(step.extend(*step.create(), n));
    REQUIRE(step.extend(*step.create(), text.tokens));
    const Batch batch = step.commit();
    const int before = batch.tokens() - text.tokens;
    NewTokens<Gqa<dims>> tokens = random_tokens<Gqa<dims>>(random, before, kv_heads);
    tokens.keys.insert(tokens.keys.end(), text.keys.begin(), text.keys.end());
    tokens.values.insert(tokens.values.end(), text.values.begin(), text.values.end());
    std::vector<float> queries = random.gauss(static_cast<std::size_t>(before * heads * dims));
    queries.insert(queries.end(), text.queries.begin(), text.queries.end());
    const auto view = cache.view(LayerId{0});
    REQUIRE(cpu::append(view, batch, tokens.args(kv_heads), cpu::serial));
    std::vector<float> out(queries.size());
    AttendArgs args;
    args.queries = {queries.data(), heads * dims, dims};
    args.out = {out.data(), heads * dims, dims};
    const auto plan = cpu::plan_attend(view, batch, {heads, 4, cpu::AttendPath::plain});
    std::vector<std::byte> workspace(plan->workspace_bytes());
    REQUIRE(cpu::attend(view, batch, args, *plan, workspace, Threads{4}));
    return std::vector<float>(out.end() - text.tokens * heads * dims, out.end());
  };
  const std::vector<float> alone = alone_and_together(0);
  CHECK(alone_and_together(1) == alone);
  CHECK(alone_and_together(6) == alone);
}
