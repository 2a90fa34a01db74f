// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The CPU reads and writes every quantizer: attend() against ref over pages that append() wrote, for the head
// dims that models have.

#include <vector>

#include "kvfolia/kvfolia.hpp"
#include "support/scenario.hpp"

using namespace kvfolia;
using namespace kvfolia_tests;

namespace {

/// Three rows of 100, 33 and 1 tokens: an exact sink, full pages, tails; then one token more each.
template <class Layout, class Quant>
void check_quantizer(const Quant& quant = {}) {
  CacheConfig config{.shape = {1, 2, 32}, .pages = 12};
  if constexpr (exact_format<Quant> != coded_format) config.exact_pages = 8, config.exact_sink_pages = 1;
  PagedCache<Layout, Quant> cache(config, quant);
  poison(cache);
  Random random(21);
  std::vector<SeqId> ids;
  for (const bool first : {true, false}) {
    Step step = cache.begin_step();
    for (int row = 0; row < 3; ++row) {
      if (first) ids.push_back(*step.create());
      REQUIRE(step.extend(ids[static_cast<std::size_t>(row)], first ? (row == 0   ? 100
                                                                       : row == 1 ? 33
                                                                                  : 1)
                                                                    : 1));
    }
    const Batch batch = run_step(cache, std::move(step), random);
    Attention attention = Attention::make<Layout>(random, batch.tokens(), 6);
    check_attend(cache.view(LayerId{0}), batch.view(), attention, 6);
  }
}

}  // namespace

TEST_CASE("attention over every 8-bit quantizer agrees with ref") {
  check_quantizer<Gqa<64, 32>, KeyValue<Int8Groups<32>, Fp8<>>>();
  check_quantizer<Gqa<64, 32>, KeyValue<Fp8<fp8_e5m2>, Fp8Blocks<>>>();
  check_quantizer<Gqa<64, 32>, KeyValue<Fp8Tensor<>, Q8_0>>({Fp8Tensor<>::calibrated(5.0f), {}});
  check_quantizer<Gqa<64, 32>, KeyValue<Q8_0, Int8Groups<16>>>();
}

TEST_CASE("attention over every 4-bit quantizer agrees with ref") {
  check_quantizer<Gqa<64, 32>, KeyValue<Int4<32>, Int4Symmetric<32>>>();
  check_quantizer<Gqa<64, 32>, KeyValue<Nvfp4, Mxfp4>>({Nvfp4::calibrated(5.0f), {}});
  check_quantizer<Gqa<64, 32>, KeyValue<Q4_0, Nvfp4>>({{}, Nvfp4::calibrated(5.0f)});
  check_quantizer<Gqa<64, 32>, KeyValue<Mxfp4, Q4_0>>();
  check_quantizer<Gqa<64, 32>, KeyValue<Int4Channels<32>, Compact4Channels<16>>>();
  check_quantizer<Gqa<64, 32>, Rotated<Compact4Channels<32>>>();
}

TEST_CASE("attention agrees with ref for every head dim") {
  check_quantizer<Gqa<80, 32>, KeyValue<Rotated<Centered<Int4<32>>>, Nvfp4>>();
  check_quantizer<Gqa<80, 32>, KeyValue<Compact4Channels<32>, Mxfp4>>();
  check_quantizer<Gqa<96, 32>, KeyValue<Rotated<Centered<Int8>>, Rotated<Compact4Channels<32>>>>();
  check_quantizer<Gqa<96, 32>, KeyValue<Q8_0, Int4Channels<32>>>();
  check_quantizer<Gqa<128, 32>, KeyValue<Centered<Fp8<>>, Rotated<Int4<32>>>>();
  check_quantizer<Gqa<128, 32>, KeyValue<Int4Channels<32>, Fp8Blocks<>>>();
  check_quantizer<Gqa<256, 32>, KeyValue<Rotated<Compact4Channels<16>>, Int4<64>>>();
  check_quantizer<Gqa<256, 32>, KeyValue<Centered<Nvfp4>, Mxfp4>>();
}

TEST_CASE("attention over dim-major codes agrees with ref") {
  using DimLayout = Gqa<64, 32, DimMajor<4>, DimMajor<2>>;
  check_quantizer<DimLayout, KeyValue<Int8, Int4<32>>>();
  check_quantizer<DimLayout, KeyValue<Rotated<Compact4Channels<32>>, Nvfp4>>();
  check_quantizer<DimLayout, KeyValue<Centered<Fp8<>>, Mxfp4>>();
}
