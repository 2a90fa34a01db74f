// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// What codes there are, and how they may lie.

#include "simt/decode_check.hpp"

using namespace kvfolia_tests;
using simt::check_decode;

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

TEST_CASE("decode of codes with a scale a group agrees with ref") {
  check_decode<Gqa<128, dynamic>, Int4<32>>({.lengths = {1, 31, 32, 33, 600}});
  check_decode<Gqa<128, dynamic>, Int8Groups<32>>({.lengths = {1, 15, 16, 17, 200}, .page_tokens = 3});
  check_decode<Gqa<128, dynamic>, Mxfp4>({.lengths = {1, 33, 65}});
  check_decode<Gqa<80, dynamic>, Mxfp4>({.lengths = {1, 33, 65}, .page_tokens = 3});
  check_decode<Gqa<96, dynamic>, Int4Symmetric<32>>({.lengths = {1, 33, 65}, .page_tokens = 3});
  check_decode<Gqa<64, dynamic>, KeyValue<Int8Groups<32>, Int4<32>>>(
      {.lengths = {1, 33, 65}, .exact_sink_pages = 1});
}
TEST_CASE("decode of NVFP4 agrees with ref") {
  check_decode<Gqa<128, dynamic>, Nvfp4>({.lengths = {1, 31, 32, 33, 600}});
  check_decode<Gqa<80, dynamic>, Nvfp4>({.lengths = {1, 33, 65}, .page_tokens = 3, .exact_sink_pages = 1});
}
TEST_CASE("decode of codes with parameters a channel agrees with ref") {
  const std::vector<int> lengths = {1, 32, 33, 64, 65, 200, 600};
  check_decode<Gqa<128, dynamic>, KeyValue<Int4Channels<32>, Int4<0>>>(
      {.lengths = lengths, .page_tokens = 32});
  check_decode<Gqa<128, dynamic>, KeyValue<Int4Channels<32>, Int4<32>>>(
      {.lengths = {33, 65}, .group = 11, .page_tokens = 64});
  check_decode<Gqa<80, dynamic>, Int4Channels<32>>({.lengths = lengths, .page_tokens = 64});
  check_decode<Gqa<192, dynamic>, Compact4Channels<16>>({.lengths = lengths, .page_tokens = 16});
}
TEST_CASE("decode of centred codes agrees with ref") {
  const std::vector<int> lengths = {1, 32, 33, 64, 65, 200, 600};
  check_decode<Gqa<128, dynamic>, KeyValue<Centered<Int8>, Int8>>({.lengths = lengths, .page_tokens = 32});
  check_decode<Gqa<96, dynamic>, Centered<Int4<32>, 16>>({.lengths = lengths, .page_tokens = 48});
  check_decode<Gqa<128, dynamic>, Centered<Fp8<>>>({.lengths = {33, 65}, .group = 11, .page_tokens = 32});
}
TEST_CASE("decode of rotated pages agrees with ref") {
  check_decode<Gqa<128, dynamic>, Rotated<Int8>>({.lengths = {1, 33, 65}, .exact_sink_pages = 1});
  check_decode<Gqa<64, dynamic>, Rotated<Compact4Channels<32>>>(
      {.lengths = {1, 33, 64, 200}, .page_tokens = 32});
  check_decode<Gqa<80, dynamic>, KeyValue<Rotated<Int4<0>>, Int8>>({.lengths = {1, 33, 65}});
  check_decode<Gqa<192, dynamic>, KeyValue<Rotated<Int8>, Rotated<Int8, 8>>>({.lengths = {1, 33, 65}});
}
TEST_CASE("decode of two coded formats agrees with ref") {
  check_decode<Gqa<128, dynamic>, Mixed<Int8, Int4<0>>>({.lengths = {1, 33, 64, 65, 200, 600}});
  check_decode<Gqa<128, dynamic>, Mixed<Int8, Int4<0>>>(
      {.lengths = {1, 33, 64}, .group = 11, .page_tokens = 3, .exact_sink_pages = 1});
  using High = KeyValue<Rotated<Centered<Int8>>, Rotated<Int8>>;
  using Low = KeyValue<Rotated<Int4Channels<32>>, Rotated<Int4<0>>>;
  check_decode<Gqa<128, dynamic>, Mixed<High, Low>>(
      {.lengths = {1, 33, 64, 65, 300}, .page_tokens = 32, .exact_sink_pages = 1});
}
TEST_CASE("decode of rows that are made fp16 first agrees with ref") {
  check_decode<Gqa<128, dynamic>, Identity<float>>({.lengths = {1, 33, 65, 600}});
  check_decode<Gqa<128, dynamic>, Q8_0>(
      {.lengths = {1, 33, 64}, .group = 11, .page_tokens = 3, .exact_sink_pages = 1});
  check_decode<Gqa<64, dynamic>, KeyValue<Q8_0, Q4_0>>({.lengths = {1, 33, 64}, .exact_sink_pages = 1});
  check_decode<Gqa<80, dynamic>, KeyValue<Int4<16>, Int8Groups<8>>>(
      {.lengths = {1, 33, 64}, .page_tokens = 3});
  check_decode<Gqa<256, dynamic>, KeyValue<Rotated<Identity<float>>, Rotated<Int4<40>, 8>>>(
      {.lengths = {1, 33, 64}, .group = 9, .exact_sink_pages = 1});
}

namespace {

/// One sequence of 161 tokens, changed by the caller before they are stored, and four heads' queries in fp16.
template <class Quant, class Change>
void check_tokens(const Change& change) {
  constexpr int dims = 128;
  using Layout = Gqa<dims, 32>;
  Random random(3);
  CacheConfig config{.shape = {1, 1, 32}, .pages = 12};
  if constexpr (exact_format<Quant> != coded_format) config.exact_pages = 4;
  PagedCache<Layout, Quant> cache(config);
  poison(cache);
  Step step = cache.begin_step();
  REQUIRE(step.extend(*step.create(), 161));
  const Batch batch = step.commit();
  auto tokens = random_tokens<Layout>(random, batch.tokens(), 1);
  change(random, tokens.keys, tokens.values);
  REQUIRE(cpu::append(cache.view(LayerId{0}), batch, tokens.args(1), cpu::serial));

  const auto view = cache.view(LayerId{0});
  BatchView last = batch;
  const std::int32_t queries[] = {0, 1};
  last.query_indptr = queries;
  const std::int32_t position[] = {160};
  last.query_pos = position;
  Attention a = Attention::make<Layout>(random, 1, 4);
  std::vector<fp16> halves(a.queries.size());
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = fp16(0.1f * a.queries[i]);
  a.args.queries = {halves.data(), a.args.queries.token_stride, a.args.queries.head_stride};
  simt::check_attend(view, last, a, 4);
}

template <class Quant>
void check_biased_keys() {
  check_tokens<Quant>([](Random& random, std::vector<float>& keys, std::vector<float>&) {
    const std::vector<float> biases = random.gauss(128);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] += 300.0f * biases[i % 128];
  });
}
template <class Quant>
void check_zero_values() {
  for (const std::size_t tokens : {161u, 40u, 1u})
    check_tokens<Quant>([&](Random&, std::vector<float>&, std::vector<float>& values) {
      std::fill_n(values.begin(), tokens * 128, 0.0f);
    });
}

}  // namespace

TEST_CASE("biases of keys cost no digits where channels have parameters") {
  check_biased_keys<KeyValue<Centered<Int8>, Int8>>();
  check_biased_keys<Int4Channels<32>>();
  check_biased_keys<Compact4Channels<32>>();
}

TEST_CASE("tokens whose values are 0 keep their weights") {
  check_zero_values<Int8>();
  check_zero_values<Int4<32>>();
  check_zero_values<Int4Symmetric<0>>();
  check_zero_values<Fp8<>>();
  check_zero_values<Fp8Tensor<>>();
  check_zero_values<Fp8Blocks<fp8_e4m3, 64>>();
  check_zero_values<Nvfp4>();
  check_zero_values<Mxfp4>();
  check_zero_values<Int4Channels<32>>();
  check_zero_values<KeyValue<Centered<Int8>, Centered<Nvfp4>>>();
  check_zero_values<Q8_0>();
}

TEST_CASE("a group of values that is not finite leaves other groups alone") {
  // ref's are compared dim by dim: 32 to 63 are NaN.
  constexpr int dims = 128;
  using Layout = Gqa<dims, 32>;
  Random random(4);
  PagedCache<Layout, Int4<32>> cache(CacheConfig{.shape = {1, 1, 32}, .pages = 2});
  Step step = cache.begin_step();
  REQUIRE(step.extend(*step.create(), 5));
  const Batch batch = step.commit();
  auto tokens = random_tokens<Layout>(random, batch.tokens(), 1);
  for (std::size_t d = 0; d < 32; ++d) tokens.values[2 * dims + d] *= 100.0f;
  tokens.values[2 * dims + 40] = INFINITY;
  REQUIRE(cpu::append(cache.view(LayerId{0}), batch, tokens.args(1), cpu::serial));
  const auto view = cache.view(LayerId{0});
  Attention a = Attention::make<Layout>(random, 5, 1);
  const auto expected = ref::attend(view, batch, a.args, 1);
  REQUIRE(expected);
  const auto plan = cuda::plan_attend(view, simt::config_of(batch, 32, 1));
  REQUIRE(plan);
  simt::attend(view, BatchView(batch), a.args, *plan, 1);
  for (std::size_t d = 0; d < dims; ++d) {
    const std::size_t i = 4 * dims + d;
    CAPTURE(d);
    if (std::isnan(expected->out[i]))
      CHECK(std::isnan(a.out[i]));
    else
      CHECK(a.out[i] == Approx(expected->out[i]).margin(0.05));
  }
}
