// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The fast path against ref: every way to read pages, every feature, and what is not finite.

#include "cpu/fast_rows.hpp"

using namespace kvfolia_tests;

namespace {

template <class T>
const T& pick(Random& random, const std::vector<T>& from) {
  return from[static_cast<std::size_t>(random.between(0, static_cast<int>(from.size()) - 1))];
}

std::vector<RowSpec> random_rows(Random& random, int count, int page, int longest) {
  std::vector<RowSpec> rows;
  for (int i = 0; i < count; ++i) {
    const int queries = pick<int>(random, {1, 1, 2, 4, 5, 17, 70});
    int length = pick<int>(random, {0, 1, page - 1, page, page + 1, 255, 256, 257, 300, 511, 513, longest});
    if (queries == 70 && length > 300) length = 300;  // ref takes its time
    rows.push_back({queries, length});
  }
  return rows;
}

Asked random_features(Random& random, bool any) {
  Asked asked;
  if (!any) return asked;
  const auto sometimes = [&] { return random.between(0, 3) == 0; };
  if (sometimes()) asked.scale = 0.3f;
  if (sometimes()) asked.soft_cap = static_cast<float>(random.between(1, 30));
  asked.alibi = sometimes();
  asked.sinks = sometimes();
  asked.masked = sometimes();
  asked.causal = !sometimes();
  asked.partial = sometimes();
  if (random.between(0, 1) == 0)
    asked.window = {pick<int>(random, {0, 1, 20, 100, 255, 256, 300, 600}),
                    pick<int>(random, {0, 1, 4, 30, 256, 280})};
  return asked;
}

SceneSpec random_scene(Random& random, const PoolKind& kind, std::uint64_t seed) {
  SceneSpec spec{.kind = &kind, .seed = seed, .page_seed = seed};
  spec.page_tokens = pick(random, kind.pages);
  spec.group = pick<int>(random, {1, 3, 5, 7, 8, 12, 16});
  spec.kv_heads = spec.group > 5 ? 1 : random.between(1, 3);
  spec.positions =
      pick<Positions>(random, {Positions::dense, Positions::dense, Positions::gaps, Positions::slots});
  spec.table_per_head = random.between(0, 3) == 0;
  spec.absent = random.between(0, 3) == 0;
  spec.heads_inside = random.between(0, 1) == 0;
  spec.coded = random.between(0, 1) == 0;
  return spec;
}

/// Rows of all sizes with everything else chosen by chance.
void check_kind(const char* name, int trials) {
  for (int trial = 0; trial < trials; ++trial) {
    const auto seed = static_cast<std::uint64_t>(trial) + 100;
    CAPTURE(name, seed);
    Random random(seed);
    const SceneSpec spec = random_scene(random, pool_kind(name), seed);
    CAPTURE(spec.page_tokens, spec.kv_heads, spec.group, static_cast<int>(spec.positions),
            spec.table_per_head, spec.absent, spec.heads_inside);
    const Scene scene(spec, random_rows(random, 4, spec.page_tokens, 900));
    const Asked asked = random_features(random, trial % 3 != 0);
    CAPTURE(asked.scale, asked.soft_cap, asked.alibi, asked.sinks, asked.causal, asked.masked, asked.partial,
            asked.window.left, asked.window.sink_tokens);
    check_scene(scene, asked, {random.between(1, 3)});
  }
}

/// One number of a token, or all of them.
void spoil(Random& random, std::vector<float>& numbers) {
  const float bad = pick<float>(random, {NAN, INFINITY, -INFINITY});
  if (random.between(0, 1) == 0)
    numbers[static_cast<std::size_t>(random.between(0, static_cast<int>(numbers.size()) - 1))] = bad;
  else
    std::fill(numbers.begin(), numbers.end(), bad);
}

void check_spoiled(const char* name, int trials) {
  for (int trial = 0; trial < trials; ++trial) {
    const auto seed = static_cast<std::uint64_t>(trial) + 500;
    CAPTURE(name, seed);
    Random random(seed);
    SceneSpec spec = random_scene(random, pool_kind(name), seed);
    spec.kv_heads = std::min(spec.kv_heads, 2);
    const int often = pick<int>(random, {3, 40, 200});
    spec.change = [=](int row, int position, std::vector<float>& key, std::vector<float>& value) {
      Random chance(seed * 7919 + static_cast<std::uint64_t>(row * 100000 + position));
      if (chance.between(0, often) != 0) return;
      const int what = chance.between(0, 2);
      if (what != 0) spoil(chance, key);
      if (what != 1) spoil(chance, value);
    };
    CAPTURE(spec.page_tokens, spec.kv_heads, spec.group, static_cast<int>(spec.positions),
            spec.table_per_head, spec.absent, often);
    const Scene scene(spec, random_rows(random, 3, spec.page_tokens, 700));
    Asked asked = random_features(random, trial % 3 != 0);
    CAPTURE(asked.scale, asked.soft_cap, asked.alibi, asked.sinks, asked.causal, asked.masked, asked.partial,
            asked.window.left, asked.window.sink_tokens);
    check_scene(scene, asked);
  }
}

}  // namespace

TEST_CASE("the fast path agrees with ref for rows, pages and features of every kind") {
  for (const PoolKind& kind : pool_kinds()) check_kind(kind.name, 8);
}

TEST_CASE("what is not finite reaches the queries that see it, and no other") {
  for (const PoolKind& kind : pool_kinds()) check_spoiled(kind.name, 8);
}

TEST_CASE("every number of queries and heads of a group agrees with ref") {
  // Blocks of eight, four and one rows, with and without some that complete them.
  for (const char* name : {"fp32, 128 dims", "int8, four of 72 dims at once", "int4 channels"})
    for (int group = 1; group <= 17; ++group) {
      const Scene scene({.kind = &pool_kind(name), .page_tokens = 32, .kv_heads = 1, .group = group},
                        {{1, 67}, {2, 40}, {3, 33}, {4, 300}, {5, 35}});
      CAPTURE(name, group);
      check_scene(scene, {});
    }
}

TEST_CASE("a query that is not a number gives no numbers") {
  for (const PoolKind& kind : pool_kinds())
    for (const float bad : {float{NAN}, INFINITY, -INFINITY})
      for (const bool whole : {false, true}) {
        Scene scene({.kind = &kind, .page_tokens = 32, .kv_heads = 1, .group = 3, .coded = true},
                    {{1, 64}, {2, 320}, {6, 64}});
        const std::size_t dims = static_cast<std::size_t>(scene.pool->key_dim);
        for (int row = 0; row < 3; ++row)  // of the first query, the second head
          std::fill_n(scene.query(row).begin() + static_cast<std::ptrdiff_t>(dims), whole ? dims : 1, bad);
        CAPTURE(kind.name, bad, whole);
        check_scene(scene, {});
      }
}

TEST_CASE("queries of zeros, subnormal and large ones agree with ref") {
  for (const PoolKind& kind : pool_kinds())
    for (const float factor : {0.0f, 1e-42f, 1e-36f, 1e-30f, 1e-3f}) {
      Scene scene({.kind = &kind, .page_tokens = 32, .kv_heads = 1, .group = 3, .coded = true},
                  {{1, 70}, {4, 300}, {6, 64}});
      for (int row = 0; row < 3; ++row)
        for (float& q : scene.query(row)) q *= factor;
      CAPTURE(kind.name, factor);
      check_scene(scene, {});
    }
}

TEST_CASE("one huge score takes all the weight") {
  for (const PoolKind& kind : pool_kinds())
    for (const float factor : {1e4f, 1e10f, 1e30f}) {
      Scene scene({.kind = &kind, .page_tokens = 32, .kv_heads = 1, .group = 3, .coded = true},
                  {{1, 70}, {4, 300}, {6, 64}});
      for (int row = 0; row < 3; ++row)
        for (float& q : scene.query(row)) q *= factor;
      CAPTURE(kind.name, factor);
      const auto got = scene.attend(scene.all(), {});
      const auto expected = scene.expect(scene.all(), {});
      for (std::size_t row = 0; row < 3; ++row) {
        CHECK(distance(got[row], expected[row]).relative <= scene.tolerance(static_cast<int>(row)));
        for (std::size_t i = 0; i < got[row].lse.size(); ++i)
          CHECK(std::fabs(got[row].lse[i] - expected[row].lse[i]) <= 1e-4 * std::fabs(expected[row].lse[i]));
      }
    }
}

TEST_CASE("scores of minus infinity weigh nothing, and all of them are no key") {
  for (const char* name : {"fp32, 128 dims", "fp16, 40 dims", "bf16, two dims at once"})
    for (const int from : {0, 1, 30, 256}) {
      SceneSpec spec{.kind = &pool_kind(name), .page_tokens = 16, .kv_heads = 1, .group = 3};
      spec.change = [=](int, int position, std::vector<float>& key, std::vector<float>&) {
        for (float& k : key) k = position >= from ? -INFINITY : std::fabs(k);
      };
      Scene scene(spec, {{1, 270}, {4, 600}, {6, 64}});
      for (int row = 0; row < 3; ++row)
        for (float& q : scene.query(row)) q = std::fabs(q) * 0.1f;
      CAPTURE(name, from);
      check_scene(scene, {});
      check_scene(scene, {.sinks = true});
    }
}

TEST_CASE("soft caps hold their tolerance near saturation") {
  for (const char* name : {"fp32, 128 dims", "fp16, 40 dims"})
    for (const float cap : {15.0f, 30.0f, 50.0f})
      for (const float factor : {0.3f, 1.0f, 3.0f, 10.0f}) {
        Scene scene({.kind = &pool_kind(name), .page_tokens = 16, .kv_heads = 1, .group = 3},
                    {{1, 270}, {6, 64}});
        for (int row = 0; row < 2; ++row)
          for (float& q : scene.query(row)) q *= factor;
        CAPTURE(name, cap, factor);
        check_scene(scene, {.soft_cap = cap});
      }
}
