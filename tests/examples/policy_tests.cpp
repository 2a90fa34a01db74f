// SPDX-FileCopyrightText: The kvfolia authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "common/policy.hpp"

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/kv_cache.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

using namespace kvfolia_examples;

namespace {

std::string refusal(const std::string& name) {
  try {
    parse_policy(name);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("policy names are read as they are written") {
  const Policy plain = parse_policy("bf16");
  CHECK(plain.keys == Policy::Part{"bf16"});
  CHECK(plain.values == Policy::Part{"bf16"});
  CHECK(!plain.window);
  CHECK(!plain.mixed);
  CHECK(plain.exact_sink_pages == 0);
  const Policy all = parse_policy("int8+sink:2+window:1024,8+mixed:12.5");
  CHECK(all.keys.base == "int8");
  CHECK(all.exact_sink_pages == 2);
  CHECK(all.window == 1024);
  CHECK(all.sink_tokens == 8);
  CHECK(all.mixed == 12.5);
  CHECK(parse_policy("fp16+window:7").sink_tokens == 4);
  CHECK(parse_policy("fp32+window:1,0").sink_tokens == 0);
}

TEST_CASE("adaptors belong to the keys without a slash, to their own side with one") {
  const Policy keys = parse_policy("int4-g32+centered+rotated");
  CHECK(keys.keys == Policy::Part{"int4-g32", true, true});
  CHECK(keys.values == Policy::Part{"int4-g32"});
  CHECK(keys.parts() == "int4-g32+centered+rotated");
  CHECK(parse_policy("int4-g32+rotated+centered+sink:1").parts() == "int4-g32+centered+rotated");
  const Policy both = parse_policy("int8+centered/int4-g32+rotated+sink:1");
  CHECK(both.keys == Policy::Part{"int8", true});
  CHECK(both.values == Policy::Part{"int4-g32", false, true});
  CHECK(both.exact_sink_pages == 1);
  CHECK(both.parts() == "int8+centered/int4-g32+rotated");
  CHECK(parse_policy("int8/int8").parts() == "int8");
}

TEST_CASE("other policy names are refused with what there is") {
  for (const char* name : {"",
                           "int7",
                           "int8/int4",
                           "fp16+",
                           "fp16/",
                           "/fp16",
                           "fp16/int8/int8",
                           "fp16+sink:1/int8",
                           "fp16+window",
                           "fp16+window:",
                           "fp16+window:0",
                           "fp16+window:8,",
                           "fp16+window:8,-1",
                           "fp16+window:1e3",
                           "fp16+sink:0",
                           "fp16+sink:x",
                           "fp16+sink:1+sink:2",
                           "fp16+window:8+window:9",
                           "int8/int8+centered",
                           "int8+centered+centered",
                           "int8+sink:1+rotated",
                           "int8+mixed:101",
                           "int8+mixed:",
                           "int8+mixed:-1",
                           "fp16++sink:1",
                           "fp16+window:99999999999"}) {
    CAPTURE(name);
    CHECK(refusal(name).starts_with("policy '" + std::string(name) + "': "));
  }
  CHECK(refusal("int7").find(policy_help) != std::string::npos);
}

TEST_CASE("KIVI's values are coded by token, also without a slash") {
  CHECK(parse_policy("kivi4").values.base == "int4-g32");
  CHECK(parse_policy("kivi4/int4-g32").parts() == "kivi4");
  CHECK(parse_policy("kivi4-g64").values.base == "int4-g64");
  CHECK(parse_policy("kivi4/kivi4").parts() == "kivi4/kivi4");
  CHECK_THROWS_AS(require_kernels(parse_policy("kivi4/kivi4")), std::invalid_argument);
}

namespace {

constexpr KvShape shape{2, 4, 2, 64};

/// Outputs of 200 tokens, in steps of 70 and then one by one, on two layers.
std::vector<float> run(KvCache& cache) {
  kvfolia_tests::Random random(5);
  const SeqId sequence = cache.create();
  std::vector<float> all;
  for (int done = 0; done < 200;) {
    const int tokens = done < 140 ? 70 : 1;
    const KvCache::Row row{sequence, tokens};
    cache.begin({&row, 1});
    for (int layer = 0; layer < shape.layers; ++layer) {
      const auto count = static_cast<std::size_t>(tokens * 64);
      const std::vector<float> q = random.gauss(count * 4), k = random.gauss(count * 2),
                               v = random.gauss(count * 2);
      std::vector<float> out(q.size());
      cache.attend(layer, q.data(), k.data(), v.data(), out.data());
      all.insert(all.end(), out.begin(), out.end());
    }
    cache.end();
    done += tokens;
  }
  return all;
}

double relative_error(const std::vector<float>& x, const std::vector<float>& right) {
  double error = 0.0, size = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (double{x[i]} - double{right[i]}) * (double{x[i]} - double{right[i]});
    size += double{right[i]} * double{right[i]};
  }
  return std::sqrt(error / size);
}

}  // namespace

TEST_CASE("every policy that is listed runs, and errs as its bits let one expect") {
  const KvOptions exact{.policy = parse_policy("fp32"), .page_tokens = 64, .max_tokens = 200};
  const std::vector<float> right = run(*make_kv_cache(shape, exact));
  for (const std::string& parts : instantiated_parts()) {
    CAPTURE(parts);
    const std::size_t percent = parts.find("PERCENT");
    KvOptions options = exact;
    options.policy = parse_policy(percent == std::string::npos ? parts : parts.substr(0, percent) + "50");
    options.calibration = {5.0f, 5.0f};
    const auto cache = make_kv_cache(shape, options);
    const double error = relative_error(run(*cache), right);
    // Gaussian keys and values with logits of deviation 1: the worst medians of the simulated table's
    // column A are 0.93% for 8-bit integers, 3.7% for e4m3 (twice that for e5m2), 16% for 4 bits.
    const double bits = cache->bits_per_value();
    const bool is_fp8 = parts.find("fp8") != std::string::npos;
    CHECK(bits >= 4.0);
    CHECK(bits <= 32.0);
    CHECK(error <= (bits < 8.0 ? 0.24 : is_fp8 ? 0.12 : 0.015));
  }
  const KvOptions unknown{.policy = parse_policy("mxfp4/fp32"), .max_tokens = 8};
  CHECK_THROWS_WITH(make_kv_cache(shape, unknown), kvfolia_tests::contains_text("int8+centered"));
  const KvOptions blocks{.policy = parse_policy("kivi4"), .page_tokens = 16, .max_tokens = 8};
  CHECK_THROWS_WITH(make_kv_cache(shape, blocks), kvfolia_tests::contains_text("blocks of 32"));
}

TEST_CASE("a mixed policy keeps its share of full pages in the high format, and those looked at most") {
  KvOptions options{.policy = parse_policy("int8+mixed:25"), .page_tokens = 32, .max_tokens = 300};
  const auto cache = make_kv_cache({1, 1, 1, 64}, options);
  const SeqId sequence = cache->create();
  // Page 5's keys are what every query looks for.
  std::vector<float> keys(256 * 64, 0.0f), values(keys), queries(keys), out(keys);
  for (std::size_t t = 0; t < 256; ++t) {
    queries[t * 64] = 8.0f;
    keys[t * 64] = t / 32 == 5 ? 8.0f : -8.0f;
    for (std::size_t d = 0; d < 64; ++d) values[t * 64 + d] = static_cast<float>((t * 7 + d * 3) % 17) - 8.0f;
  }
  const KvCache::Row all{sequence, 256};
  cache->begin({&all, 1});
  cache->attend(0, queries.data(), keys.data(), values.data(), out.data());
  cache->end();
  // Two of eight pages stay in 8.25 bits, the others have 5.
  CHECK(cache->bits_per_value() == Approx((2 * 8.25 + 6 * 5.0) / 8));
  // What every query looks at is still exact to 8 bits: the mean of page 5's values.
  const KvCache::Row one{sequence, 1};
  cache->begin({&one, 1});
  std::vector<float> key(64, 0.0f), value(64, 0.0f), got(64);
  key[0] = -8.0f;
  cache->attend(0, queries.data(), key.data(), value.data(), got.data());
  cache->end();
  for (std::size_t d = 0; d < 64; ++d) {
    double mean = 0.0;
    for (std::size_t t = 160; t < 192; ++t) mean += double{values[t * 64 + d]} / 32;
    CHECK(std::fabs(got[d] - mean) <= 8.0 / 127 / 2);
  }
}

TEST_CASE("head dims without kernels are refused by name") {
  const KvOptions options{.policy = parse_policy("fp16"), .max_tokens = 8};
  CHECK_THROWS_WITH(make_kv_cache({1, 4, 2, 80}, options), kvfolia_tests::contains_text("head dim 80"));
  CHECK(make_kv_cache({1, 4, 2, 128}, options) != nullptr);
}
