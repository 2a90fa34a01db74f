// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Kernels that move pages and tokens, and look at keys.

#include "simt/page_scenario.hpp"

#include <string>

using namespace kvfolia_tests;
using simt::check_compact;
using simt::check_stats;

TEST_CASE("pages are copied whole, all layers and formats") { simt::check_copies(); }

TEST_CASE("a copied page carries its scales: attention over the copy is the same") {
  using Layout = Gqa<64, 16>;
  PagedCache<Layout, KeyValue<Int4Channels<16>, Int4<32>>> cache(
      {.shape = {2, 2, dynamic}, .pages = 8, .exact_pages = 2});
  poison(cache);
  Random random(30);
  Step step = cache.begin_step();
  const SeqId id = *step.create();
  REQUIRE(step.extend(id, 32));
  const Batch batch = run_step(cache, std::move(step), random);
  StoreView store;
  store.layers = 2;
  const std::int64_t slice = cache.store().page_bytes(0) / 2;
  store.formats[0] = {cache.store().data(0, 0), cache.store().data(0, 1) - cache.store().data(0, 0),
                      cache.store().page_stride(0), slice, 8};
  const auto pages = cache.sequence(id)->pages;
  const std::vector<PageCopy> copies = {{0, pages[0].entry.page(), PageId{7}},
                                        {0, pages[1].entry.page(), PageId{6}}};
  Arrays arrays = simt::page_arrays(cache);
  arrays.push_back(read_array(copies, "copies"));
  simt::HostRunner::move<cuda::PageMove::copy>({.store = store, .copies = copies.data(), .count = 2}, arrays);
  const std::int32_t table[] = {7, 6};
  for (const int layer : {0, 1}) {
    Attention a = Attention::make<Layout>(random, 32, 4);
    BatchView view = batch;
    const auto original = ref::attend(cache.view(LayerId{layer}), view, a.args, 4);
    view.table.entries = table;
    const auto copied = ref::attend(cache.view(LayerId{layer}), view, a.args, 4);
    REQUIRE((original && copied));
    CHECK(original->out == copied->out);
  }
}

TEST_CASE("pages are gathered into a buffer and scattered from it") { simt::check_buffers(); }

TEST_CASE("moves say what they cannot be given") {
  simt::Slices slices;
  const auto refuses = [&](cuda::PageMove move, cuda::detail::MoveArgs args, const std::string& subject) {
    args.chunks = 1;
    const auto ok = cuda::detail::check_move(args, move);
    REQUIRE(!ok);
    CHECK(std::string(ok.error().subject).find(subject) != std::string::npos);
  };
  const std::int32_t page = 0;
  refuses(cuda::PageMove::copy, {.store = slices.store, .count = -1}, "count");
  refuses(cuda::PageMove::copy, {.store = slices.store, .count = 1}, "copies");
  refuses(cuda::PageMove::gather, {.store = slices.store, .count = 1, .format = 0}, "pages");
  refuses(cuda::PageMove::gather, {.store = slices.store, .pages = &page, .count = 1, .format = 3}, "format");
  refuses(cuda::PageMove::scatter, {.store = slices.store, .pages = &page, .count = 1}, "buffer");
  auto shifted = slices.store;
  shifted.formats[0].base += 8;
  refuses(cuda::PageMove::copy, {.store = shifted, .count = 1}, "store.formats (alignment)");
}

TEST_CASE("tokens that a mask keeps move to the front of their tables") {
  check_compact<Gqa<128, dynamic>, Int8>(16, false);
  check_compact<Gqa<128, dynamic>, Int4<0>>(16, true);
  check_compact<Gqa<64, dynamic>, Int8>(3, true);
  check_compact<Gqa<128, dynamic>, Identity<fp16>>(32, true);
  check_compact<Gqa<96, dynamic>, KeyValue<Int8, Int4<32>>>(8, false);
  check_compact<Mla<128, 64, dynamic>, Sections<Section<Fp8Blocks<>, 128>, Section<Identity<bf16>, 64, 16>>>(
      4, false);
  static_assert(!cuda::compact_supported<Gqa<64>, Int4Channels<32>>());
}

TEST_CASE("pages' smallest, largest and mean keys") {
  check_stats<Identity<fp16>>();
  check_stats<Int8>(1);
  check_stats<KeyValue<Int4Channels<16>, Int4<32>>>();
  check_stats<Rotated<Centered<Int4<32>, 16>>>();
  check_stats<Compact4Channels<16>>();
  check_stats<Q4_0>();
}
