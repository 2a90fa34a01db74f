// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Page sizes, groups, head dims, formats; what reading costs; and that nothing depends on who runs when.

#include "simt/decode_check.hpp"

using namespace kvfolia_tests;
using simt::check_decode;

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

TEST_CASE("GPUs with less shared memory agree with ref") {
  const simt::DecodeSetup setup{.lengths = {1, 65, 140, 600}, .seeds = 2};
  check_decode<Gqa<128, dynamic>, Identity<fp16>, 80>(setup);
  check_decode<Gqa<128, dynamic>, Int8, 86>(setup);
  check_decode<Gqa<256, dynamic>, Identity<bf16>, 80>(setup);
  check_decode<Gqa<256, dynamic>, Identity<fp16>, 89>(setup);
}

TEST_CASE("what a block takes fits every compute capability") {
  const auto check = []<class Layout, class Quant, int Tiles>() {
    const auto fits = []<int Capability>() {
      using Shape = cuda::detail::DecodeShape<Layout, Quant, Tiles, 0, Capability>;
      CAPTURE(Capability, Shape::warps, Shape::stages, Shape::shared_bytes);
      CHECK(Shape::shared_bytes <= cuda::tuning(Capability).block_bytes);
      CHECK(Shape::stages >= 2);
    };
    fits.template operator()<80>();
    fits.template operator()<86>();
    fits.template operator()<89>();
    fits.template operator()<90>();
    fits.template operator()<100>();
  };
  check.template operator()<Gqa<256>, Identity<bf16>, 1>();
  check.template operator()<Gqa<256>, Identity<float>, 1>();
  check.template operator()<Gqa<192>, Identity<float>, 1>();
  check.template operator()<Gqa<128>, Identity<float>, 2>();
  check.template operator()<Gqa<128>, Identity<bf16>, 2>();
  check.template operator()<Gqa<128>, Int8, 2>();
  check.template operator()<Gqa<128>, Compact4Channels<32>, 2>();
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
  // Two heads' keys and values, 128 dims of two bytes; tables and queries may be a tenth of them.
  CHECK(fp16_pages.decode.reads.sectors * 100 <= std::uint64_t{2 * 2 * 512 * 128 * 2 / 32} * 110);
  CHECK(fp16_pages.decode.mma == 2 * 512 / 16 * (8 + 8));
  const simt::Ran int8_pages = count_decode<Int8>();
  CHECK(int8_pages.decode.reads.sectors * 100 <= std::uint64_t{2 * 2 * 512 * (128 + 2) / 32} * 110);
}
