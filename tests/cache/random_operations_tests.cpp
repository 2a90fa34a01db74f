// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Random steps over the host's pages, with every kind of format and window.

#include "cache/random_run.hpp"

using namespace kvfolia_tests;
using namespace kvfolia_tests::random_run;

namespace {

template <class Layout, class Quant, class Evict = KeepAll>
void random_runs(CacheConfig config, Evict evict = {}) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    INFO("seed " << seed);
    RandomRun<OnHost<Layout, Quant, Evict>>(config, evict, seed).run(120);
  }
}

constexpr CacheShape small{layers, kv_heads, dynamic};

}  // namespace

TEST_CASE("random operations keep what a plain list keeps: fp32") {
  random_runs<Gqa<dim, 4>, Identity<float>>({.shape = small, .pages = 40});
}
TEST_CASE("random operations keep what a plain list keeps: int8 with exact sinks, page-major") {
  random_runs<Gqa<dim, dynamic, DimMajor<4>, SlotPairs<2>>, Int8>({.shape = {layers, kv_heads, 6},
                                                                   .pages = 30,
                                                                   .exact_pages = 12,
                                                                   .exact_sink_pages = 1,
                                                                   .order = StorageOrder::page_major});
}
TEST_CASE("random operations keep what a plain list keeps: fp16 with a window") {
  random_runs<Gqa<dim, 4>, Identity<fp16>>({.shape = small, .pages = 30}, SinkWindow{3, 9});
}
TEST_CASE("random operations keep what a plain list keeps: latent int8 with a window and exact sinks") {
  random_runs<Mla<dim, 4, 1>, Int8>({.shape = small, .pages = 90, .exact_pages = 20, .exact_sink_pages = 2},
                                    SinkWindow{2, 17});
}
TEST_CASE("random operations keep what a plain list keeps: sealed pages of one block") {
  random_runs<Gqa<dim, 4>, Int4Channels<4>>({.shape = small, .pages = 24, .exact_pages = 14});
}
TEST_CASE("random operations keep what a plain list keeps: sealed pages of two blocks with exact sinks") {
  random_runs<Gqa<dim, 8>, Centered<Int8, 4>>(
      {.shape = small, .pages = 16, .exact_pages = 16, .exact_sink_pages = 1});
}
TEST_CASE("random operations keep what a plain list keeps: sealed pages of three blocks, page-major") {
  random_runs<Gqa<dim, dynamic, DimMajor<4>, SlotPairs<2>>, KeyValue<Centered<Int8, 2>, Int8>>(
      {.shape = {layers, kv_heads, 6}, .pages = 16, .exact_pages = 12, .order = StorageOrder::page_major});
}
TEST_CASE("random operations keep what a plain list keeps: sealed rotated pages with a window") {
  random_runs<Gqa<dim, 4>, KeyValue<Rotated<Centered<Int4<0>, 4>>, Rotated<Int4<0>>>>(
      {.shape = small, .pages = 20, .exact_pages = 14}, SinkWindow{3, 9});
}
TEST_CASE("random operations keep what a plain list keeps: keys and values rotated differently") {
  random_runs<Gqa<dim, 4>, KeyValue<Int4Channels<2>, Rotated<Int4<0>>>>(
      {.shape = small, .pages = 20, .exact_pages = 14, .exact_sink_pages = 2}, SinkWindow{6, 5});
}
TEST_CASE(
    "random operations keep what a plain list keeps: latent sealed pages with a window and exact sinks") {
  random_runs<Mla<dim, dim, 4>, Rotated<Centered<Int8, 4>, 8>>(
      {.shape = small, .pages = 20, .exact_pages = 16, .exact_sink_pages = 1}, SinkWindow{5, 11});
}
TEST_CASE("random operations keep what a plain list keeps: demoted pages that are coded as a whole") {
  random_runs<Gqa<dim, 4>, Mixed<Int8, KeyValue<Int4Channels<4>, Int4<0>>>>(
      {.shape = small, .pages = 26, .exact_pages = 8, .low_pages = 8, .exact_sink_pages = 1});
}
TEST_CASE("random operations keep what a plain list keeps: demoted pages, no exact ones") {
  random_runs<Gqa<dim, 4>, Mixed<Int8, Int4<0>>>({.shape = small, .pages = 26, .low_pages = 8},
                                                 SinkWindow{3, 14});
}
TEST_CASE("random operations keep what a plain list keeps: sealed pages that are demoted") {
  random_runs<Gqa<dim, 8>, Mixed<Centered<Int8, 4>, Int4Channels<8>>>(
      {.shape = small, .pages = 16, .exact_pages = 14, .low_pages = 8, .exact_sink_pages = 1},
      SinkWindow{3, 25});
}
TEST_CASE("random operations keep what a plain list keeps: sealed rotated pages that are demoted") {
  random_runs<Gqa<dim, 4>, Mixed<KeyValue<Rotated<Centered<Int8, 2>>, Rotated<Int8>>, Rotated<Int4<0>>>>(
      {.shape = small, .pages = 20, .exact_pages = 14, .low_pages = 6, .order = StorageOrder::page_major});
}
TEST_CASE("random operations keep what a plain list keeps: exact pages that are demoted") {
  random_runs<Gqa<dim, 4>, Mixed<Identity<fp16>, Int4Channels<4>>>(
      {.shape = small, .pages = 26, .low_pages = 8, .exact_sink_pages = 1}, SinkWindow{3, 21});
}
