// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "simt/decode_scenario.hpp"

using namespace kvfolia_tests;

namespace {

/// What the design allows kernels whose operands are fp16, or bf16.
template <class Quant>
constexpr double tolerance = std::is_same_v<Quant, Identity<bf16>> ? 4e-3 : fp16_tolerance;

struct Setup {
  std::vector<int> lengths{};
  int kv_heads = 2;
  int group = 4;
  int page_tokens = 16;
  int seeds = 3;
  int exact_sink_pages = 0;
  StorageOrder order = StorageOrder::layer_major;
};

/// Sequences of some lengths, each with its newest token's query: the same bits with every seed, and what
/// ref says.
template <class Layout, class Quant>
void check_decode(const Setup& setup) {
  Random random(99);
  CacheConfig config;
  config.shape = {1, setup.kv_heads, setup.page_tokens};
  config.pages = 1;
  for (const int length : setup.lengths) config.pages += (length + setup.page_tokens) / setup.page_tokens + 1;
  config.order = setup.order;
  config.exact_pages = setup.exact_sink_pages * static_cast<int>(setup.lengths.size());
  config.exact_sink_pages = setup.exact_sink_pages;
  PagedCache<Layout, Quant> cache(config);
  poison(cache);
  std::vector<SeqId> sequences;
  for (const bool last : {false, true}) {
    Step step = cache.begin_step();
    for (std::size_t i = 0; i < setup.lengths.size(); ++i) {
      if (!last) sequences.push_back(*step.create());
      REQUIRE(step.extend(sequences[i], last ? 1 : setup.lengths[i] - 1));
    }
    const Batch batch = run_step(cache, std::move(step), random);
    if (!last) continue;
    const int heads = setup.kv_heads * setup.group;
    const auto view = cache.view(LayerId{0});
    Attention a = Attention::make<Layout>(random, batch.tokens(), heads);
    const auto expected = ref::attend(view, batch, a.args, heads);
    REQUIRE(expected);
    const auto plan = cuda::plan_attend(view, simt::config_of(batch, setup.page_tokens, heads));
    REQUIRE(plan);
    std::vector<float> first;
    for (int seed = 0; seed < setup.seeds; ++seed) {
      std::fill(a.out.begin(), a.out.end(), NAN);
      simt::attend(view, batch, a.args, *plan, static_cast<std::uint64_t>(seed));
      if (seed == 0) {
        first = a.out;
        check_close(compare(a.out, a.lse, *expected), tolerance<Quant>);
      }
      CHECK(std::memcmp(first.data(), a.out.data(), first.size() * sizeof(float)) == 0);
    }
  }
}

}  // namespace

// Lengths around parts of 16 tokens, tiles of a warp and of a block, and splits.

TEST_CASE("decode of fp16 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Identity<fp16>>({.lengths = {1, 2, 15, 16, 17, 63, 64, 65, 200, 513}});
}
TEST_CASE("decode of bf16 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Identity<bf16>>({.lengths = {1, 16, 17, 129, 520}});
}
TEST_CASE("decode of Int8 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Int8>({.lengths = {1, 2, 15, 16, 17, 63, 64, 65, 200, 513}});
}
TEST_CASE("decode of 4-bit codes agrees with ref") {
  check_decode<Gqa<128, dynamic>, Int4<0>>({.lengths = {1, 2, 31, 32, 33, 127, 128, 129, 600}});
  check_decode<Gqa<128, dynamic>, Int4Symmetric<0>>({.lengths = {1, 33, 65, 600}});
}
TEST_CASE("decode of fp8 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Fp8<>>({.lengths = {1, 2, 15, 16, 17, 40, 200}});
  check_decode<Gqa<128, dynamic>, Fp8<fp8_e5m2>>({.lengths = {1, 33}});
}
TEST_CASE("decode of keys and values that are coded differently agrees with ref") {
  check_decode<Gqa<128, dynamic>, KeyValue<Int8, Int4<0>>>({.lengths = {1, 31, 32, 33, 600}});
}

TEST_CASE("every page size and storage order agrees with ref") {
  for (const int page_tokens : {1, 3, 16, 64}) {
    CAPTURE(page_tokens);
    check_decode<Gqa<128, dynamic>, Int8>({.lengths = {1, 3, 17, 65, 140}, .page_tokens = page_tokens});
    check_decode<Gqa<128, dynamic>, Int8>(
        {.lengths = {5, 70}, .page_tokens = page_tokens, .order = StorageOrder::page_major});
  }
}

TEST_CASE("every group size agrees with ref") {
  for (int group = 1; group <= 17; ++group) {
    CAPTURE(group);
    check_decode<Gqa<128, dynamic>, Int8>({.lengths = {1, 70}, .kv_heads = 1, .group = group, .seeds = 2});
  }
}

TEST_CASE("every head dim agrees with ref") {
  check_decode<Gqa<64, 16>, Identity<fp16>>({.lengths = {1, 40}, .seeds = 1});
  check_decode<Gqa<80, 16>, Int8>({.lengths = {1, 40}, .seeds = 1});
  check_decode<Gqa<96, 16>, Identity<fp16>>({.lengths = {1, 40}, .seeds = 1});
  check_decode<Gqa<112, 16>, Int4<0>>({.lengths = {1, 70}, .seeds = 1});
  check_decode<Gqa<192, 16>, Fp8<>>({.lengths = {1, 40}, .seeds = 1});
  check_decode<Gqa<256, 16>, Identity<fp16>>({.lengths = {1, 40}, .group = 9, .seeds = 1});
}

TEST_CASE("exact first pages agree with ref beside coded ones") {
  for (const int page_tokens : {3, 16}) {
    CAPTURE(page_tokens);
    check_decode<Gqa<128, dynamic>, Int8>(
        {.lengths = {1, 3, 17, 40, 65, 140}, .page_tokens = page_tokens, .exact_sink_pages = 2});
  }
  check_decode<Gqa<128, dynamic>, KeyValue<Int4<0>, Int8>>({.lengths = {1, 40, 200}, .exact_sink_pages = 1});
}

TEST_CASE("any schedule gives the same bits") {
  check_decode<Gqa<128, dynamic>, Int8>(
      {.lengths = {5, 131}, .kv_heads = 1, .group = 5, .page_tokens = 3, .seeds = 50});
  check_decode<Gqa<128, dynamic>, Identity<fp16>>(
      {.lengths = {5, 131}, .kv_heads = 1, .group = 16, .page_tokens = 64, .seeds = 50});
}

namespace {

/// What reading one sequence of 512 tokens costs, with eight heads a KV head.
template <class Quant>
simt::Ran count_decode() {
  using Layout = Gqa<128, dynamic>;
  Random random(5);
  PagedCache<Layout, Quant> cache(CacheConfig{.shape = {1, 2, 16}, .pages = 40});
  SeqId sequence;
  for (const int tokens : {511, 1}) {
    Step step = cache.begin_step();
    if (tokens > 1) sequence = *step.create();
    REQUIRE(step.extend(sequence, tokens));
    const Batch batch = run_step(cache, std::move(step), random);
    if (tokens > 1) continue;
    Attention a = Attention::make<Layout>(random, 1, 16);
    const auto view = cache.view(LayerId{0});
    const auto plan = cuda::plan_attend(view, simt::config_of(batch, 16, 16));
    REQUIRE(plan);
    return simt::attend(view, batch, a.args, *plan, 1, true);
  }
  return {};
}

}  // namespace

TEST_CASE("pages are read once, coalesced, and 16-bit ones without bank conflicts") {
  const simt::Ran fp16_pages = count_decode<Identity<fp16>>();
  CHECK(fp16_pages.decode.bank_conflicts == 0);
  // Two heads' keys and values, 128 dims of two bytes; tables and queries are little beside them.
  CHECK(fp16_pages.decode.reads.sectors <= 2 * 2 * 512 * 128 * 2 / 32 * 1.05);
  CHECK(fp16_pages.decode.mma == 2 * 512 / 16 * (8 + 8));
  const simt::Ran int8_pages = count_decode<Int8>();
  CHECK(int8_pages.decode.reads.sectors <= 2 * 2 * 512 * (128 + 2) / 32 * 1.1);
}
