// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Whole steps as an engine runs them: kernels that were captured once, and pages that an engine's own kernels
// have written.

#include <algorithm>
#include <cmath>
#include <vector>

#include "simt/append_scenario.hpp"
#include "simt/decode_check.hpp"
#include "support/delayed_memory.hpp"

using namespace kvfolia_tests;

namespace {

/// What a graph holds: arguments of kernels that were captured with one batch, and are launched again and
/// again.
template <class Layout, class Quant>
class CapturedStep {
 public:
  using Store = ResourceStore<DelayedMemory>;
  using Cache = PagedCache<Layout, Quant, KeepAll, All, Store>;
  static constexpr int heads = 4, kv_heads = 2;
  static constexpr UploadLimits limits{
      .rows = 4, .tokens = 40, .entries = 64, .copies = 4, .recodes = 12, .in_flight = 1};

  explicit CapturedStep(const CacheConfig& config)
      : cache_(config, *Store::make(Cache::store_spec(config), memory_, 0)),
        uploads_(*Uploads<DelayedMemory>::make(limits, memory_, 0)),
        keys_(static_cast<std::size_t>(limits.tokens * kv_heads * Layout::key_dim)),
        values_(static_cast<std::size_t>(limits.tokens * kv_heads * Layout::value_dim)),
        attention_(Attention::make<Layout>(random_, limits.tokens, heads)) {
    poison(cache_);
  }

  /// Plans with `plan`(step), uploads, replays, and holds every result against ref.
  template <class Plan>
  void run(const Plan& plan) {
    memory_.finish();  // with the step before
    Step step = cache_.begin_step();
    plan(step);
    const auto uploaded = uploads_.upload(step.commit(), 0);
    REQUIRE(uploaded);
    const auto view = cache_.view(LayerId{0});
    const int tokens = uploaded->tokens();
    const auto rows = random_tokens<Layout>(random_, tokens, kv_heads);
    std::copy(rows.keys.begin(), rows.keys.end(), keys_.begin());
    std::copy(rows.values.begin(), rows.values.end(), values_.begin());
    const auto queries = random_.gauss(static_cast<std::size_t>(tokens * heads * Layout::key_dim));
    std::copy(queries.begin(), queries.end(), attention_.queries.begin());
    if (!captured_) {
      captured_ = true;
      batch_ = uploaded->padded_view();
      copies_ = uploaded->padded_copies();
      const auto planned = cuda::plan_attend(view, {.query_heads = heads,
                                                    .rows = limits.rows,
                                                    .queries = limits.tokens,
                                                    .row_queries = 20,
                                                    .row_slots = 400});
      REQUIRE(planned);
      plan_ = *planned;
    }
    CHECK(uploaded->slot() == 0);

    // As captured: nothing here has been told what the batch holds.
    REQUIRE(cache_.store().copy(copies_, 0));
    memory_.catch_up();
    simt::GlobalMemory global;
    simt::add_pages(global, cache_);
    AppendArgs args;
    args.keys = {keys_.data(), kv_heads * Layout::key_dim, Layout::key_dim};
    args.values = {values_.data(), kv_heads * Layout::value_dim, Layout::value_dim};
    simt::append(global, view, batch_, args, limits.tokens, ++seed_);
    std::fill(attention_.out.begin(), attention_.out.end(), NAN);
    simt::attend(view, batch_, attention_.args, plan_, ++seed_);

    const BatchView host = uploaded->batch();
    const auto expected = ref::attend(view, host, attention_.args, heads);
    REQUIRE(expected);
    const auto count = static_cast<std::size_t>(tokens * heads);
    const std::vector<float> out(
        attention_.out.begin(),
        attention_.out.begin() + static_cast<std::ptrdiff_t>(count * Layout::value_dim));
    const std::vector<NaturalLse> lse(attention_.lse.begin(),
                                      attention_.lse.begin() + static_cast<std::ptrdiff_t>(count));
    check_close(compare(out, lse, *expected), simt::decode_tolerance<Quant>);
  }

 private:
  DelayedMemory memory_;
  Random random_{12};
  Cache cache_;
  Uploads<DelayedMemory> uploads_;
  std::vector<float> keys_, values_;
  Attention attention_;
  bool captured_ = false;
  BatchView batch_{};
  DeviceCopies copies_{};
  cuda::AttendPlan plan_{};
  std::uint64_t seed_ = 0;
};

template <class Quant>
void check_captured() {
  CapturedStep<Gqa<64, 16>, Quant> graph(
      {.shape = {1, 2, dynamic}, .pages = 64, .exact_pages = exact_format<Quant> == 0 ? 0 : 8});
  SeqId first{}, second{}, child{};
  graph.run([&](Step& step) {
    first = *step.create();
    REQUIRE(step.extend(first, 20));
  });
  graph.run([&](Step& step) {
    second = *step.create();
    REQUIRE((step.extend(first, 1) && step.extend(second, 5)));
  });
  graph.run([&](Step& step) { child = *step.fork(first); });
  for (int i = 0; i < 12; ++i)
    graph.run([&](Step& step) {
      REQUIRE((step.extend(second, 2) && step.extend(child, 1)));
      if (i % 3 == 0) REQUIRE(step.extend(first, 17));
    });
  graph.run([&](Step& step) {
    REQUIRE((step.truncate(first, 37) && step.release(second)));
    REQUIRE((step.extend(first, 3) && step.extend(child, 1)));
  });
}

}  // namespace

TEST_CASE("a step that is captured once follows lengths as they grow") {
  check_captured<Int8>();
  check_captured<KeyValue<Int4Channels<16>, Int4<32>>>();
}

namespace {

/// Pages of an engine's own kernels: fp16 keys and values of one pool, in one of the orders that there are.
struct EnginePages {
  using Layout = Gqa<64, dynamic>;
  static constexpr int pages = 24, heads = 2, page_tokens = 16, dims = 64;
  std::vector<fp16> pool;
  PagedView<Layout, Identity<fp16>> view;

  enum class Order { tokens_first, heads_first, split };

  explicit EnginePages(Order order) : pool(2 * pages * page_tokens * heads * dims) {
    Random random(21);
    for (fp16& x : pool) x = fp16(static_cast<float>(random.uniform() * 4.0 - 2.0));
    constexpr std::int64_t row = dims * 2, page = page_tokens * heads * row;
    const bool by_head = order == Order::heads_first, split = order == Order::split;
    auto* base = reinterpret_cast<std::byte*>(pool.data());
    PlaneView keys{base, split ? page : 2 * page, by_head ? page_tokens * row : row,
                   by_head ? row : heads * row};
    PlaneView values = keys;
    values.base = base + (split ? pages * page : page);
    view.kv_heads = heads;
    view.page_tokens = page_tokens;
    view.formats[0] = {keys, values, {}, {}, pages};
  }
  /// By the engine's own indices.
  float element(Order order, bool value, int page, int slot, int head, int d) const {
    const int inner = order == Order::heads_first ? head * page_tokens + slot : slot * heads + head;
    const int outer = order == Order::split ? (value ? pages : 0) + page : 2 * page + (value ? 1 : 0);
    return static_cast<float>(
        pool[static_cast<std::size_t>((outer * page_tokens * heads + inner) * dims + d)]);
  }

  /// One query a row at its newest token, in double precision, from the engine's arrays alone.
  void check(Order order, const BatchView& batch, const std::vector<std::vector<int>>& tables,
             const std::vector<int>& lengths) {
    constexpr int query_heads = 6;
    Random random(5);
    Attention a = Attention::make<Layout>(random, batch.rows, query_heads);
    const auto plan = cuda::plan_attend(view, simt::config_of(batch, page_tokens, query_heads));
    REQUIRE(plan);
    simt::attend(view, batch, a.args, *plan, 9);
    double error = 0.0, norm = 0.0;
    for (int row = 0; row < batch.rows; ++row)
      for (int head = 0; head < query_heads; ++head) {
        const float* query = a.queries.data() + (row * query_heads + head) * dims;
        std::vector<double> out(dims, 0.0);
        double sum = 0.0;
        for (int t = 0; t < lengths[static_cast<std::size_t>(row)]; ++t) {
          const int page = tables[static_cast<std::size_t>(row)][static_cast<std::size_t>(t / page_tokens)];
          double score = 0.0;
          for (int d = 0; d < dims; ++d)
            score += query[d] * double{element(order, false, page, t % page_tokens, head / 3, d)};
          const double weight = std::exp(score / 8.0);
          sum += weight;
          for (int d = 0; d < dims; ++d)
            out[static_cast<std::size_t>(d)] +=
                weight * element(order, true, page, t % page_tokens, head / 3, d);
        }
        for (int d = 0; d < dims; ++d) {
          const double expected = out[static_cast<std::size_t>(d)] / sum;
          const double got = a.out[static_cast<std::size_t>((row * query_heads + head) * dims + d)];
          error += (got - expected) * (got - expected);
          norm += expected * expected;
        }
      }
    CHECK(std::sqrt(error / norm) <= fp16_tolerance);
  }
};

}  // namespace

TEST_CASE("decode reads an engine's pages in place: tables by index pointers, both orders") {
  // Page numbers behind one another, where each row's begin, and how full each last page is.
  const std::vector<std::vector<int>> tables = {{3, 17, 5}, {11}, {0, 23, 8, 2}};
  const std::int32_t indices[] = {3, 17, 5, 11, 0, 23, 8, 2}, indptr[] = {0, 3, 4, 8}, last[] = {7, 16, 1};
  for (const auto order : {EnginePages::Order::tokens_first, EnginePages::Order::heads_first}) {
    EnginePages pages(order);
    BatchView batch;
    batch.rows = 3;
    batch.table = {indices, indptr};
    batch.last_page_tokens = last;
    pages.check(order, batch, tables, {39, 16, 49});
  }
}
TEST_CASE("decode reads an engine's pages in place: padded tables, keys and values apart") {
  const std::vector<std::vector<int>> tables = {{3, 17, 5}, {11}, {0, 23, 8, 2}};
  const std::int32_t padded[] = {3, 17, 5, 0, 11, 0, 0, 0, 0, 23, 8, 2}, lengths[] = {39, 16, 49};
  EnginePages pages(EnginePages::Order::split);
  BatchView batch;
  batch.rows = 3;
  batch.table = {padded, nullptr, 4};
  batch.lengths = lengths;
  pages.check(EnginePages::Order::split, batch, tables, {39, 16, 49});
}
