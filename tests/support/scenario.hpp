// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once
// Running steps of a cache on random tokens and holding attend() against ref.

#include <cmath>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "kvfolia/cpu.hpp"
#include "kvfolia/kvfolia.hpp"
#include "kvfolia/ref/attend.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace kvfolia_tests {

using namespace kvfolia;

/// Fails on NaN, unlike a comparison with `>`.
struct Difference {
  double error2 = 0.0;
  double norm2 = 0.0;
  double lse = 0.0;
  double relative() const { return norm2 == 0.0 ? std::sqrt(error2) : std::sqrt(error2 / norm2); }
};

inline Difference compare(const std::vector<float>& out, const std::vector<NaturalLse>& lse,
                          const ref::Attention& ref) {
  Difference d;
  REQUIRE(out.size() == ref.out.size());
  REQUIRE(lse.size() == ref.lse.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    d.error2 += (out[i] - ref.out[i]) * (out[i] - ref.out[i]);
    d.norm2 += ref.out[i] * ref.out[i];
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(ref.lse[i]) && lse[i].value == static_cast<float>(ref.lse[i])) continue;
    const double difference = std::fabs(lse[i].value - ref.lse[i]);
    if (!(difference <= d.lse)) d.lse = difference;
  }
  return d;
}

// What the design allows every kernel on the same pages: with fp32 arithmetic, and where it rounds queries
// to less than a float has, which is held to what fp16 may cost.
inline constexpr double fp32_tolerance = 1e-5;
inline constexpr double fp16_tolerance = 1e-3;

inline void check_close(const Difference& d, double tolerance = fp32_tolerance) {
  CHECK(d.relative() <= tolerance);
  CHECK(d.lse <= tolerance);
}

/// Fills every page with bytes that are NaN in all formats.
template <class Cache>
void poison(Cache& cache) {
  for (int format = 0; format < format_count<typename Cache::Quant>; ++format)
    for (std::int64_t page = 0; page < cache.pool(format).pages(); ++page)
      for (int layer = 0; layer < cache.shape().layers; ++layer)
        std::memset(cache.store().data(format, layer) + page * cache.store().page_stride(format), 0xff,
                    static_cast<std::size_t>(cache.store().page_bytes(format) / cache.shape().layers));
}

/// Keys and values of a batch's new tokens for one layer.
template <class Layout>
struct NewTokens {
  std::vector<float> keys;
  std::vector<float> values;
  AppendArgs args(int kv_heads) const {
    AppendArgs args;
    args.keys = {keys.data(), kv_heads * Layout::key_dim, Layout::key_dim};
    args.values = {values.data(), kv_heads * Layout::value_dim, Layout::value_dim};
    return args;
  }
};

template <class Layout>
NewTokens<Layout> random_tokens(Random& random, int tokens, int kv_heads) {
  const auto count = static_cast<std::size_t>(tokens * kv_heads);
  return {random.gauss(count * Layout::key_dim), random.gauss(count * Layout::value_dim)};
}

/// Queries and results of one attend().
struct Attention {
  std::vector<float> queries;
  std::vector<float> out;
  std::vector<NaturalLse> lse;
  AttendArgs args;

  template <class Layout>
  static Attention make(Random& random, int tokens, int query_heads) {
    Attention a;
    const auto rows = static_cast<std::size_t>(tokens * query_heads);
    a.queries = random.gauss(rows * Layout::key_dim);
    a.out.assign(rows * Layout::value_dim, NAN);
    a.lse.assign(rows, NaturalLse{NAN});
    a.args.queries = {a.queries.data(), query_heads * Layout::key_dim, Layout::key_dim};
    a.args.out = {a.out.data(), query_heads * Layout::value_dim, Layout::value_dim};
    a.args.lse = {a.lse.data(), query_heads, 1};
    a.args.scale = Layout::shares_key_value ? 0.125f : 0.0f;
    return a;
  }
};

/// Plans and runs attend() on one thread, on both paths, and checks it against ref.
template <class Layout, class Quant>
void check_attend(const PagedView<Layout, Quant>& view, const BatchView& batch, Attention& a,
                  int query_heads) {
  const auto expected = ref::attend(view, batch, a.args, query_heads);
  REQUIRE(expected);
  for (const cpu::AttendPath path : {cpu::AttendPath::plain, cpu::AttendPath::fast}) {
    INFO((path == cpu::AttendPath::fast ? "fast path" : "plain path"));
    const auto plan = cpu::plan_attend(view, batch, {query_heads, 1, path});
    REQUIRE(plan);
    std::vector<std::byte> workspace(plan->workspace_bytes());
    std::fill(a.out.begin(), a.out.end(), NAN);
    REQUIRE(cpu::attend(view, batch, a.args, *plan, workspace, cpu::serial));
    bool rounds = false;
    for (int row = 0; row < batch.rows; ++row)
      rounds |= cpu::rounds_operands<Layout, Quant>(batch.query_tokens(row));
    rounds &= path == cpu::AttendPath::fast;
    check_close(compare(a.out, a.lse, *expected), rounds ? fp16_tolerance : fp32_tolerance);
  }
}

/// Runs everything on this thread, last item first: no result may depend on an order.
struct Backwards {
  int concurrency() const { return 1; }
  template <class F>
  void parallel_for(std::int64_t n, F&& f) const {
    for (std::int64_t i = n; i-- > 0;) f(i, 0);
  }
};

/// Commits a step and appends random tokens to all layers.
template <class Cache>
Batch run_step(Cache& cache, Step step, Random& random) {
  Batch batch = step.commit();
  cache.store().copy(batch.copies(), Backwards{});
  for (int layer = 0; layer < cache.shape().layers; ++layer) {
    const auto tokens = random_tokens<typename Cache::Layout>(random, batch.tokens(), cache.shape().kv_heads);
    REQUIRE(cpu::append(cache.view(LayerId{layer}), batch, tokens.args(cache.shape().kv_heads), cpu::serial));
  }
  return batch;
}

}  // namespace kvfolia_tests
