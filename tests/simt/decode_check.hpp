// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Sequences of some lengths in a cache, each decoded by the kernels and by ref.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "simt/decode_scenario.hpp"

namespace kvfolia_tests::simt {

/// What the design allows kernels whose operands are fp16, or bf16.
template <class Quant>
inline constexpr double decode_tolerance = std::is_same_v<Quant, Identity<bf16>> ? 4e-3 : fp16_tolerance;

/// Plans, runs the kernels by `attend`(view, batch, args, plan) and holds them against ref.
template <class Layout, class Quant, class Attend>
void check_attend_by(const PagedView<Layout, Quant>& view, const BatchView& batch, Attention& a, int heads,
                     Attend&& attend) {
  const auto expected = ref::attend(view, batch, a.args, heads);
  REQUIRE(expected);
  const auto plan = cuda::plan_attend(view, config_of(batch, view.page_tokens, heads));
  REQUIRE(plan);
  std::fill(a.out.begin(), a.out.end(), NAN);
  attend(view, batch, a.args, *plan);
  check_close(compare(a.out, a.lse, *expected), decode_tolerance<Quant>);
}
/// On the host.
template <class Layout, class Quant>
void check_attend(const PagedView<Layout, Quant>& view, const BatchView& batch, Attention& a, int heads) {
  check_attend_by(
      view, batch, a, heads,
      [](const auto& v, const auto& b, const auto& args, const auto& plan) { attend(v, b, args, plan, 1); });
}

/// Two sequences, three query heads for each of two KV heads: five queries behind 40 tokens, and one behind
/// 600. So one row's blocks have sixteen columns, the other's eight.
template <class LayoutT>
struct TwoRows {
  using Layout = LayoutT;
  static constexpr int heads = 6;
  PagedCache<Layout, Int8> cache;
  Random random{7};
  Batch batch;
  Attention a;

  explicit TwoRows(int exact_sink_pages = 0)
      : cache(CacheConfig{.shape = {1, 2, 16},
                          .pages = 64,
                          .exact_pages = 2 * exact_sink_pages,
                          .exact_sink_pages = exact_sink_pages}),
        batch(prepare()),
        a(Attention::make<Layout>(random, batch.tokens(), heads)) {}

  PagedView<Layout, Int8> view() const { return cache.view(LayerId{0}); }

 private:
  Batch prepare() {
    poison(cache);
    Step step = cache.begin_step();
    const SeqId first = *step.create(), second = *step.create();
    REQUIRE((step.extend(first, 40) && step.extend(second, 600)));
    run_step(cache, std::move(step), random);
    Step next = cache.begin_step();
    REQUIRE((next.extend(first, 5) && next.extend(second, 1)));
    return run_step(cache, std::move(next), random);
  }
};

struct DecodeSetup {
  std::vector<int> lengths{};
  int kv_heads = 2;
  int group = 4;
  int page_tokens = 16;
  int seeds = 3;
  int exact_sink_pages = 0;
  StorageOrder order = StorageOrder::layer_major;
};

/// Schedules that a sanitizer has time for.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int most_seeds = 3;
#else
inline constexpr int most_seeds = 1000;
#endif

/// Sequences of some lengths, each with its newest token's query: the same bits with every seed, and what
/// ref says. `attend`(view, batch, args, plan, seed) runs the kernels.
template <class Layout, class Quant, class Attend>
void check_decode_by(const DecodeSetup& setup, Attend&& attend) {
  CAPTURE(setup.lengths, setup.group, setup.page_tokens);
  Random random(99);
  CacheConfig config;
  config.shape = {1, setup.kv_heads, setup.page_tokens};
  config.pages = 1;
  for (const int length : setup.lengths) config.pages += (length + setup.page_tokens) / setup.page_tokens + 1;
  config.order = setup.order;
  // Quantizers of blocks keep every unfinished page exact.
  const int open_pages = kvfolia::detail::largest_block<Quant> > 1 ? 2 : 0;
  config.exact_pages = (setup.exact_sink_pages + open_pages) * static_cast<int>(setup.lengths.size());
  config.exact_sink_pages = setup.exact_sink_pages;
  if constexpr (is_mixed<Quant>) config.low_pages = config.pages;
  PagedCache<Layout, Quant> cache(config);
  poison(cache);
  std::vector<SeqId> sequences;
  for (const bool last : {false, true}) {
    Step step = cache.begin_step();
    for (std::size_t i = 0; i < setup.lengths.size(); ++i) {
      if (!last) sequences.push_back(*step.create());
      REQUIRE(step.extend(sequences[i], last ? 1 : setup.lengths[i] - 1));
      // Of three full pages two take fewer bits from now on.
      if constexpr (is_mixed<Quant>)
        for (int page = setup.exact_sink_pages; last && (page + 1) * setup.page_tokens < setup.lengths[i];
             ++page)
          if (page % 3 != 0) REQUIRE(step.demote(sequences[i], page));
    }
    const Batch batch = run_step(cache, std::move(step), random);
    if (!last) continue;
    const int heads = setup.kv_heads * setup.group;
    const auto view = cache.view(LayerId{0});
    Attention a = Attention::make<Layout>(random, batch.tokens(), heads);
    const auto expected = ref::attend(view, batch, a.args, heads);
    REQUIRE(expected);
    const auto plan = cuda::plan_attend(view, config_of(batch, setup.page_tokens, heads));
    REQUIRE(plan);
    std::vector<float> first;
    for (int seed = 0; seed < std::min(setup.seeds, most_seeds); ++seed) {
      std::fill(a.out.begin(), a.out.end(), NAN);
      attend(view, BatchView(batch), a.args, *plan, static_cast<std::uint64_t>(seed));
      if (seed == 0) {
        first = a.out;
        check_close(compare(a.out, a.lse, *expected), decode_tolerance<Quant>);
      }
      CHECK(std::memcmp(first.data(), a.out.data(), first.size() * sizeof(float)) == 0);
    }
  }
}

/// On the host, as a GPU of a compute capability would.
template <class Layout, class Quant, int Capability = 90>
void check_decode(const DecodeSetup& setup) {
  check_decode_by<Layout, Quant>(setup, [](const auto& view, const BatchView& batch, const AttendArgs& args,
                                           const cuda::AttendPlan& plan, std::uint64_t seed) {
    attend<Capability>(view, batch, args, plan, seed);
  });
}

}  // namespace kvfolia_tests::simt
